"""A stager whose records come and go, and are overwritten as soon as nobody may read them any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RecordRefused, RowKind, StepResult

GARBAGE = 0xA5


class FakeStager:
    """At the beginning of each step each record is in memory with probability `residency`, drawn anew.

    The others come in parts of random size, in random order, as copies at odd addresses. `refuse` can never be had.
    """

    def __init__(self, records: Sequence[NDArray[np.uint8]], residency: float, seed: int = 0) -> None:
        """`records[layer]` uint8 [experts, bytes of a record]."""
        self.records = records
        self.residency = residency
        self.refuse: tuple[int, int] | None = None
        self._rng = np.random.default_rng(seed)
        shape = (len(records), max(len(layer) for layer in records))
        self._addresses = np.zeros(shape, np.uint64)
        for layer, rows in enumerate(records):
            size = np.uint64(rows.strides[0])
            self._addresses[layer, : len(rows)] = rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * size
        self.present = np.zeros(shape, bool)
        self.requested: list[tuple[int, set[int], set[int]]] = []
        self.parts = 0
        self._pending: list[int] = []
        #: Copies of this step: their memory is nobody else's until the step has ended.
        self._copies: list[NDArray[np.uint8]] = []

    def begin(self) -> NDArray[np.uint64] | None:
        self.requested, self._copies = [], []
        if self.present.any() and self._rng.random() < 0.25:
            return None
        self.present = self._rng.random(self.present.shape) < self.residency
        return np.where(self.present, self._addresses, np.uint64(0))

    def request(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        self.requested.append((layer, set(decode), set(prefill)))
        self._pending = self._rng.permutation([*decode, *prefill]).tolist()

    def arrivals(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        layer = self.requested[-1][0]
        while self._pending:
            count = int(self._rng.integers(1, len(self._pending) + 1))
            part, self._pending = self._pending[:count], self._pending[count:]
            if self.refuse is not None and self.refuse[0] == layer and self.refuse[1] in part:
                raise RecordRefused("the disk is broken", *self.refuse)
            copies = [self._copy(self.records[layer][expert]) for expert in part]
            self.parts += 1
            yield part, [copy.ctypes.data for copy in copies]
            for copy in copies:
                copy[:] = GARBAGE

    def _copy(self, record: NDArray[np.uint8]) -> NDArray[np.uint8]:
        memory = np.full(len(record) + 64, GARBAGE, np.uint8)
        self._copies.append(memory)
        copy = memory[(first := int(self._rng.integers(64))) : first + len(record)]
        copy[:] = record
        return copy

    def check(self, batch: Batch, result: StepResult) -> None:
        """The step asked for what it missed, once and for what it was, and said which rows waited for how many."""
        decode = np.concatenate([[s.kind is RowKind.DECODE] * s.length for s in batch.segments])
        absent = ~self.present[np.arange(len(self.records))[:, None, None], result.experts]
        assert result.waited.tolist() == absent.sum(axis=(0, 2)).tolist()
        expected = []
        for layer, (chosen, missing) in enumerate(zip(result.experts, absent, strict=True)):
            for_decode = set(chosen[decode][missing[decode]].tolist())
            others = set(chosen[~decode][missing[~decode]].tolist()) - for_decode
            expected += [(layer, for_decode, others)] if for_decode or others else []
        assert self.requested == expected
