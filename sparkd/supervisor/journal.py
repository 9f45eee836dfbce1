"""What it takes to begin a request again on another worker: token ids in memory, never on disk.

An entry begins as the app's request. When the worker has admitted it, its prompt's ids and its seed replace text,
messages and chance; from then on every output token is noted. `run` gives the message that continues from there, and
the same seed and ids lead to the very same tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field

from sparkd.ipc.messages import Admitted, Generate, Run


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
    prompt: list[int] | None = None
    seed: int | None = None
    produced: list[int] = field(default_factory=list)
    crashes: int = 0
    standing: Standing = Standing.CLEAR
    proof_at: int = 0

    def admitted(self, msg: Admitted) -> None:
        """Note the prompt's ids and the seed; they stay the same when a request is admitted again."""
        self.prompt = msg.tokens
        self.seed = msg.seed

    def run(self, request: int) -> Run:
        """The worker's order, from the start or from where the last worker got to."""
        ask = self.ask
        fresh = self.prompt is None
        return Run(
            request=request,
            prompt=ask.prompt if fresh else None,
            tokens=ask.tokens if fresh else self.prompt,
            chat=ask.chat if fresh else None,
            tools=ask.tools if fresh else None,
            options=ask.options if fresh else {},
            sampling=ask.sampling if fresh else dataclasses.replace(ask.sampling, seed=self.seed),
            stop=ask.stop,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
            produced=list(self.produced),
            logprobs=ask.logprobs,
        )
