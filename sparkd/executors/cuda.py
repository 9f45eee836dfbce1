"""The CUDA executor: lowers a program to launches of the kernels, one captured graph for each number of rows.

Everything that changes between steps lies in device memory (the batch, page tables, addresses of records), so a graph
is replayed as it is. The bits are those of the native executor (docs/arithmetic.md). A step of more rows than a graph
takes is run as several, rows of a sequence in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, Segment, StepResult
from sparkd.executors.check import check_batch, check_experts
from sparkd.executors.cuda_lowering import MAX_ROWS, Lowering, StateAddresses
from sparkd.executors.cuda_source import COUNTS, kernel_names, kernel_source
from sparkd.executors.device import Device, Graph, Launch, Stream
from sparkd.executors.weights import Weights
from sparkd.gguf.formats import Format
from sparkd.graph import ops
from sparkd.graph.program import Program
from sparkd.graph.state import PAGE, StateLayout

_SEGMENT = np.dtype([("row", "<i4"), ("length", "<i4"), ("start", "<i4"), ("slot", "<i4")])
#: `Batch` in kernels/cuda/device.cuh.
_BATCH = np.dtype(
    [
        ("rows", "<i4"),
        ("segments", "<i4"),
        ("logits", "<i4"),
        ("unused", "<i4"),
        ("token", "<i4", MAX_ROWS),
        ("position", "<i4", MAX_ROWS),
        ("segment_of", "<i4", MAX_ROWS),
        ("logits_row", "<i4", MAX_ROWS),
        ("segment", _SEGMENT, MAX_ROWS),
    ]
)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step that run together: the batch, and where in the step's logits and rows they belong."""

    batch: Batch
    first_row: int
    first_logits: int


class CudaExecutor:
    """Runs steps on a device whose every expert record is at an address that it can read.

    State: `pages[g]` pages of group g and `slots` records in device memory. A sequence has at most `context` positions.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        weights: Weights,
        layout: StateLayout,
        *,
        pages: Sequence[int],
        slots: int,
        context: int,
        counts: Sequence[int] = COUNTS,
        keep: Collection[ops.Value] = (),
    ) -> None:
        """`counts`: ascending, the numbers of rows that there is a graph for; the last one is `MAX_ROWS`."""
        self._device = device
        self._counts = counts
        self._program = program
        self._layout = layout
        self._pages = list(pages)
        self._slots = slots
        self._table_width = -(-context // PAGE)
        self._stream = device.stream()
        device.compile(kernel_source(_formats(program, weights), counts), kernel_names(counts))

        groups = len(layout.groups)
        self._step = np.zeros(_BATCH.itemsize + groups * MAX_ROWS * self._table_width * 4, np.uint8)
        self._step_address = device.allocate(self._step.nbytes)
        state = StateAddresses(
            batch=self._step_address,
            tables=tuple(
                self._step_address + _BATCH.itemsize + g * MAX_ROWS * self._table_width * 4 for g in range(groups)
            ),
            table_width=self._table_width,
            pages=tuple(
                device.allocate(max(1, count) * group.page_bytes)
                for count, group in zip(pages, layout.groups, strict=True)
            ),
            records=device.allocate(max(1, slots * layout.record_bytes)),
        )
        self._lowering = Lowering(device, self._stream, program, weights, layout, state, keep)
        self._graphs: dict[int, Graph] = {}
        self._rows = 0
        self.publish(weights.records())

    def publish(self, records: Sequence[NDArray[np.uint64]]) -> None:
        """Take new addresses of all expert records, between steps."""
        for layer, (addresses, expert_layer) in enumerate(zip(records, self._program.expert_layers, strict=True)):
            if addresses.shape != (expert_layer.experts,) or not addresses.all():
                raise ValueError(f"expert layer {layer} needs {expert_layer.experts} addresses of records")
            self._device.upload(self._stream, self._lowering.record_tables[layer], addresses.astype("<u8"))

    def step(self, batch: Batch) -> StepResult:
        """Run all rows. RequestError and ValueError (see `check_batch`) are raised before anything is touched."""
        check_batch(batch, self._program, self._layout, self._pages, self._slots, len(batch.tokens))
        self._rows = len(batch.tokens)
        logits = np.empty((len(batch.logits_rows), self._program.vocab), np.float32)
        layers = self._program.expert_layers
        experts = np.empty((len(layers), len(batch.tokens), layers[0].top_k if layers else 0), np.int16)
        for part in _parts(batch):
            self._run(part, logits, experts)
        check_experts(experts, tuple(layer.experts for layer in layers))
        return StepResult(logits, experts, np.zeros(len(batch.tokens), np.int32))

    def trace(self, value: ops.Value) -> NDArray[np.float32]:
        """A kept value of the last step, float32 [rows, width]; of steps of at most `MAX_ROWS` rows."""
        if self._rows > MAX_ROWS:
            raise ValueError(f"values of {self._rows} rows were not kept")
        out = np.empty((self._rows, value.width), np.float32)
        self._device.download(self._stream, self._lowering.address(value), out)
        self._stream.synchronize()
        return out

    def launches(self, count: int) -> list[Launch]:
        """What a step of at most `count` rows consists of."""
        return self._lowering.launches(count)

    def _run(self, part: _Part, logits: NDArray[np.float32], experts: NDArray[np.int16]) -> None:
        rows = len(part.batch.tokens)
        count = next(count for count in self._counts if count >= rows)
        if count not in self._graphs:
            self._graphs[count] = self._capture(count)
        self._write(part.batch)
        self._device.upload(self._stream, self._step_address, self._step)
        self._graphs[count].replay(self._stream)
        wanted = len(part.batch.logits_rows)
        if wanted:
            out = logits[part.first_logits : part.first_logits + wanted]
            self._device.download(self._stream, self._lowering.logits, out)
        chosen = [np.empty((rows, ids.top_k), np.int32) for ids in self._lowering.choices]
        for ids, out_ids in zip(self._lowering.choices, chosen, strict=True):
            self._device.download(self._stream, ids.address, out_ids)
        self._stream.synchronize()
        for layer, out_ids in enumerate(chosen):
            experts[layer, part.first_row : part.first_row + rows] = out_ids

    def _capture(self, count: int) -> Graph:
        def work(stream: Stream) -> None:
            for launch in self.launches(count):
                self._device.launch(stream, launch)

        return self._device.capture(work)

    def _write(self, batch: Batch) -> None:
        """Put the batch and its page tables into the bytes that are uploaded."""
        record = self._step[: _BATCH.itemsize].view(_BATCH)[0]
        rows = len(batch.tokens)
        record["rows"], record["segments"], record["logits"] = rows, len(batch.segments), len(batch.logits_rows)
        record["token"][:rows] = batch.tokens
        record["logits_row"][: len(batch.logits_rows)] = batch.logits_rows
        groups = len(self._layout.groups)
        tables = self._step[_BATCH.itemsize :].view("<i4").reshape(groups, MAX_ROWS, self._table_width)
        row = 0
        for number, segment in enumerate(batch.segments):
            record["segment"][number] = (row, segment.length, segment.start, segment.state)
            record["position"][row : row + segment.length] = segment.start + np.arange(segment.length)
            record["segment_of"][row : row + segment.length] = number
            row += segment.length
            for group, table in enumerate(segment.pages):
                tables[group, number, : len(table)] = table


def _formats(program: Program, weights: Weights) -> set[Format]:
    """The types that the program multiplies with or embeds from."""
    multiplied = [op.weight for op in program.ops if isinstance(op, ops.Embed | ops.Linear | ops.Route | ops.Logits)]
    formats = {weights.tensor(weight.tensor).format for weight in multiplied}
    for layer in range(len(program.expert_layers)):
        formats.update(piece.format for piece in weights.pieces(layer))
    return formats


def _parts(batch: Batch) -> Iterator[_Part]:
    """A step in parts of at most `MAX_ROWS` rows."""
    wanted = np.asarray(batch.logits_rows)
    if len(wanted) > 1 and (np.diff(wanted) <= 0).any():
        raise ValueError("rows whose logits are wanted come in ascending order")
    segments: list[Segment] = []
    first, rows = 0, 0

    def part() -> _Part:
        inside = (wanted >= first) & (wanted < first + rows)
        tokens = batch.tokens[first : first + rows]
        return _Part(Batch(tokens, tuple(segments), wanted[inside] - first), first, int(np.argmax(inside)))

    for segment in batch.segments:
        done = 0
        while done < segment.length:
            length = min(segment.length - done, MAX_ROWS - rows)
            segments.append(replace(segment, start=segment.start + done, length=length))
            done += length
            rows += length
            if rows == MAX_ROWS:
                yield part()
                first, rows = first + rows, 0
                segments.clear()
    if rows:
        yield part()
