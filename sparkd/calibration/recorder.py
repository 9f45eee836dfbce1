"""Keeps routed steps for whoever records them: only while somebody asks, and never more than `MAX_BYTES`. Pure."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

from sparkd.ipc.routing import Routed

#: Bytes of steps that wait to be asked for, and of one answer.
MAX_BYTES = 16 << 20
ANSWER_BYTES = 4 << 20
#: Seconds without a question after which nobody records any more.
PATIENCE_S = 10.0
_STEP = struct.Struct("<IIQ")


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps up to number `last`; `missed` before them were dropped. `data`: of each step rows, top_k (u32) and its
    number (u64), one byte per row (`ipc/routing`), and the ids (int16 [expert layers, rows, top_k]).
    """

    last: int
    missed: int
    data: bytes


class Recorder:
    """Numbers steps from 1 while it is asked."""

    def __init__(self) -> None:
        self._steps: deque[bytes] = deque()
        self._bytes = 0
        self._last = 0
        self._until = 0.0

    def take(self, routed: Routed, now: float) -> None:
        """A step has come."""
        if now >= self._until:
            self._drop(len(self._steps))
            return
        self._last += 1
        self._steps.append(_STEP.pack(routed.rows, routed.top_k, routed.step) + routed.kinds + routed.ids)
        self._bytes += len(self._steps[-1])
        while self._bytes > MAX_BYTES:
            self._drop(1)

    def since(self, after: int, now: float) -> Recording:
        """The steps after number `after`, as many as an answer holds; none at the beginning, `after` 0."""
        fresh = now >= self._until or not 0 < after <= self._last
        self._until = now + PATIENCE_S
        if fresh:
            self._drop(len(self._steps))
            self._last += 1
            return Recording(self._last, 0, b"")
        first = self._last - len(self._steps) + 1
        self._drop(max(0, after + 1 - first))
        first = max(first, after + 1)
        told: list[bytes] = []
        size = 0
        for step in self._steps:
            size += len(step)
            if told and size > ANSWER_BYTES:
                break
            told.append(step)
        return Recording(first + len(told) - 1, first - after - 1, b"".join(told))

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._bytes -= len(self._steps.popleft())
