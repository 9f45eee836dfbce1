"""The CUDA executor: lowers a program to launches of the kernels, one captured graph for each number of rows.

Everything that changes between steps lies in device memory (the batch, page tables, addresses of records), so a graph
is replayed as it is. The bits are those of the native executor (docs/arithmetic.md). A step of more rows than a graph
takes is run as several, rows of a sequence in order. Many rows of one sequence, a prompt, are not run by graphs but as
`cuda_prompt` does it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RowKind, Segment, StepResult
from sparkd.executors.check import check_batch, check_experts
from sparkd.executors.cuda_batch import MAX_ROWS, BatchMemory
from sparkd.executors.cuda_host import HostExperts
from sparkd.executors.cuda_lowering import TAKE_HOST, TELL_HOST, Lowering, StateAddresses
from sparkd.executors.cuda_memory import DeviceMemory, Pinned
from sparkd.executors.cuda_prefill import PrefillLowering, RoutedExperts
from sparkd.executors.cuda_prompt import CudaPrompt
from sparkd.executors.cuda_source import COUNTS, kernel_names, kernel_source
from sparkd.executors.device import Device, Graph, Launch, Stream
from sparkd.executors.weights import Weights
from sparkd.gguf.formats import Format
from sparkd.graph import ops
from sparkd.graph.program import Program
from sparkd.graph.state import PAGE, StateLayout


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step that run together: the batch, and where in the step's logits and rows they belong.

    `prompt`: as a prompt does, not by a graph.
    """

    batch: Batch
    first_row: int
    first_logits: int
    prompt: bool


class Reach(Enum):
    """How the rows of a step that are run by graphs come to all experts."""

    #: Every record can be read where the tables lead.
    ALL = "all"
    #: The host computes what the tables lead nowhere for.
    HOST = "host"
    #: That is brought, for parts of so few rows that there is room for it.
    PARTS = "parts"


class Records(Protocol):
    """Where the records of experts are, of which some may come and go.

    Of a step: `begin`; where that says PARTS, `bring` and `let_go` for each layer of each part that is run by graphs;
    `expect`, maybe, then `stage` for each layer of each other part; `meanwhile`, once all work of the step has been
    given to the stream; `missed`.
    """

    @property
    def part_rows(self) -> int:
        """The most rows whose missing records can be brought."""
        ...

    def begin(self) -> Reach:
        """Of the step that begins."""
        ...

    def bring(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Have these experts' records readable for what the stream is given until `let_go`."""
        ...

    def let_go(self) -> None:
        """What was brought is read by nothing that the stream is given from now on."""
        ...

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Most of these will be asked for by the next `stage`, which is of that layer; the likeliest come first."""
        ...

    def stage(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[Sequence[int], NDArray[np.uint64]]]:
        """Part by part all of these experts, each once, and where their records lie.

        They lie there for what the stream is given until the next part is asked for.
        """
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
        prompt_rows: int,
        prompt_from: int = MAX_ROWS + 1,
        counts: Sequence[int] = COUNTS,
        keep: Collection[ops.Value] = (),
        host: HostExperts | None = None,
    ) -> None:
        """`counts`: ascending, the numbers of rows that there is a graph for; the last one is `MAX_ROWS`.

        `prompt_rows`: of a segment that run together at most, where it has `prompt_from` or more. Without `host` no
        step can reach experts by it.
        """
        self._device = device
        self._counts = counts
        self._program = program
        self._layout = layout
        self._pages = list(pages)
        self._slots = slots
        self._prompt_rows, self._prompt_from = prompt_rows, prompt_from
        self._stream = device.stream()
        device.compile(kernel_source(_formats(program, weights), counts), kernel_names(counts))

        groups, width = len(layout.groups), -(-context // PAGE)
        self._batch = BatchMemory(device, groups, MAX_ROWS, MAX_ROWS, width)
        state = StateAddresses(
            pages=tuple(
                device.allocate(max(1, count) * group.page_bytes)
                for count, group in zip(pages, layout.groups, strict=True)
            ),
            records=device.allocate(max(1, slots * layout.record_bytes)),
        )
        memory = DeviceMemory(device, self._stream, program, weights)
        self._head = memory.head
        batch = BatchMemory(device, groups, prompt_rows, 1, width)
        # First the larger of the two: they share scratch memory.
        self._prefill = PrefillLowering(device, program, weights, layout, state, batch, memory, keep, prompt_rows)
        self._prompt = CudaPrompt(device, self._stream, self._prefill, batch, counts, program.expert_layers)
        self._lowering = Lowering(device, program, weights, layout, state, self._batch, memory, keep, host=host)
        self._host = host
        #: Where the host is called, beside what the device computes.
        self._side = device.stream()
        #: By the number of rows, and whether the host computes what is missing.
        self._graphs: dict[tuple[int, bool], Graph] = {}
        #: For each number of rows: graphs that end where a layer's choice is made, and that of the rest.
        self._pieces: dict[int, list[Graph]] = {}
        self._parts: list[_Part] = []
        self._records: Records | None = None
        self._ids_memory, self._logits_memory, self._choice_memory = (Pinned(device) for _ in range(3))
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
        records, reach, most = self._records, Reach.ALL, MAX_ROWS
        if records is not None and (reach := records.begin()) is Reach.PARTS:
            most = min(records.part_rows, MAX_ROWS)
        parts = self._parts = list(self._cut(batch, most))
        ids = self._ids_memory.room(sum(map(self._ids_bytes, parts)))
        # Of each row of logits: all of them, or the id of the best.
        left, width = (self._head.logits, 4 * self._program.vocab) if not batch.best_of else (self._head.best, 4)
        logits = self._logits_memory.room(len(batch.logits_rows) * width)
        offset = 0
        for part in parts:
            # The only copies to the host, all asynchronous; nothing waits before all parts are given.
            for first, wanted in self._run(part, reach):
                self._download(left, logits, (part.first_logits + first) * width, wanted * width)
            self._download((self._prefill if part.prompt else self._lowering).ids, ids, offset, self._ids_bytes(part))
            offset += self._ids_bytes(part)
        if records is not None:
            records.meanwhile()
        self._stream.synchronize()
        if self._host is not None:
            self._host.check()
        experts = self._experts(parts, ids.view("<i4"))
        check_experts(experts, tuple(layer.experts for layer in self._program.expert_layers))
        missed = np.zeros(len(batch.tokens), np.int32) if records is None else records.missed(experts)
        if batch.best_of:
            none = np.empty((0, self._program.vocab), np.float32)
            return StepResult(none, experts, missed, best=logits.view("<i4").copy())
        return StepResult(logits.view("<f4").reshape(-1, self._program.vocab).copy(), experts, missed)

    def trace(self, value: ops.Value) -> NDArray[np.float32]:
        """A kept value of the last step, float32 [rows, width]; of steps whose rows ran together."""
        if len(self._parts) != 1:
            raise ValueError(f"values of {len(self._parts)} parts were not kept")
        [part] = self._parts
        out = np.empty((len(part.batch.tokens), value.width), np.float32)
        address = (self._prefill if part.prompt else self._lowering).address(value)
        self._device.download(self._stream, address, out)
        self._stream.synchronize()
        return out

    def launches(self, count: int) -> list[Launch]:
        """What a step of at most `count` rows consists of."""
        return self._lowering.launches(count)

    def prompt_launches(self, count: int) -> list[Launch]:
        """What a prompt's step of `count` rows consists of, but for products with routed experts and for logits."""
        return [launch for piece in self._prefill.pieces(count) for launch in piece]

    @property
    def routed_experts(self) -> Sequence[RoutedExperts]:
        """The products of a prompt with the routed experts of each layer."""
        return self._prefill.experts

    def _run(self, part: _Part, reach: Reach) -> Iterator[tuple[int, int]]:
        """Give the stream a part; each time that logits of wanted rows are there, the first of them and how many."""
        if part.prompt:
            self._prompt.run(part.batch, self)
            yield from self._prompt.logits(part.batch)
            return
        if reach is Reach.PARTS:
            self._run_in_pieces(part)
        else:
            self._replay(part, reach is Reach.HOST)
        yield 0, len(part.batch.logits_rows)

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Of a prompt: what is likely to be staged next."""
        if self._records is not None:
            self._records.expect(layer, experts)

    def stage(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[Sequence[int], NDArray[np.uint64]]]:
        """Of a prompt: all of these, part by part, and where they lie."""
        if self._records is None:
            yield experts, self._tables[layer][list(experts)]
        else:
            yield from self._records.stage(layer, experts)

    def _replay(self, part: _Part, host: bool) -> None:
        """Give the stream a part as one graph."""
        count = self._begin(part)
        if (count, host) not in self._graphs:
            self._graphs[count, host] = self._capture(self._lowering.launches(count, host))
        self._graphs[count, host].replay(self._stream)

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
        self._batch.upload(self._stream, part.batch)
        return next(count for count in self._counts if count >= len(part.batch.tokens))

    def _download(self, address: int, out: NDArray[np.uint8], offset: int, size: int) -> None:
        if size:
            self._device.download(self._stream, address, out[offset : offset + size])

    def _ids_bytes(self, part: _Part) -> int:
        """Bytes of the routed ids that a part leaves."""
        rows = self._prompt_rows if part.prompt else MAX_ROWS
        return 4 * rows * sum(layer.top_k for layer in self._program.expert_layers)

    def _experts(self, parts: Sequence[_Part], ids: NDArray[np.int32]) -> NDArray[np.int16]:
        """Routed ids of all rows, [expert layers, rows, top_k], from what the parts have left."""
        layers = self._program.expert_layers
        top_k = layers[0].top_k if layers else 0
        experts = np.empty((len(layers), sum(len(part.batch.tokens) for part in parts), top_k), np.int16)
        offset = 0
        for part in parts:
            rows, size = len(part.batch.tokens), self._ids_bytes(part) // 4
            left = ids[offset : offset + size].reshape(len(layers), -1, top_k) if layers else ids
            if layers:
                experts[:, part.first_row : part.first_row + rows] = left[:, :rows]
            offset += size
        return experts

    def _cut(self, batch: Batch, most: int) -> Iterator[_Part]:
        """A step in parts: of graphs at most `most` rows each, of prompts as many as there is memory for."""
        wanted = np.asarray(batch.logits_rows)
        if len(wanted) > 1 and (np.diff(wanted) <= 0).any():
            raise ValueError("rows whose logits are wanted come in ascending order")
        segments: list[Segment] = []
        first, rows = 0, 0

        def part(prompt: bool) -> _Part:
            nonlocal first, rows
            inside = (wanted >= first) & (wanted < first + rows)
            tokens = batch.tokens[first : first + rows]
            taken = Batch(tokens, tuple(segments), wanted[inside] - first, batch.best_of)
            made = _Part(taken, first, int(np.searchsorted(wanted, first)), prompt)
            first, rows = first + rows, 0
            segments.clear()
            return made

        for segment in batch.segments:
            prompt = segment.length >= self._prompt_from
            if prompt and rows:
                yield part(False)
            done = 0
            while done < segment.length:
                length = min(segment.length - done, (self._prompt_rows if prompt else most) - rows)
                segments.append(replace(segment, start=segment.start + done, length=length))
                done += length
                rows += length
                if prompt or rows == most:
                    yield part(prompt)
        if rows:
            yield part(False)

    def _capture(self, launches: Sequence[Launch]) -> Graph:
        calls = iter(() if self._host is None else self._host.calls)

        def work(stream: Stream) -> None:
            for launch in launches:
                if launch.kernel == TAKE_HOST:
                    stream.wait(self._side.record())
                self._device.launch(stream, launch)
                if launch.kernel == TELL_HOST:
                    self._side.wait(stream.record())
                    self._device.call(self._side, next(calls))

        return self._device.capture(work)


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
