"""A worker that is stopped, or that a request kills: others wait or are refused in clear words, and go on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import PATIENCE_S, Daemon, daemon, until

from spark_client import Client, RequestFailed, Stream

LIMITS = {"context": 4096, "sequences": 2}
PROMPT = list(range(100, 140))


@pytest.fixture
def served(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Daemon]:
    with daemon(model_path("laguna-tiny-s1-q4_k_m"), tmp_path / "run", limits=LIMITS) as one:
        yield one


def ask(client: Client, prompt: list[int] = PROMPT, count: int = 600) -> Stream:
    return client.generate(tokens=prompt, max_tokens=count, ignore_eos=True, temperature=1.0, seed=7)


def alone(client: Client, **asked: Any) -> list[int]:
    stream = ask(client, **asked)
    stream.read(PATIENCE_S)
    return stream.tokens


def begin(client: Client, tokens: int = 5) -> Stream:
    """A request that has said something."""
    stream = ask(client)
    events = stream.events(PATIENCE_S)
    while len(stream.tokens) < tokens:
        next(events)
    return stream


def worker(client: Client) -> dict[str, Any]:
    return next(process for process in client.status()["processes"] if process["role"] == "worker")


def test_a_stopped_worker_is_said_to_be_one_and_replaced_and_its_requests_go_on(served: Daemon) -> None:
    with served.client() as client:
        expected = alone(client)
        before = worker(client)
        stream = begin(client)
        os.kill(before["pid"], signal.SIGSTOP)
        until(lambda: client.status()["state"] == "degraded", served.said)
        status = client.status()
        assert "worker" in status["reason"]
        with pytest.raises(RequestFailed, match="worker") as refused:
            ask(client).read(PATIENCE_S)
        assert refused.value.retry
        stream.read(PATIENCE_S)
        assert stream.tokens == expected
        until(lambda: client.status()["state"] == "ready", served.said)
        after = worker(client)
        assert after["pid"] != before["pid"] and after["restarts"] == before["restarts"] + 1
        assert client.status()["loading"]["read_bytes"] == status["loading"]["read_bytes"]


def test_a_worker_that_is_stopped_for_a_moment_stays_and_loses_nothing(served: Daemon) -> None:
    with served.client() as client:
        expected = alone(client)
        before = worker(client)
        stream = begin(client)
        os.kill(before["pid"], signal.SIGSTOP)
        until(lambda: client.status()["state"] == "degraded", served.said)
        os.kill(before["pid"], signal.SIGCONT)
        until(lambda: client.status()["state"] == "ready", served.said)
        stream.read(PATIENCE_S)
        assert stream.tokens == expected
        assert worker(client)["pid"] == before["pid"]
        assert alone(client) == expected


def test_a_request_that_costs_three_workers_their_lives_fails_alone_with_the_reason(served: Daemon) -> None:
    with served.client() as client:
        expected = alone(client)
        poison = ask(client, [1, 2, 3], 4000)
        neighbour = ask(client)
        deaths = 0

        def runs_poison() -> bool:
            open_requests = client.status()["open_requests"]
            mine = [one for one in open_requests if one["request"] == poison.request]
            return not mine or mine[0]["stage"] in ("prefill", "decode")

        with pytest.raises(RequestFailed, match=r"workers ended while they ran this request.*SIGKILL") as failed:
            while deaths < 10:
                until(runs_poison, served.said)
                pid = worker(client)["pid"]
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(pid, signal.SIGKILL)
                    deaths += 1
                until(lambda: worker(client)["pid"] not in (pid, None), served.said)  # noqa: B023 - within the turn
                with contextlib.suppress(TimeoutError):
                    poison.read(0.05)
        assert failed.value.code == "crashed" and 3 <= deaths <= 4
        neighbour.read(PATIENCE_S)
        assert neighbour.tokens == expected
        assert alone(client) == expected
