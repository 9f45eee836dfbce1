"""What the next step computes: pure decisions, no clock and no memory of its own.

A step carries one row of every decoding sequence and at most one chunk of one prompt (the oldest that is not read to
its end). The chunk is sized so that a step takes about `max_step_s`: it grows while steps are shorter and shrinks as
soon as one is longer, so that those who decode never wait long for somebody's prompt.

Where experts are elsewhere, on the disk or beyond a card's link, a chunk has each of them brought once, however short
it is. So a chunk that nobody who decodes waits for is as long as it can be. What a step waits for the disk does not
count against its chunk; on a card, where copies and products go on together, a chunk never has less than `least_rows`
rows: those who decode wait for one passage of the experts at most, or for `max_step_s` if that is longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sparkd.worker.sequences import Sequence

#: Rows of the first chunk, before any step was measured.
FIRST_CHUNK = 16
#: A chunk changes by at most these factors from one step to the next.
_GROWTH = 2.0
_SHRINK = 0.25


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` ids of a sequence that this step reads."""

    sequence: Sequence
    rows: int


@dataclass(frozen=True, slots=True)
class Step:
    """The pieces of a step: decoding sequences first, then at most one chunk of a prompt."""

    decode: tuple[Piece, ...]
    chunk: Piece | None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in the order of their rows."""
        return (*self.decode, self.chunk) if self.chunk else self.decode


class Scheduler:
    """Forms steps of at most `max_rows` rows; there are never more than `max_rows - 1` decoding sequences."""

    def __init__(self, max_rows: int, max_step_s: float, *, least_rows: int = 1, alone_whole: bool = False) -> None:
        """`alone_whole`: chunks beside which nobody decodes are as long as can be."""
        self._max_rows = max_rows
        self._least_rows = least_rows
        self._alone_whole = alone_whole
        #: May be changed between steps.
        self.max_step_s = max_step_s
        self.chunk_rows = min(max(FIRST_CHUNK, least_rows), max_rows)

    def plan(self, running: Iterable[Sequence]) -> Step | None:
        """The next step of the admitted sequences, oldest first; None when there is nothing to do."""
        decode = []
        prompt = None
        for sequence in running:
            if sequence.decoding:
                decode.append(Piece(sequence, 1))
            elif prompt is None:
                prompt = sequence
        chunk = None
        if prompt is not None:
            room = self._max_rows - len(decode)
            rows = room if self._unlimited(decode) else min(self.chunk_rows, room)
            chunk = Piece(prompt, max(1, min(prompt.unread, rows)))
        return Step(tuple(decode), chunk) if decode or chunk else None

    def measured(self, step: Step, seconds: float) -> None:
        """Learn from a step that computed for `seconds`."""
        if step.chunk is None or self._unlimited(step.decode):
            return
        factor = max(_SHRINK, min(_GROWTH, self.max_step_s / max(seconds, 1e-6)))
        if step.chunk.rows >= self.chunk_rows or factor < 1:
            size = int(min(step.chunk.rows, self.chunk_rows) * factor)
            self.chunk_rows = min(max(size, self._least_rows), self._max_rows)

    def _unlimited(self, decode: Collection[Piece]) -> bool:
        return self._alone_whole and not decode
