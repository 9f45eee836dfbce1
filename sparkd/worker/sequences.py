"""One request inside the worker: its tokens, and how far the model has read them.

    waiting ──admitted──► prefill ──last known token read──► decode ──┐
       │                     │                                  │  ◄──┘ one token per step
       └──────aborted────────┴───────► finished ◄───────────────┘ stop, length, aborted, failed

The stage follows from two numbers: `len(tokens)` ids are known, `computed` of them have been read by the model. Decode
is the state in which exactly one is left to read and it is an output of this run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from sparkd.ipc.messages import Sampling, Timings
from sparkd.text.answer import AnswerParser
from sparkd.text.detokenizer import Detokenizer
from sparkd.text.stop import StopMatcher
from sparkd.worker.state import Holding


@dataclass(slots=True)
class Clock:
    """When a request reached its stages, in seconds of a monotonic clock; 0: not yet."""

    arrived: float = 0.0
    started: float = 0.0
    first_token: float = 0.0

    def timings(self, now: float) -> Timings:
        """Seconds in each stage, for a request that ends now."""
        started = self.started or now
        first = self.first_token or now
        return Timings(
            queued_s=max(0.0, started - self.arrived),
            prefill_s=max(0.0, first - started),
            decode_s=max(0.0, now - first),
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's ids and state. The first `known` ids (prompt, outputs of an earlier run) are there from the start.

    `sampling` has a seed. `logprobs`: how many of the most likely tokens are named beside each output; None: not asked.
    `answer` reads the output where its parts were asked for. What it routes is counted under `traffic_tag`.
    """

    request: int
    tokens: array[int]
    prompt: int
    max_tokens: int
    sampling: Sampling
    logprobs: int | None
    ignore_eos: bool
    detokenizer: Detokenizer
    stops: StopMatcher
    clock: Clock
    answer: AnswerParser | None = None
    traffic_tag: str = ""
    known: int = field(init=False)
    computed: int = 0
    #: Experts that decode rows went to, and how many of them the step had to wait for.
    uses: int = 0
    waited: int = 0
    holding: Holding | None = None

    def __post_init__(self) -> None:
        self.known = len(self.tokens)

    def begin_again(self) -> None:
        """Nothing of the ids so far counts as read."""
        self.computed, self.known = 0, len(self.tokens)

    @property
    def outputs(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt

    @property
    def positions(self) -> int:
        """The most positions the sequence can come to hold."""
        return self.prompt + self.max_tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts of decode rows that were there when the step came to them; None before the first."""
        return 1 - self.waited / self.uses if self.uses else None

    @property
    def decoding(self) -> bool:
        """All known ids have been read: every further step reads one output and makes the next."""
        return self.computed >= self.known

    @property
    def unread(self) -> int:
        """Ids that the model has not read yet."""
        return len(self.tokens) - self.computed
