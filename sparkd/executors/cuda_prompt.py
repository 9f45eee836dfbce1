"""Runs the rows of a prompt on a device, layer by layer: a record that they chose is brought once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch
from sparkd.executors.cuda_batch import MAX_ROWS, BatchMemory
from sparkd.executors.cuda_memory import Pinned
from sparkd.executors.cuda_prefill import PrefillLowering, RoutedExperts, items_of
from sparkd.executors.device import Device, Launch, Stream

#: Of an expert layer and the experts that were chosen there: some of them, the addresses of their records, and so on
#: until all were told. What was told may be read by what the stream is given until the next are asked for.
Bring = Callable[[int, Sequence[int]], Iterator[tuple[Sequence[int], NDArray[np.uint64]]]]


class CudaPrompt:
    """Steps of one segment of at most `lowering`'s rows.

    A layer's choice is looked at as soon as it is there, while the device computes what does not need the experts.
    """

    def __init__(
        self, device: Device, stream: Stream, lowering: PrefillLowering, batch: BatchMemory, counts: Sequence[int]
    ) -> None:
        """`counts` of rows that there are kernels for logits of, ascending."""
        self._counts = counts
        self._device = device
        self._stream = stream
        self._lowering = lowering
        self._batch = batch
        #: Copies what the host looks at, without waiting for what compute was given since.
        self._looks = device.stream()
        self._first = Pinned(device)

    def run(self, batch: Batch, bring: Bring) -> None:
        """Give the stream all of a step but its logits."""
        self._batch.upload(self._stream, _without_logits(batch))
        pieces = self._lowering.pieces(len(batch.tokens))
        self._give(next(pieces))
        for number, layer in enumerate(self._lowering.experts):
            first = self._first.room(4 * (layer.experts + 1))
            self._looks.wait(self._stream.record())
            self._device.download(self._looks, layer.first, first)
            self._give(next(pieces))
            self._looks.synchronize()
            self._multiply(number, layer, first.view("<i4"), bring)
            self._give(next(pieces))

    def logits(self, batch: Batch) -> Iterator[tuple[int, int]]:
        """After `run`: give the stream logits of the rows that are wanted, `MAX_ROWS` at most at a time.

        Each time the first of those rows and how many: they are to be taken before the next are asked for.
        """
        for first in range(0, len(batch.logits_rows), MAX_ROWS):
            rows = batch.logits_rows[first : first + MAX_ROWS]
            self._batch.want(self._stream, rows)
            self._give(self._lowering.head(next(count for count in self._counts if count >= len(rows))))
            yield first, len(rows)

    def _multiply(self, number: int, layer: RoutedExperts, first: NDArray[np.int32], bring: Bring) -> None:
        for experts, records in bring(number, np.flatnonzero(np.diff(first)).tolist()):
            items = items_of(first, experts, records)
            if len(items):
                self._device.upload(self._stream, layer.items, items.view(np.uint8))
                self._give(layer.launches(len(items)))

    def _give(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._device.launch(self._stream, launch)


def _without_logits(batch: Batch) -> Batch:
    return Batch(batch.tokens, batch.segments, batch.logits_rows[:0], batch.best_of)
