"""The CUDA executor: lowers a program to launches of the kernels, one captured graph for each number of rows.

Everything that changes between steps lies in device memory (the batch, page tables, addresses of records), so a graph
is replayed as it is. The bits are those of the native executor (docs/arithmetic.md). A step of more rows than a graph
takes is run as several, rows of a sequence in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RowKind, Segment, StepResult
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
        ("best_of", "<i4"),
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


class Records(Protocol):
    """Where the records of experts are, of which some may come and go.

    Of a step: `begin`; where that says so, `bring` and `let_go` for each layer of each part; `meanwhile`, once all work
    of the step has been given to the stream; `missed`.
    """

    def begin(self) -> int | None:
        """None: all records can be read where they are. Else the most rows whose missing records can be brought."""
        ...

    def bring(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Have these experts' records readable for what the stream is given until `let_go`."""
        ...

    def let_go(self) -> None:
        """What was brought is read by nothing that the stream is given from now on."""
        ...

    def meanwhile(self) -> None:
        """Do, while the device computes, what need not be done before."""
        ...

    def missed(self, experts: NDArray[np.int16]) -> NDArray[np.int32]:
        """For each row how many of its `experts` [layers, rows, top_k] were not in device memory in this step."""
        ...


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
        #: For each number of rows: graphs that end where a layer's choice is made, and that of the rest.
        self._pieces: dict[int, list[Graph]] = {}
        self._rows = 0
        self._records: Records | None = None
        self._ids_bytes = 4 * MAX_ROWS * sum(layer.top_k for layer in program.expert_layers)
        self._ids_memory, self._logits_memory, self._choice_memory = (_Pinned(device) for _ in range(3))
        self._tables = [np.zeros(layer.experts, "<u8") for layer in program.expert_layers]
        self.publish(weights.records())

    @property
    def stream(self) -> Stream:
        """What computes: all steps, in order."""
        return self._stream

    def serve_from(self, records: Records) -> None:
        """Have `records` say from now on where the records of experts are."""
        self._records = records

    def publish(self, records: Sequence[NDArray[np.uint64]]) -> None:
        """Take new addresses of all expert records, between steps."""
        for layer, (addresses, expert_layer) in enumerate(zip(records, self._program.expert_layers, strict=True)):
            if addresses.shape != (expert_layer.experts,) or not addresses.all():
                raise ValueError(f"expert layer {layer} needs {expert_layer.experts} addresses of records")
            self.publish_layer(layer, addresses)

    def publish_layer(self, layer: int, addresses: NDArray[np.uint64]) -> None:
        """Take new addresses of a layer's records: what is given to the stream after this reads them."""
        if not np.array_equal(self._tables[layer], addresses):
            self._tables[layer] = addresses.astype("<u8")
            self._device.upload(self._stream, self._lowering.record_tables[layer], self._tables[layer])

    def step(self, batch: Batch) -> StepResult:
        """Run all rows. RequestError and ValueError (see `check_batch`) are raised before anything is touched."""
        check_batch(batch, self._program, self._layout, self._pages, self._slots, len(batch.tokens))
        rows = self._rows = len(batch.tokens)
        records = self._records
        whole = None if records is None else records.begin()
        parts = list(_parts(batch, MAX_ROWS if whole is None else min(whole, MAX_ROWS)))
        ids = self._ids_memory.room(len(parts) * self._ids_bytes)
        # Of each row of logits: all of them, or the id of the best.
        left, width = (
            (self._lowering.logits, 4 * self._program.vocab) if not batch.best_of else (self._lowering.best, 4)
        )
        logits = self._logits_memory.room(len(batch.logits_rows) * width)
        for number, part in enumerate(parts):
            run = self._replay if whole is None else self._run_in_pieces
            run(part)
            # The only copies to the host, both asynchronous; nothing waits before all parts are given.
            self._download(self._lowering.ids, ids, number * self._ids_bytes, self._ids_bytes)
            wanted = len(part.batch.logits_rows)
            self._download(left, logits, part.first_logits * width, wanted * width)
        if records is not None:
            records.meanwhile()
        self._stream.synchronize()
        experts = self._experts(parts, ids.view("<i4"))
        check_experts(experts, tuple(layer.experts for layer in self._program.expert_layers))
        missed = np.zeros(rows, np.int32) if records is None else records.missed(experts)
        if batch.best_of:
            none = np.empty((0, self._program.vocab), np.float32)
            return StepResult(none, experts, missed, best=logits.view("<i4").copy())
        return StepResult(logits.view("<f4").reshape(-1, self._program.vocab).copy(), experts, missed)

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

    def _replay(self, part: _Part) -> None:
        """Give the stream a part as one graph."""
        count = self._begin(part)
        if count not in self._graphs:
            self._graphs[count] = self._capture(self.launches(count))
        self._graphs[count].replay(self._stream)

    def _run_in_pieces(self, part: _Part) -> None:
        """Give the stream a part as a graph for each expert layer, and have the records of its choices brought."""
        count = self._begin(part)
        if count not in self._pieces:
            self._pieces[count] = [self._capture(piece) for piece in _pieces(self.launches(count))]
        first, *others = self._pieces[count]
        first.replay(self._stream)
        decode = np.repeat(
            [s.kind is RowKind.DECODE for s in part.batch.segments], [s.length for s in part.batch.segments]
        )
        assert self._records is not None
        for layer, (piece, choice) in enumerate(zip(others, self._lowering.choices, strict=True)):
            ids = self._choice_memory.room(MAX_ROWS * choice.top_k * 4)
            self._device.download(self._stream, choice.address, ids)
            self._stream.synchronize()
            chosen = ids.view("<i4").reshape(MAX_ROWS, choice.top_k)[: len(decode)]
            self._records.bring(layer, np.unique(chosen[decode]).tolist(), np.unique(chosen[~decode]).tolist())
            piece.replay(self._stream)
            self._records.let_go()

    def _begin(self, part: _Part) -> int:
        """Upload a part's batch; the number of rows of the graph to run it with."""
        self._write(part.batch)
        self._device.upload(self._stream, self._step_address, self._step)
        return next(count for count in self._counts if count >= len(part.batch.tokens))

    def _download(self, address: int, out: NDArray[np.uint8], offset: int, size: int) -> None:
        if size:
            self._device.download(self._stream, address, out[offset : offset + size])

    def _experts(self, parts: Sequence[_Part], ids: NDArray[np.int32]) -> NDArray[np.int16]:
        """Routed ids of all rows, [expert layers, rows, top_k], from what the parts have left."""
        layers = self._program.expert_layers
        experts = np.empty((len(layers), self._rows, layers[0].top_k if layers else 0), np.int16)
        left = ids.reshape(len(parts), len(layers), MAX_ROWS, experts.shape[2])
        for number, part in enumerate(parts):
            rows = len(part.batch.tokens)
            experts[:, part.first_row : part.first_row + rows] = left[number, :, :rows]
        return experts

    def _capture(self, launches: Sequence[Launch]) -> Graph:
        def work(stream: Stream) -> None:
            for launch in launches:
                self._device.launch(stream, launch)

        return self._device.capture(work)

    def _write(self, batch: Batch) -> None:
        """Put the batch and its page tables into the bytes that are uploaded."""
        record = self._step[: _BATCH.itemsize].view(_BATCH)[0]
        rows = len(batch.tokens)
        record["rows"], record["segments"], record["logits"] = rows, len(batch.segments), len(batch.logits_rows)
        record["best_of"] = batch.best_of
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


class _Pinned:
    """Host memory for what a step leaves; grows with the largest step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def room(self, size: int) -> NDArray[np.uint8]:
        """The first `size` bytes."""
        if size > len(self._memory):
            self._memory = self._device.pinned(size)
        return self._memory[:size]


def _pieces(launches: Sequence[Launch]) -> Iterator[list[Launch]]:
    """Launches up to and with each choice of experts, then the rest."""
    piece: list[Launch] = []
    for launch in launches:
        piece.append(launch)
        if launch.kernel.startswith("route"):
            yield piece
            piece = []
    yield piece


def _formats(program: Program, weights: Weights) -> set[Format]:
    """The types that the program multiplies with or embeds from."""
    multiplied = [op.weight for op in program.ops if isinstance(op, ops.Embed | ops.Linear | ops.Route | ops.Logits)]
    formats = {weights.tensor(weight.tensor).format for weight in multiplied}
    for layer in range(len(program.expert_layers)):
        formats.update(piece.format for piece in weights.pieces(layer))
    return formats


def _parts(batch: Batch, most: int) -> Iterator[_Part]:
    """A step in parts of at most `most` rows."""
    wanted = np.asarray(batch.logits_rows)
    if len(wanted) > 1 and (np.diff(wanted) <= 0).any():
        raise ValueError("rows whose logits are wanted come in ascending order")
    segments: list[Segment] = []
    first, rows = 0, 0

    def part() -> _Part:
        inside = (wanted >= first) & (wanted < first + rows)
        tokens = batch.tokens[first : first + rows]
        taken = Batch(tokens, tuple(segments), wanted[inside] - first, batch.best_of)
        return _Part(taken, first, int(np.searchsorted(wanted, first)))

    for segment in batch.segments:
        done = 0
        while done < segment.length:
            length = min(segment.length - done, most - rows)
            segments.append(replace(segment, start=segment.start + done, length=length))
            done += length
            rows += length
            if rows == most:
                yield part()
                first, rows = first + rows, 0
                segments.clear()
    if rows:
        yield part()
