"""Processes are killed at random moments: no request is lost, no weight is read again, nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon import Daemon, alive, daemon, until

from spark_client import Client, ConnectionFailed

TOKENS = 800
KILLS = 3


@pytest.fixture
def served(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Daemon]:
    with daemon(model_path("laguna-tiny-s1-q4_k_m"), tmp_path / "run", limits={"context": 4096}) as one:
        yield one


def start(client: Client):
    return client.generate(tokens=list(range(100, 140)), max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=7)


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def arena_holders(inode: int) -> set[int]:
    """Processes, anywhere on this machine, with a descriptor of the arena with this inode."""
    holders = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if is_arena(entry) and entry.stat().st_ino == inode:
                holders.add(int(entry.parts[2]))
    return holders


def arena_inode(pid: int) -> int:
    return next(entry.stat().st_ino for entry in Path(f"/proc/{pid}/fd").iterdir() if is_arena(entry))


def is_arena(entry: Path) -> bool:
    return "memfd:sparkd-arena" in str(entry.readlink())


def all_ready(client: Client) -> bool:
    return client.status()["state"] == "ready"


@pytest.mark.parametrize("role", ["worker", "store", "calibrator"])
def test_a_killed_child_costs_a_pause_and_nothing_else(served: Daemon, role: str) -> None:
    moments = random.Random(role)
    with served.client() as client:
        undisturbed = start(client)
        text = undisturbed.read()
        baseline = descriptors(served.process.pid)
        for kill in range(KILLS):
            stream = start(client)
            events = stream.events()
            while len(stream.tokens) < moments.randrange(TOKENS // 2):
                next(events)
            served.kill(role)
            assert stream.read(60) == text
            assert stream.tokens == undisturbed.tokens
            until(lambda: all_ready(client), served.said)
            status = client.status()
            killed = next(p for p in status["processes"] if p["role"] == role)
            assert killed["restarts"] == kill + 1
            store = next(p for p in status["processes"] if p["role"] == "store")
            assert (status["loading"]["read_bytes"] == 0) == (store["restarts"] > 0)
        assert status["memory"]["state_used_bytes"] == 0
        assert descriptors(served.process.pid) == baseline


def test_a_killed_supervisor_takes_its_children_along_and_the_next_start_works(served: Daemon) -> None:
    for _ in range(KILLS):
        pids = served.pids()
        arena = arena_inode(served.process.pid)
        assert len(arena_holders(arena)) == 3
        client = served.client()
        stream = start(client)
        next(stream.events())
        served.process.kill()
        served.process.wait()
        with pytest.raises(ConnectionFailed):
            stream.read(60)
        client.close()
        until(lambda: not any(alive(pid) for pid in pids))  # noqa: B023 - called before the next turn
        assert arena_holders(arena) == set()
        served.start()
        served.ready()
    with served.client() as client:
        stream = client.generate(tokens=[1], max_tokens=4, ignore_eos=True)
        stream.read()
    assert served.stop() == 0
    assert list(served.run_dir.iterdir()) == []


@pytest.mark.parametrize("role", ["store", "worker"])
def test_a_child_that_is_killed_while_the_model_is_loaded_begins_again(
    model_path: Callable[[str], Path], tmp_path: Path, role: str
) -> None:
    one = Daemon(model_path("laguna-tiny-s1-q4_k_m"), tmp_path / "run", limits={"context": 4096})
    try:
        with one.client() as client:
            waiting = client.generate(tokens=[1, 2, 3], max_tokens=8, ignore_eos=True)
            os.kill(one.pid(role), signal.SIGKILL)
            until(lambda: all_ready(client), one.said)
            waiting.read(60)
            assert len(waiting.tokens) == 8
    finally:
        one.process.kill()
        one.process.wait()


def test_a_worker_that_always_dies_leaves_a_daemon_that_says_so(served: Daemon) -> None:
    with served.client() as client:
        deadline = time.monotonic() + 60
        while "times within" not in client.status()["reason"]:
            assert time.monotonic() < deadline, served.said()
            worker = next(p for p in client.status()["processes"] if p["role"] == "worker")
            with contextlib.suppress(ProcessLookupError):
                if worker["pid"] is not None:
                    os.kill(worker["pid"], signal.SIGKILL)
        status = client.status()
        assert status["state"] == "degraded" and "killed by SIGKILL" in status["reason"]
        with pytest.raises(Exception, match="SIGKILL"):
            client.generate(tokens=[1], max_tokens=4).read()
    assert served.stop() == 0
