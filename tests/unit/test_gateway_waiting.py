"""How long a stream is silent, by a clock of its own: until its first word, in the queue, and within the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from spark_client import messages as m
from spark_gateway.answer import ALIVE_S, Alive, Answer, Began, Piece

QUEUED, READ = m.Progress(1, "queued", 0, 0, 3), m.Progress(1, "prefill", 1, 5)
CHUNK = m.Chunk(1, 0, [7], "x")
BEGAN, PIECE = Began(5), Piece([m.Part("text", "x")], [7])


@dataclass
class Stream:
    """Messages of a daemon, each so many seconds after the one before."""

    script: list[tuple[float, Any]]
    now: float = 0.0
    finish_reason: str | None = None
    begun: int = 0
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.script[0][0]

    async def events(self, timeout: float) -> AsyncIterator[Any]:
        self.begun += 1
        while self.script:
            if self.left > timeout:
                self.now, self.left = self.now + timeout, self.left - timeout
                raise TimeoutError
            self.now += self.left
            _, event = self.script.pop(0)
            self.left = self.script[0][0] if self.script else 0.0
            if not self.script:
                self.finish_reason = "stop"
            yield event


def told(monkeypatch: pytest.MonkeyPatch, stream: Stream, begin: bool) -> list[tuple[float, Any]]:
    """What the client hears, and when."""
    monkeypatch.setattr("spark_gateway.answer.asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    clock = SimpleNamespace(time=lambda: stream.now)

    async def read() -> list[tuple[float, Any]]:
        answer = Answer(stream)  # type: ignore[arg-type]
        if begin:
            await answer.begin()
        return [(stream.now, event) async for event in answer.events()]

    return asyncio.run(read())


@pytest.mark.parametrize("begin", [False, True])
def test_a_stream_that_waits_says_every_five_seconds_that_it_lives_whatever_news_come(
    monkeypatch: pytest.MonkeyPatch, begin: bool
) -> None:
    assert ALIVE_S == 5.0
    queue = [(4.5, QUEUED), (0.1, QUEUED), (7.0, QUEUED), (2.0, READ), (6.0, CHUNK), (1.0, CHUNK)]
    heard = told(monkeypatch, Stream(queue), begin)
    assert [(round(at, 3), event) for at, event in heard] == [
        (5.0, Alive()), (10.0, Alive()), (13.6, BEGAN), (18.6, Alive()), (19.6, PIECE), (20.6, PIECE),
    ]  # fmt: skip


def test_the_first_word_begins_a_stream_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, Stream([(0.25, READ), (0.25, CHUNK)]), begin=True) == [(0.25, BEGAN), (0.5, PIECE)]


def test_an_answer_that_flows_is_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream([(0.5, QUEUED), (0.5, READ), *[(0.1, CHUNK)] * 50])
    assert len(told(monkeypatch, stream, begin=True)) == 51
    assert stream.begun == 3
