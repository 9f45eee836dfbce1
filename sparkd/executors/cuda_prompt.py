"""Runs the rows of a prompt on a device, layer by layer: a record that they chose is brought once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch
from sparkd.executors.cuda_batch import MAX_ROWS, BatchMemory
from sparkd.executors.cuda_memory import Pinned
from sparkd.executors.cuda_prefill import PrefillLowering, RoutedExperts, items_of
from sparkd.executors.cuda_prompt_plan import LIKELY_ROWS
from sparkd.executors.device import Device, Launch, Stream
from sparkd.graph.program import ExpertLayer

#: Rows that what was known before counts for, beside the rows of the last step.
_OLD_ROWS = 64


class Brings(Protocol):
    """Who has the records of experts: `sparkd.executors.cuda.Records` in part."""

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Most of these will be asked for by the next `stage`, which is of that layer; the likeliest come first."""
        ...

    def stage(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[Sequence[int], NDArray[np.uint64]]]:
        """Some of these, the addresses of their records, and so on until all were told.

        What was told may be read by what the stream is given until the next are asked for.
        """
        ...


class Likely:
    """Which experts the next rows will choose, by what rows of any prompt chose before; at first that is not known.

    Only those are named for which `LIKELY_ROWS` rows are expected: few of them are named in vain.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        #: For each layer and expert the share of rows that choose it.
        self._shares = [np.zeros(layer.experts) for layer in layers]

    def experts(self, layer: int, rows: int) -> list[int]:
        """Of `rows` rows; the likeliest first."""
        expected = self._shares[layer] * rows
        order = np.argsort(-expected, kind="stable")
        return [int(expert) for expert in order[: np.count_nonzero(expected >= LIKELY_ROWS)]]

    def learn(self, layer: int, counts: NDArray[np.int32], rows: int) -> None:
        """`counts` of `rows` rows have chosen each expert."""
        self._shares[layer] = (self._shares[layer] * _OLD_ROWS + counts) / (_OLD_ROWS + rows)


class CudaPrompt:
    """Steps of one segment of at most `lowering`'s rows.

    A layer's choice is looked at as soon as it is there, while the device computes what does not need the experts.
    Before that, while the device is busy with attention, the experts that are likely begin to come.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        lowering: PrefillLowering,
        batch: BatchMemory,
        counts: Sequence[int],
        layers: Sequence[ExpertLayer],
    ) -> None:
        """`counts` of rows that there are kernels for logits of, ascending."""
        self._likely = Likely(layers)
        self._counts = counts
        self._device = device
        self._stream = stream
        self._lowering = lowering
        self._batch = batch
        #: Copies what the host looks at, without waiting for what compute was given since.
        self._looks = device.stream()
        self._first = Pinned(device)

    def run(self, batch: Batch, records: Brings) -> None:
        """Give the stream all of a step but its logits."""
        rows = len(batch.tokens)
        self._batch.upload(self._stream, _without_logits(batch))
        pieces = self._lowering.pieces(rows)
        for number, layer in enumerate(self._lowering.experts):
            records.expect(number, self._likely.experts(number, rows))
            self._give(next(pieces))
            first = self._first.room(4 * (layer.experts + 1))
            self._looks.wait(self._stream.record())
            self._device.download(self._looks, layer.first, first)
            self._give(next(pieces))
            self._looks.synchronize()
            chosen = first.view("<i4")
            self._likely.learn(number, np.diff(chosen), rows)
            self._multiply(number, layer, chosen, records)
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

    def _multiply(self, number: int, layer: RoutedExperts, first: NDArray[np.int32], records: Brings) -> None:
        for experts, places in records.stage(number, np.flatnonzero(np.diff(first)).tolist()):
            items = items_of(first, experts, places)
            if len(items):
                self._device.upload(self._stream, layer.items, items.view(np.uint8))
                self._give(layer.launches(len(items)))

    def _give(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._device.launch(self._stream, launch)


def _without_logits(batch: Batch) -> Batch:
    return Batch(batch.tokens, batch.segments, batch.logits_rows[:0], batch.best_of)
