"""A stopped process is noticed and replaced, one that hangs too, and one that only works long is left alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import running, until
from odd_daemon import LOST_S, OddDaemon
from odd_worker import SLOW, SLOW_S, STUCK

from spark_client import Client, RequestFailed

LIMITS = {"context": 4096, "sequences": 2}


@pytest.fixture(scope="module")
def served(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OddDaemon]:
    run_dir = tmp_path_factory.mktemp("daemon") / "run"
    with running(OddDaemon(model_path("laguna-tiny-s1-q4_k_m"), run_dir, limits=LIMITS)) as one:
        one.ready()
        yield one


def start(client: Client, first: int = 1, count: int = 1500) -> Any:
    return client.generate(tokens=[first, 2, 3], max_tokens=count, ignore_eos=True, temperature=1.0, seed=3)


def process(client: Client, role: str) -> dict[str, Any]:
    return next(p for p in client.status()["processes"] if p["role"] == role)


def state(client: Client) -> str:
    return client.status()["state"]


def restarts(client: Client) -> dict[str, int]:
    return {p["role"]: p["restarts"] for p in client.status()["processes"]}


def test_a_stopped_worker_is_reported_and_replaced_and_its_requests_are_resumed(
    served: OddDaemon, note: Callable[[str, list[str]], None]
) -> None:
    with served.client() as client:
        undisturbed = start(client).read(60)
        before = restarts(client)
        stream = start(client)
        next(stream.events())
        pid = served.pid("worker")
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: state(client) == "degraded", served.said)
        note("seconds from SIGSTOP of the worker to", [f"degraded  {time.monotonic() - stopped:.2f}"])
        assert process(client, "worker")["state"] == "silent"
        assert "worker has shown no life" in client.status()["reason"]
        with pytest.raises(RequestFailed, match="shown no life") as refused:
            start(client)
        assert refused.value.retry
        assert stream.read(60) == undisturbed
        note("seconds from SIGSTOP of the worker to", [f"its stream's end {time.monotonic() - stopped:.2f}"])
        until(lambda: state(client) == "ready", served.said)
        assert restarts(client) == before | {"worker": before["worker"] + 1} and served.pid("worker") != pid
        assert f"showed no life for {LOST_S:.0f} s and was killed" in served.said()
        assert start(client).read(60) == undisturbed


def test_a_process_that_goes_on_in_time_is_not_replaced(served: OddDaemon) -> None:
    with served.client() as client:
        undisturbed = start(client).read(60)
        before = restarts(client)
        stream = start(client)
        next(stream.events())
        pid = served.pid("worker")
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(client) == "degraded", served.said)
        os.kill(pid, signal.SIGCONT)
        until(lambda: state(client) == "ready", served.said)
        assert stream.read(60) == undisturbed
        assert client.status()["reason"] == "" and restarts(client) == before


def test_without_store_and_calibrator_requests_are_served_until_both_are_replaced(served: OddDaemon) -> None:
    with served.client() as client:
        undisturbed = start(client).read(60)
        before = restarts(client)
        for role in ("store", "calibrator"):
            os.kill(served.pid(role), signal.SIGSTOP)
        until(lambda: "store" in (s := client.status()["reason"]) and "calibrator" in s, served.said)
        assert start(client).read(60) == undisturbed
        until(lambda: state(client) == "ready", served.said)
        changed = {role: count - before[role] for role, count in restarts(client).items()}
        assert changed == {"supervisor": 0, "store": 1, "worker": 0, "calibrator": 1}
        assert client.status()["loading"]["read_bytes"] == 0
        assert start(client).read(60) == undisturbed


def test_a_long_step_is_not_mistaken_for_a_stuck_one(served: OddDaemon) -> None:
    with served.client() as client, served.client() as watcher:
        before = restarts(client)
        stream = start(client, SLOW, 20)
        began = time.monotonic()
        states = set()
        while time.monotonic() < began + SLOW_S:
            states.add(state(watcher))
        stream.read(60)
        assert states == {"ready"} and restarts(client) == before


def test_a_step_that_never_ends_costs_the_worker_and_not_the_request(served: OddDaemon) -> None:
    with served.client() as client:
        tokens = []
        before = restarts(client)
        for _ in range(2):
            stream = start(client, STUCK, 30)
            stream.read(60)
            tokens.append(stream.tokens)
            until(lambda: state(client) == "ready", served.said)
            assert restarts(client) == before | {"worker": before["worker"] + 1}
        assert tokens[0] == tokens[1] and len(tokens[0]) == 30
        assert "got no further" in served.said()


def test_a_supervisor_that_was_stopped_does_not_blame_its_children(served: OddDaemon) -> None:
    with served.client() as client:
        before = restarts(client)
        stream = start(client)
        next(stream.events())
        served.process.send_signal(signal.SIGSTOP)
        time.sleep(LOST_S + 1)
        served.process.send_signal(signal.SIGCONT)
        stream.read(60)
        assert state(client) == "ready"
        assert restarts(client) == before
