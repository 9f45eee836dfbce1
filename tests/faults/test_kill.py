"""Processes are killed at random moments: no request is lost, no weight is read again, nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon import Daemon, alive, daemon, until
from holdings import arena_holders, arena_inode
from kill_table import Row, kill_child, kill_supervisor
from service_manager import Managed

from spark_client import ConnectionFailed, RequestFailed

LIMITS = {"context": 4096, "sequences": 2}
#: CI kills each process a few times, `make soak` by the dozen.
KILLS = pytest.mark.parametrize("kills", [3, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])


@KILLS
@pytest.mark.parametrize("role", ["worker", "store", "calibrator"])
def test_a_killed_child_costs_a_pause_and_nothing_else(
    model: Path, tmp_path: Path, note: Callable[[str, list[str]], None], role: str, kills: int
) -> None:
    with daemon(model, tmp_path / "run", limits=LIMITS) as one:
        row = kill_child(one, role, kills)
    note(Row.heading(), row.lines())
    assert row.kills == kills and row.streams == 2 * kills
    assert row.read_bytes == 0
    assert row.after == row.before


@KILLS
def test_a_killed_supervisor_is_followed_by_one_that_reads_no_weight_again(
    model: Path, tmp_path: Path, note: Callable[[str, list[str]], None], kills: int
) -> None:
    one = Managed(model, tmp_path / "run", limits=LIMITS)
    try:
        row = kill_supervisor(one.ready(), kills)
    finally:
        one.close()
    note(Row.heading(), row.lines())
    assert row.kills == kills and row.streams == 2 * kills
    assert row.read_bytes == 0
    assert row.after == row.before


def test_a_killed_supervisor_takes_its_children_along_and_the_next_start_works(model: Path, tmp_path: Path) -> None:
    with daemon(model, tmp_path / "run", limits=LIMITS) as one:
        pids = one.pids()
        arena = arena_inode(one.process.pid)
        assert len(arena_holders(arena)) == 3
        client = one.client()
        stream = client.generate(tokens=[1], max_tokens=4000, ignore_eos=True)
        next(stream.events())
        one.process.kill()
        one.process.wait()
        with pytest.raises(ConnectionFailed):
            stream.read(60)
        client.close()
        until(lambda: not any(alive(pid) for pid in pids))
        assert arena_holders(arena) == set()
        one.start()
        one.ready()
        with one.client() as client:
            client.generate(tokens=[1], max_tokens=4, ignore_eos=True).read()
        assert one.stop() == 0
        assert list(one.run_dir.iterdir()) == []


@pytest.mark.parametrize("role", ["store", "worker"])
def test_a_child_that_is_killed_while_the_model_is_loaded_begins_again(model: Path, tmp_path: Path, role: str) -> None:
    one = Daemon(model, tmp_path / "run", limits=LIMITS)
    try:
        with one.client() as client:
            waiting = client.generate(tokens=[1, 2, 3], max_tokens=8, ignore_eos=True)
            os.kill(one.pid(role), signal.SIGKILL)
            until(lambda: client.status()["state"] == "ready", one.said)
            waiting.read(60)
            assert len(waiting.tokens) == 8
            loading = client.status()["loading"]
            assert loading["read_bytes"] <= loading["total_bytes"] == loading["done_bytes"]
    finally:
        one.process.kill()
        one.process.wait()


def test_a_worker_that_is_killed_while_it_reads_a_prompt_reads_it_again_and_no_weight(
    model: Path, tmp_path: Path
) -> None:
    prompt = [100 + n % 300 for n in range(3000)]
    with daemon(model, tmp_path / "run", limits=LIMITS, scheduler={"max_step_ms": 5}) as one, one.client() as client:
        undisturbed = client.generate(tokens=prompt, max_tokens=8, ignore_eos=True)
        undisturbed.read(120)
        read = client.status()["loading"]["read_bytes"]
        stream = client.generate(tokens=prompt, max_tokens=8, ignore_eos=True)
        for event in stream.events():
            if getattr(event, "stage", "") == "prefill":
                assert 0 < event.done < event.total
                one.kill("worker")
                break
        stream.read(120)
        assert stream.tokens == undisturbed.tokens
        assert client.status()["loading"]["read_bytes"] == read > 0


def test_a_worker_that_always_dies_leaves_a_daemon_that_says_so(model: Path, tmp_path: Path) -> None:
    with daemon(model, tmp_path / "run", limits=LIMITS) as one, one.client() as client:
        deadline = time.monotonic() + 60
        while "times within" not in client.status()["reason"]:
            assert time.monotonic() < deadline, one.said()
            worker = next(p for p in client.status()["processes"] if p["role"] == "worker")
            with contextlib.suppress(ProcessLookupError):
                if worker["pid"] is not None:
                    os.kill(worker["pid"], signal.SIGKILL)
        status = client.status()
        assert status["state"] == "degraded" and "killed by SIGKILL" in status["reason"]
        with pytest.raises(RequestFailed, match="SIGKILL"):
            client.generate(tokens=[1], max_tokens=4).read()
        assert "stays down until 'sparkctl reload'" in status["reason"]
        one.process.send_signal(signal.SIGHUP)
        until(lambda: client.status()["state"] == "ready", one.said)
        assert client.status()["reload"]["revived"] == ["worker"] and client.status()["reason"] == ""
        stream = client.generate(tokens=[1], max_tokens=4, ignore_eos=True)
        stream.read()
        assert len(stream.tokens) == 4
        assert one.stop() == 0
