"""What it takes to begin a request again on another worker: token ids in memory, never on disk.

An entry begins as the app's request. When the worker has admitted it, its prompt's ids and its seed replace text,
messages and chance (tools stay where calls of them are read); from then on every output token is noted. `run` gives the
message that continues from there, and the same seed and ids lead to the very same tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from array import array
from dataclasses import dataclass, field

from sparkd.ipc.internal import Admitted, Run
from sparkd.ipc.messages import Generate, Json


class Standing(enum.IntEnum):
    """How a request is thought of after a worker ended, in the order of resuming (`probation` says how it changes)."""

    ACCUSED = 0
    CLEAR = 1
    SUSPECT = 2


@dataclass(slots=True)
class Entry:
    """One request. `crashes` counts the workers that ended while they ran it, as far as it may have been the cause.

    With `proof_at` output tokens one that is not clear becomes so.
    """

    ask: Generate
    prompt: array[int] | None = None
    seed: int | None = None
    produced: array[int] = field(default_factory=lambda: array("i"))
    crashes: int = 0
    standing: Standing = Standing.CLEAR
    proof_at: int = 0
    #: Bytes of memory that what the app sent takes, about; 0 once ids have taken its place.
    asked_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        ask = self.ask
        content = (ask.prompt, ask.chat, ask.tools, ask.options, ask.stop)
        self.asked_bytes = 40 * len(ask.tokens or ()) + sum(map(held_bytes_of, content))

    @property
    def held_bytes(self) -> int:
        """Bytes of memory the request takes, about: what was asked, or the ids it has come to and may come to."""
        return self.asked_bytes + 4 * ((0 if self.prompt is None else len(self.prompt)) + self.ask.max_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as far as they are known."""
        return len(self.prompt if self.prompt is not None else self.ask.tokens or ())

    @property
    def turn(self) -> tuple[Standing, int]:
        """What decides when it is resumed: its standing, then how much must be computed again, the shortest first."""
        return self.standing, len(self.prompt or self.ask.tokens or ()) + len(self.produced)

    def admitted(self, msg: Admitted) -> None:
        """Note the prompt's ids and the seed; they stay the same when a request is admitted again."""
        self.prompt = array("i", msg.tokens)
        self.seed = msg.seed
        tools = self.ask.tools if self.ask.parts else None
        self.ask = dataclasses.replace(self.ask, prompt=None, tokens=None, chat=None, tools=tools, options={})
        self.asked_bytes = held_bytes_of(tools)

    def run(self, request: int) -> Run:
        """The worker's order, from the start or from where the last worker got to."""
        ask = self.ask
        fresh = self.prompt is None
        return Run(
            request=request,
            prompt=ask.prompt,
            tokens=ask.tokens if self.prompt is None else self.prompt.tolist(),
            chat=ask.chat,
            tools=ask.tools,
            options=ask.options,
            sampling=ask.sampling if fresh else dataclasses.replace(ask.sampling, seed=self.seed),
            stop=ask.stop,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
            produced=self.produced.tolist(),
            logprobs=ask.logprobs,
            traffic_tag=ask.traffic_tag,
            parts=ask.parts,
            call=ask.call,
            shorten=ask.shorten,
        )


def held_bytes_of(value: Json) -> int:
    """Bytes of memory of free-form content; rather too much, since some values are shared."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(held_bytes_of(key) + held_bytes_of(item) for key, item in value.items())
    if isinstance(value, list):
        return sys.getsizeof(value) + sum(map(held_bytes_of, value))
    return sys.getsizeof(value)
