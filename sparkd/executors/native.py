"""The native executor: lowers a program to a plan of the C++ kernels and runs one call per step.

Where records may be absent, a stager is given. A step then pauses in each experts operation that misses some: the plan
computes the experts that are there while the others are brought, each part of those when it has come, and goes on.

Weights stay where they are: the plan holds addresses. State stays in the memory handed in; a step zeroes the recurrent
record of every segment that starts at position 0, so a fresh slot needs no preparation.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import UnsupportedError
from sparkd.executors.base import Batch, RecordRefused, RowKind, Segment, Stager, StepResult
from sparkd.executors.check import check_batch
from sparkd.executors.foresight import Foresight
from sparkd.executors.weights import Piece, Weights
from sparkd.gguf.formats import Arithmetic, Format
from sparkd.graph import ops
from sparkd.graph.plan import overtakers
from sparkd.graph.plan import plan as plan_values
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.kernels import native


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Memory of a state pool: per page group uint8 [pages, page_bytes], and uint8 [slots, record_bytes]."""

    pages: tuple[NDArray[np.uint8], ...]
    records: NDArray[np.uint8]

    @staticmethod
    def allocate(layout: StateLayout, pages: Sequence[int], slots: int) -> StateMemory:
        """Fresh memory for `pages[g]` pages of group g and `slots` records."""
        groups = zip(layout.groups, pages, strict=True)
        return StateMemory(
            tuple(np.zeros((count, group.page_bytes), np.uint8) for group, count in groups),
            np.zeros((slots, layout.record_bytes), np.uint8),
        )


class NativeExecutor:
    """Runs steps of at most `max_rows` rows on the CPU with `threads` threads and the instruction set `isa`.

    A row's results are bit for bit the same whatever else is in the batch, however a prompt is cut into chunks, and for
    every thread count and instruction set. Values in `keep` can be read after a step with `trace`.
    """

    def __init__(
        self,
        program: Program,
        weights: Weights,
        layout: StateLayout,
        memory: StateMemory,
        *,
        max_rows: int,
        threads: int,
        isa: str = "auto",
        stager: Stager | None = None,
        foresight: Foresight | None = None,
        keep: Collection[ops.Value] = (),
    ) -> None:
        """With a stager the addresses of records are the stager's; else `weights` has all of them.

        `foresight` tells the stager what may be missed next.
        """
        module = native(isa)
        behind = overtakers(program)
        values = plan_values(program, keep, overtaken=behind)
        self._program = program
        self._layout = layout
        self._memory = memory
        self._weights = weights
        self._max_rows = max_rows
        self._stager = stager
        self._foresight = foresight
        self._plan: Any = module.Plan(max_rows, threads, values.width)
        for layer in program.expert_layers:
            self._plan.expert_layer(layer.experts)
        lowering = _Lowering(self._plan, module, program, weights, layout)
        for value, offset in values.offsets.items():
            lowering.place(value, offset)
        for index, op in enumerate(program.ops):
            lowering.lower(op)
            self._plan.overtakers(behind.get(index, 0))
        self._plan.state(
            [p.ctypes.data for p in memory.pages],
            [g.page_bytes for g in layout.groups],
            memory.records.ctypes.data,
            layout.record_bytes,
            layout.kv_bytes,
        )
        self._values = lowering.values
        self._rows = 0
        self._top_k = _common_top_k(program)
        self._experts = tuple(layer.experts for layer in program.expert_layers)
        self._page_counts = [len(p) for p in memory.pages]
        # Of steps of which the best tokens alone are wanted.
        self._logits = np.empty((0, program.vocab), np.float32)
        if stager is None:
            self.publish(weights.records())

    def publish(self, records: Sequence[NDArray[np.uint64]]) -> None:
        """Take new addresses of all expert records, between steps."""
        table = np.zeros((len(self._experts), max(self._experts, default=0)), np.uint64)
        for layer, addresses in enumerate(records):
            if addresses.shape != (self._experts[layer],) or not addresses.all():
                raise ValueError(f"expert layer {layer} needs {self._experts[layer]} addresses of records")
            table[layer, : len(addresses)] = addresses
        self._plan.publish(table)

    def step(self, batch: Batch) -> StepResult:
        """Run all rows. RequestError and ValueError (see `check_batch`) are raised before anything is touched."""
        slots = len(self._memory.records)
        check_batch(batch, self._program, self._layout, self._page_counts, slots, self._max_rows)
        self._rows = len(batch.tokens)
        wanted = len(batch.logits_rows)
        segments, tables = _flatten(batch.segments)
        # The plan uses all of these until the step has ended.
        tokens = np.ascontiguousarray(batch.tokens, np.int32)
        logits_rows = np.ascontiguousarray(batch.logits_rows, np.int32)
        logits = self._room_for_logits(wanted) if batch.best_of else np.empty((wanted, self._program.vocab), np.float32)
        best = np.empty(wanted, np.int32)
        experts = np.empty((len(self._experts), self._rows, self._top_k), np.int16)
        waited = np.empty(self._rows, np.int32)
        if self._stager is not None and (addresses := self._stager.begin()) is not None:
            self._plan.publish(addresses)
        if self._foresight is not None:
            self._foresight.begin()
        waited_s = 0.0
        pause = self._plan.step(tokens, segments, tables, logits_rows, logits, batch.best_of, best, experts, waited)
        while pause is not None:
            waited_s += self._bring(*pause)
            pause = self._plan.resume()
        if batch.best_of:
            return StepResult(logits[:0], experts, waited, waited_s, best)
        return StepResult(logits, experts, waited, waited_s)

    def _room_for_logits(self, rows: int) -> NDArray[np.float32]:
        """Memory for logits that do not leave the executor, used again by the next step."""
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._program.vocab), np.float32)
        return self._logits[:rows]

    def _bring(self, layer: int, decode: list[int], prefill: list[int]) -> float:
        """Have the experts of a paused step computed: those that are there while the absent ones come, then those.

        Also what follows and needs none of them, the shared expert.

        The seconds that were spent waiting.
        """
        if self._stager is None:
            raise RuntimeError(f"experts {decode + prefill} of expert layer {layer} have no address")
        self._stager.request(layer, decode, prefill)
        if self._foresight is not None and not prefill:
            # The disk has something to do already; what it does next should be known when it has done that.
            self._look_ahead(self._stager, self._foresight, layer, decode)
        self._plan.meanwhile()
        waited_s = 0.0
        began = time.monotonic()
        try:
            for arrived, addresses in self._stager.arrivals():
                waited_s += time.monotonic() - began
                self._plan.compute(arrived, addresses)
                began = time.monotonic()
        except RecordRefused as error:
            rows = self._plan.waiting_rows(error.expert)
            raise RecordRefused(error.what, error.layer, error.expert, rows) from None
        return waited_s

    def _look_ahead(self, stager: Stager, foresight: Foresight, layer: int, missed: list[int]) -> None:
        foresight.missed(layer, missed)
        value = foresight.wanted(layer, self._rows)
        if value is not None:
            absent = stager.absent(layer + 1, foresight.guess(layer, self.trace(value)))
            foresight.guessed(layer + 1, absent)
            if foresight.on and absent:
                stager.foresee(layer + 1, absent)

    def trace(self, value: ops.Value) -> NDArray[np.float32]:
        """A value that is kept or, while a step is paused, read later: of the last step, float32 [rows, width]."""
        out = np.empty((self._rows, value.width), np.float32)
        self._plan.trace(self._values[value], out)
        return out


def product_paths(formats: Collection[Format], isa: str = "auto") -> dict[str, str]:
    """For each computable type its arithmetic and the kernels that the module for `isa` has: "integer ..., avx2"."""
    module = native(isa)
    return {f.name: f"{f.arithmetic.value}, {module.products_path(f.id)}" for f in formats if f.arithmetic is not None}


def _common_top_k(program: Program) -> int:
    top_k = {layer.top_k for layer in program.expert_layers}
    if len(top_k) > 1:
        raise UnsupportedError(f"expert layers choose different numbers of experts: {sorted(top_k)}")
    return top_k.pop() if top_k else 0


def _flatten(segments: Sequence[Segment]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Rows (length, start, state slot, whether decode, first entry of each page table); all page tables in a row."""
    rows = []
    tables: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    entries = 0
    for segment in segments:
        row = [segment.length, segment.start, segment.state, segment.kind is RowKind.DECODE]
        for table in segment.pages:
            row.append(entries)
            tables.append(table)
            entries += len(table)
        rows.append(row)
    return np.array(rows, np.int64), np.concatenate(tables, dtype=np.int32)


class _Lowering:
    """Hands the operations of a program to a C++ plan, operands bound to places and addresses."""

    def __init__(self, plan: Any, module: Any, program: Program, weights: Weights, layout: StateLayout) -> None:
        self._plan = plan
        self._module = module
        self._program = program
        self._weights = weights
        self._layout = layout
        self._tables: dict[ops.RopeTable, int] = {}
        self._choices: dict[ops.Routing, int] = {}
        self.values: dict[ops.Value, Any] = {}

    def place(self, value: ops.Value, offset: int) -> None:
        self.values[value] = self._module.Value(len(self.values), offset, value.width)

    def _weight(self, weight: ops.Weight) -> Any:
        stored = self._weights.tensor(weight.tensor)
        _check_computable(stored.format, weight.tensor)
        address = stored.address + weight.first_row * stored.format.row_bytes(weight.columns)
        return self._module.Weight(address, stored.format.id, weight.rows, weight.columns)

    def _piece(self, piece: Piece, weight: ops.Weight) -> Any:
        _check_computable(piece.format, weight.tensor)
        return self._module.Weight(piece.offset, piece.format.id, weight.rows, weight.columns)

    def _table(self, table: ops.RopeTable) -> int:
        if table not in self._tables:
            self._tables[table] = self._plan.rope_table(list(table.inv_freq), table.magnitude)
        return self._tables[table]

    def lower(self, op: ops.Op) -> None:
        plan, v, w = self._plan, self.values, self._weight
        match op:
            case ops.Embed():
                plan.embed(w(op.weight), v[op.out])
            case ops.RmsNorm():
                plan.rms_norm(v[op.x], w(op.weight), v[op.out], op.eps)
            case ops.Linear():
                plan.linear(v[op.x], w(op.weight), v[op.out])
            case ops.QkNorm():
                plan.qk_norm(v[op.x], w(op.weight), v[op.out], op.heads, op.head_dim, op.eps, op.stride, op.offset)
            case ops.Rope():
                plan.rope(v[op.x], v[op.out], op.heads, op.head_dim, self._table(op.table))
            case ops.Attention():
                self._attention(op)
            case ops.OutputGate():
                softplus = op.function is ops.Gate.SOFTPLUS
                plan.output_gate(
                    v[op.x], v[op.gate], v[op.out], op.heads, op.head_dim, softplus, op.per_head, op.stride, op.offset
                )
            case ops.CausalConv():
                offset = self._layout.conv_offsets[op.state]
                plan.causal_conv(v[op.x], w(op.weight), v[op.out], op.taps, offset)
            case ops.GatedDelta():
                self._gated_delta(op)
            case ops.GatedRmsNorm():
                plan.gated_rms_norm(v[op.x], v[op.gate], w(op.weight), v[op.out], op.heads, op.head_dim, op.eps)
            case ops.Route():
                sigmoid = op.function is ops.Router.SIGMOID
                bias = None if op.bias is None else w(op.bias)
                self._choices[op.out] = plan.choice(op.out.top_k)
                plan.route(v[op.x], w(op.weight), bias, self._choices[op.out], sigmoid, op.scale)
            case ops.Experts():
                self._experts(op)
            case ops.SwiGlu():
                plan.swiglu(v[op.gate], v[op.up], v[op.out])
            case ops.Add():
                plan.add(v[op.x], v[op.y], v[op.out])
            case ops.Logits():
                plan.logits(v[op.x], w(op.weight))

    def _attention(self, op: ops.Attention) -> None:
        v, place = self.values, self._layout.caches[op.cache]
        self._plan.attention(
            v[op.q], v[op.k], v[op.v], v[op.out], op.heads, op.kv_heads, op.head_dim, op.scale, op.window,
            place.group, place.k_offset, place.v_offset,
        )  # fmt: skip

    def _gated_delta(self, op: ops.GatedDelta) -> None:
        v = self.values
        self._plan.gated_delta(
            v[op.qkv], v[op.alpha], v[op.beta], self._weight(op.a), self._weight(op.dt_bias), v[op.out],
            op.k_heads, op.v_heads, op.head_dim, op.eps, self._layout.delta_offsets[op.state],
        )  # fmt: skip

    def _experts(self, op: ops.Experts) -> None:
        layer = self._program.expert_layers[op.layer]
        gate, up, down = self._weights.pieces(op.layer)
        self._plan.experts(
            self.values[op.x], self._choices[op.routing], self.values[op.out], op.layer,
            self._piece(gate, layer.gate), self._piece(up, layer.up), self._piece(down, layer.down),
        )  # fmt: skip


def _check_computable(format: Format, tensor: str) -> None:
    if format.arithmetic is None:
        known = ", ".join(a.name for a in Arithmetic)
        raise UnsupportedError(f"{tensor} is {format.name}, which sparkd cannot compute yet", fix=f"known: {known}")
