"""What every executor does: one step over a batch of token rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
    """Rows of a step: `tokens` int32 [rows], segments cover them in order; logits are wanted for `logits_rows`."""

    tokens: NDArray[np.int32]
    segments: tuple[Segment, ...]
    logits_rows: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits` float32 [len(logits_rows), vocab]; `experts` int16 [expert layers, rows, top_k], best first."""

    logits: NDArray[np.float32]
    experts: NDArray[np.int16]


class Executor(Protocol):
    """Runs steps of one program on one set of weights and one state pool."""

    def step(self, batch: Batch) -> StepResult:
        """Run all rows; state of the batch's sequences advances. Raises before any state changes, or not at all."""
        ...
