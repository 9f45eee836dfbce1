"""One answer of the daemon as all dialects need it: pieces while it arrives, a whole at the end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from spark_client import AsyncStream, Choice, Chunk, Finished, Part, Progress

#: Seconds without output after which a client is told that its request still lives.
ALIVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing new; what the client's connection needs to stay open."""


@dataclass(frozen=True, slots=True)
class Began:
    """The prompt has been counted."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New output: parts, the tokens they were made of, and their log probabilities where asked for."""

    parts: list[Part]
    tokens: list[int] = field(default_factory=list)
    choices: list[Choice] | None = None


Event = Alive | Began | Piece


@dataclass(slots=True)
class Block:
    """Neighbouring parts of one kind: `text` is thought, text, or the arguments of call number `call`."""

    kind: str
    call: int
    text: str = ""


class Answer:
    """Reads a stream. `parallel` false: the answer ends with its first call."""

    def __init__(self, stream: AsyncStream, *, parallel: bool = True) -> None:
        self.stream = stream
        self._parallel = parallel
        self._prompt_tokens = 0
        self._ended_by_call = False
        self._source: AsyncIterator[Event] | None = None
        self._first: Event | None = None
        self.text = ""
        self.reasoning = ""
        self.calls: list[dict[str, str]] = []
        #: Thought, text and calls in their order.
        self.blocks: list[Block] = []

    async def begin(self) -> None:
        """Wait for the first event, or until ALIVE_S have passed. What is refused before that is raised here."""
        self._source = self._read()
        self._first = await anext(self._source, None)

    async def events(self) -> AsyncIterator[Event]:
        """Everything up to the end; the errors of `AsyncStream.events`, but for its TimeoutError."""
        if self._first is not None:
            yield self._first
        async for event in self._source or self._read():
            yield event

    async def _read(self) -> AsyncIterator[Event]:
        clock = asyncio.get_running_loop().time
        told = clock()
        left = ALIVE_S
        while self.stream.finish_reason is None:
            try:
                async with aclosing(self.stream.events(left)) as events:
                    async for event in events:
                        taken = self._take(event)
                        for out in taken:
                            told = clock()
                            yield out
                        # News of a place in the queue are none for the client: the time that it waits goes on.
                        if not taken or left < ALIVE_S:
                            left = ALIVE_S if taken else max(0.0, told + ALIVE_S - clock())
                            break
            except TimeoutError:
                told, left = clock(), ALIVE_S
                yield Alive()

    async def read(self) -> Answer:
        """Wait for the end."""
        async for _ in self.events():
            pass
        return self

    def _take(self, event: Progress | Chunk | Finished) -> list[Event]:
        if isinstance(event, Progress):
            if event.stage == "prefill" and not self._prompt_tokens:
                self._prompt_tokens = event.total
                return [Began(event.total)]
            return []
        if isinstance(event, Finished) or self._ended_by_call:
            return []
        parts = [Part("text", event.text)] if event.parts is None and event.text else event.parts or []
        kept = []
        for part in parts:
            if part.kind == "call" and part.call > 0 and not self._parallel:
                self._ended_by_call = True
                self.stream.cancel()
                break
            kept.append(self._keep(part))
        return [Piece(kept, event.tokens, event.choices)]

    def _keep(self, part: Part) -> Part:
        if part.kind == "text":
            self.text += part.text
        elif part.kind == "reasoning":
            self.reasoning += part.text
        elif part.name:
            self.calls.append({"id": new_id("call_"), "name": part.name, "arguments": part.text})
        else:
            self.calls[-1]["arguments"] += part.text
        if not self.blocks or (self.blocks[-1].kind, self.blocks[-1].call) != (part.kind, part.call):
            self.blocks.append(Block(part.kind, part.call))
        self.blocks[-1].text += part.text
        return part

    @property
    def finish(self) -> str:
        """Why it ended: stop, length or calls."""
        if self.stream.finish_reason == "length":
            return "length"
        return "calls" if self.calls else "stop"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        usage = self.stream.usage
        return self._prompt_tokens if usage is None else usage.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens of the output."""
        usage = self.stream.usage
        return len(self.stream.tokens) if usage is None else max(usage.output_tokens, len(self.stream.tokens))

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that belong to the thought, once the answer is over."""
        usage = self.stream.usage
        return 0 if usage is None else usage.reasoning_tokens


def new_id(prefix: str) -> str:
    """An id that is nowhere else."""
    return prefix + secrets.token_hex(12)


def shown(data: bytes) -> str:
    """A token as text; what is no text alone becomes U+FFFD."""
    return data.decode(errors="replace")


def without_none(**members: Any) -> dict[str, Any]:
    """A map of what is there."""
    return {name: value for name, value in members.items() if value is not None}
