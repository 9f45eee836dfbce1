"""Connections and requests as the front door keeps them, and how output waits for credit. No sockets, no clocks."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from sparkd.errors import RequestError, UnsupportedError
from sparkd.ipc import internal
from sparkd.ipc import messages as m
from sparkd.ipc.messages import Message
from sparkd.supervisor.journal import Entry
from sparkd.text.answer import joined

#: Credit one stream may hold.
MAX_CREDIT = 1024
#: Least seconds between two Progress messages of one request.
PROGRESS_S = 0.5
#: Ended requests whose late Cancel is no mistake of the app.
_REMEMBERED = 256


class Stage(enum.Enum):
    """Where a request is; the front door's diagram shows how it moves."""

    QUEUED = "queued"
    RUNNING = "running"
    ABORTING = "aborting"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class Client:
    """A connection that has said hello."""

    peer: bytes
    name: str
    seen: float
    requests: set[int] = field(default_factory=set)
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


@dataclass(slots=True, eq=False)
class Request:
    """One request and the output that waits for credit.

    `told` and `position`: when progress was reported last, and how many requests were before it then.
    """

    number: int
    client: Client
    entry: Entry
    credit: int
    arrived: float
    position: int = 0
    told: float | None = None
    started: float | None = None
    first_token: float | None = None
    resumed: int = 0
    stage: Stage = Stage.QUEUED
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    choices: list[m.Choice] = field(default_factory=list)
    parts: list[m.Part] = field(default_factory=list)
    delivered: int = 0
    thought: int = 0
    stalled: float | None = None
    end: Message | None = None

    def timings(self, now: float) -> m.Timings:
        """Seconds in each stage, for a request that ends now."""
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        return m.Timings(started - self.arrived, first - started, now - first)

    def timeout(self, limit: float) -> tuple[float, str]:
        """Seconds it may take under `limits.timeout_s`, and the name of what says so."""
        asked = self.entry.ask.timeout_s
        return (limit, "limits.timeout_s") if asked is None or asked > limit else (asked, "its timeout_s")

    def doing(self) -> str:
        """What it does, for people."""
        if self.stage is Stage.QUEUED:
            return "it was queued"
        if self.first_token is None:
            return "its prompt was being read"
        return f"it had {len(self.entry.produced)} output tokens"

    def start(self, now: float) -> internal.Run:
        """It gets a seat: the order for the worker."""
        self.stage = Stage.RUNNING
        self.resumed += self.started is not None
        self.started = now if self.started is None else self.started
        return self.entry.run(self.number)

    def progress(self, stage: str, now: float, done: int = 0, total: int = 0, position: int = 0) -> m.Progress | None:
        """The news about it, unless the last are too recent."""
        if self.told is not None and now - self.told < PROGRESS_S:
            return None
        self.told, self.position = now, position
        return m.Progress(self.number, stage, done, total, position)

    def produced(self, msg: internal.Produced, now: float) -> None:
        """Keep one more output token."""
        if msg.index != len(self.entry.produced):
            raise RuntimeError(f"request {self.number}: output {msg.index}, due was {len(self.entry.produced)}")
        self.entry.produced.append(msg.token)
        self.thought += msg.thought
        self.first_token = now if self.first_token is None else self.first_token
        self.tokens.append(msg.token)
        self.text.append(msg.text)
        self.parts += msg.parts
        if msg.choice is not None:
            self.choices.append(msg.choice)

    def grant(self, chunks: int) -> None:
        """The app takes so many chunks more."""
        self.credit = min(self.credit + chunks, MAX_CREDIT)

    def deliver(self, now: float) -> list[Message]:
        """What credit allows to send, and the end once nothing waits any more."""
        sent: list[Message] = []
        text = "".join(self.text)
        if (self.tokens or text or self.parts) and self.credit > 0:
            choices = None if self.entry.ask.logprobs is None else self.choices
            parts = joined(self.parts) if self.entry.ask.parts else None
            sent.append(m.Chunk(self.number, self.delivered, self.tokens, text, choices, parts))
            self.delivered += len(self.tokens)
            self.credit -= 1
            self.tokens, self.text, self.choices, self.parts, text = [], [], [], [], ""
        if self.tokens or text or self.parts:
            self.stalled = self.stalled if self.stalled is not None else now
            return sent
        self.stalled = None
        return sent if self.end is None else [*sent, self.end]

    def finished(self, msg: internal.Done, now: float) -> m.Finished:
        """The worker finished it: what the app hears after the last of its output."""
        self.text.append(msg.text)
        self.parts += msg.parts
        return m.Finished(
            request=self.number,
            reason=msg.reason,
            stop=msg.stop,
            prompt_tokens=msg.prompt_tokens,
            output_tokens=msg.output_tokens,
            seed=msg.seed,
            timings=self.timings(now),
            hit_rate=msg.hit_rate,
            resumed=self.resumed,
            reasoning_tokens=self.thought,
        )

    def cancelled(self, now: float) -> m.Finished:
        """The app cancelled it: what it hears at once; output that waits for credit is not sent any more."""
        entry = self.entry
        prompt, seed = entry.prompt_tokens, entry.seed or 0
        return m.Finished(
            request=self.number,
            reason="cancelled",
            stop=None,
            prompt_tokens=prompt,
            output_tokens=self.delivered,
            seed=seed,
            timings=self.timings(now),
            resumed=self.resumed,
            reasoning_tokens=min(self.thought, self.delivered),
        )


def refused(end: Message | None) -> bool:
    """Whether a request ended because of what it asked for, and not because of what happened to it here."""
    return isinstance(end, m.Failed) and end.code in (RequestError.code, UnsupportedError.code)
