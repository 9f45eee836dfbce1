"""A request that costs every worker its life is ended; whoever happened to run beside it gets the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import running, until
from odd_daemon import OddDaemon
from odd_worker import DEADLY, DEADLY_PROMPT, DEADLY_TEXT

from spark_client import Client, RequestFailed

LIMITS = {"context": 4096, "sequences": 4}
INNOCENTS = (1, 2, 3)


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[OddDaemon]:
    with running(OddDaemon(model, tmp_path / "run", limits=LIMITS)) as one:
        one.ready()
        yield one


def start(client: Client, first: int) -> Any:
    return client.generate(tokens=[first, 5, 6], max_tokens=300, ignore_eos=True, temperature=1.0, seed=first)


@pytest.mark.parametrize("order", [DEADLY, DEADLY_PROMPT])
def test_only_the_request_that_is_the_cause_fails(served: OddDaemon, order: int) -> None:
    with served.client() as client, served.client() as other:
        undisturbed = {first: start(client, first).read(60) for first in INNOCENTS}
        before = [start(other, first) for first in INNOCENTS[:2]]
        deadly = start(client, order)
        after = start(other, INNOCENTS[2])
        with pytest.raises(RequestFailed, match=r"3 workers ended while they ran this request.*SIGKILL") as failure:
            deadly.read(120)
        assert (failure.value.code, failure.value.retry) == ("crashed", False)
        assert [stream.read(120) for stream in (*before, after)] == list(undisturbed.values())
        until(lambda: client.status()["state"] == "ready", served.said)
        status = client.status()
        assert next(p for p in status["processes"] if p["role"] == "worker")["restarts"] == 3
        assert (status["requests"]["failed"], status["loading"]["read_bytes"]) == (1, status["loading"]["total_bytes"])


def test_deadly_requests_one_after_another_are_no_crash_loop_while_others_are_served(served: OddDaemon) -> None:
    with served.client() as client:
        undisturbed = start(client, 1).read(60)
        for _ in range(2):
            with pytest.raises(RequestFailed, match="3 workers ended"):
                start(client, DEADLY).read(120)
            until(lambda: client.status()["state"] == "ready", served.said)
            assert start(client, 1).read(60) == undisturbed


def test_a_text_that_no_worker_can_tokenize_fails_alone(served: OddDaemon) -> None:
    with served.client() as client, served.client() as other:
        ids = other.tokenize("a text")
        undisturbed = {first: start(client, first).read(60) for first in INNOCENTS}
        streams = [start(other, first) for first in INNOCENTS]
        with pytest.raises(RequestFailed, match=r"3 workers ended while they tokenized this text.*SIGKILL") as failure:
            client.tokenize(DEADLY_TEXT)
        assert (failure.value.code, failure.value.retry) == ("crashed", False)
        assert [stream.read(120) for stream in streams] == list(undisturbed.values())
        until(lambda: client.status()["state"] == "ready", served.said)
        assert other.tokenize("a text") == ids
        assert client.status()["requests"]["failed"] == 0
