"""What every executor does: one step over a batch of token rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import UnavailableError


class RowKind(Enum):
    """What the rows of a segment count as in statistics."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence: positions start .. start+length-1.

    `pages[g]` maps logical page (position // 64) to physical page of page group g of the state layout (-1: given back);
    `state` is the slot of the recurrent state. Executors only read these; the worker's state pool assigns them.
    """

    start: int
    length: int
    pages: tuple[NDArray[np.int32], ...]
    state: int
    kind: RowKind


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step: `tokens` int32 [rows], segments cover them in order; logits are wanted for `logits_rows`.

    `best_of`: 0, or of those rows only the best of the first so many ids is wanted; an executor may give it instead.
    """

    tokens: NDArray[np.int32]
    segments: tuple[Segment, ...]
    logits_rows: NDArray[np.int32]
    best_of: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives.

    `logits` float32 [len(logits_rows), vocab], or [0, vocab] and `best` int32 [len(logits_rows)]: the first of the
    largest logits, or -1 - the id of the first that is not finite; `experts` int16 [expert layers, rows, top_k],
    best first; `waited` int32 [rows]: of all experts that a row went to, how many were not in memory (a GPU's own)
    when the step came to them; `waited_s`: the seconds in which nothing could be computed for want of them.
    """

    logits: NDArray[np.float32]
    experts: NDArray[np.int16]
    waited: NDArray[np.int32]
    waited_s: float = 0.0
    best: NDArray[np.int32] | None = None


class RecordRefused(UnavailableError):
    """The record of an expert that a step needs cannot be had.

    The step is over, and the state of all its sequences has advanced by an unknown part of it: none of them may be
    continued from there. `rows` are those that the expert was chosen for: the others need not meet it again.
    """

    def __init__(self, what: str, layer: int, expert: int, rows: Sequence[int] = ()) -> None:
        self.layer = layer
        self.expert = expert
        self.rows = tuple(rows)
        super().__init__(what)


class Stager(Protocol):
    """Brings records that are not in memory to a step that waits for them.

    Of a step: `begin`; then, for each expert layer that misses records, `request` and `arrivals` to its end. A step
    that fails stops in the middle of that, and `begin` follows.
    """

    def begin(self) -> NDArray[np.uint64] | None:
        """Addresses that hold until the end of the step, uint64 [expert layers, most experts]; 0: not in memory.

        None: those of the step before still hold.
        """
        ...

    def request(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Have these experts of a layer brought, without waiting: those that decode rows chose, and the others."""
        ...

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of these experts that are not in memory."""
        ...

    def foresee(self, layer: int, experts: Sequence[int]) -> None:
        """Decode will probably choose these absent experts of a layer next, the likeliest first."""
        ...

    def arrivals(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """What was requested, part by part, as it comes: experts and the addresses of their records.

        A part's records may be read until the next part is asked for. RecordRefused when one cannot be had.
        """
        ...


class Executor(Protocol):
    """Runs steps of one program on one set of weights and one state pool."""

    def step(self, batch: Batch) -> StepResult:
        """Run all rows; state of the batch's sequences advances.

        What is wrong with a batch is raised before any state changes; RecordRefused, and errors of a stager, later.
        """
        ...
