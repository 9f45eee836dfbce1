"""The batch of a step in device memory, with its page tables: what kernels are told of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch
from sparkd.executors.device import Device, Stream

#: `kMaxRows` in kernels/cuda/device.cuh.
MAX_ROWS = 8
_SEGMENT = np.dtype([("row", "<i4"), ("length", "<i4"), ("start", "<i4"), ("slot", "<i4")])
#: `Batch` in kernels/cuda/device.cuh. Batches of one segment may have more tokens behind it.
_BATCH = np.dtype(
    [
        ("rows", "<i4"),
        ("segments", "<i4"),
        ("logits", "<i4"),
        ("best_of", "<i4"),
        ("logits_row", "<i4", MAX_ROWS),
        ("owner", "<i4", MAX_ROWS),
        ("segment", _SEGMENT, MAX_ROWS),
        ("token", "<i4", MAX_ROWS),
    ]
)
_TOKENS = _BATCH.itemsize - 4 * MAX_ROWS


class BatchMemory:
    """Room for batches of up to `rows` rows in up to `segments` segments; of more than `MAX_ROWS` rows only in one."""

    def __init__(self, device: Device, groups: int, rows: int, segments: int, table_width: int) -> None:
        """`groups` of pages, with tables of `table_width` pages for each segment."""
        self._device = device
        first = _TOKENS + 4 * max(rows, MAX_ROWS)
        size = 4 * segments * table_width
        self._bytes = np.zeros(first + groups * size, np.uint8)
        self._tokens = self._bytes[_TOKENS:first].view("<i4")
        self._tables = self._bytes[first:].view("<i4").reshape(groups, segments, table_width)
        self.address = device.allocate(self._bytes.nbytes)
        #: Where the tables of each group lie: int32 [segments, table_width].
        self.tables = tuple(self.address + first + group * size for group in range(groups))
        self.table_width = table_width

    def upload(self, stream: Stream, batch: Batch) -> None:
        """Give the stream a batch: what is given after this is about it. Wanted rows of logits: `MAX_ROWS` at most."""
        record = self._bytes[: _BATCH.itemsize].view(_BATCH)[0]
        record["rows"], record["segments"] = len(batch.tokens), len(batch.segments)
        record["best_of"] = batch.best_of
        self._want(batch.logits_rows)
        self._tokens[: len(batch.tokens)] = batch.tokens
        row = 0
        for number, segment in enumerate(batch.segments):
            record["segment"][number] = (row, segment.length, segment.start, segment.state)
            if len(batch.segments) > 1:
                record["owner"][row : row + segment.length] = number
            row += segment.length
            for group, table in enumerate(segment.pages):
                self._tables[group, number, : len(table)] = table
        self._device.upload(stream, self.address, self._bytes)

    def want(self, stream: Stream, rows: Sequence[int] | NDArray[np.int32]) -> None:
        """Have the stream make logits of other rows of the same batch from now on."""
        self._want(rows)
        self._device.upload(stream, self.address, self._bytes[: _BATCH.itemsize])

    def _want(self, rows: Sequence[int] | NDArray[np.int32]) -> None:
        record = self._bytes[: _BATCH.itemsize].view(_BATCH)[0]
        record["logits"] = len(rows)
        record["logits_row"][: len(rows)] = rows
