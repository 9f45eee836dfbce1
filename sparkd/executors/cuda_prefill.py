"""What a program becomes on a device for the rows of a prompt: launches layer by layer, products by tiles of 32 rows.

Unlike the graphs of `cuda_lowering`, these launches are given one by one, for as many rows as there are. Between a
layer's choice of experts and the products with them the host looks at the choice, so that every record can be brought
once for all rows (`cuda_prompt`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.cuda_groups import Group, Heads, Mixture
from sparkd.executors.cuda_lowering import Choice, Lowering, i32, spans_of
from sparkd.executors.cuda_memory import TASK, Forms
from sparkd.executors.cuda_prompt_plan import experts_room, forms_width, multiplied_width, prompt_groups, prompt_plan
from sparkd.executors.device import Argument, Launch
from sparkd.gguf.formats import Arithmetic
from sparkd.graph import ops
from sparkd.graph.plan import Plan
from sparkd.graph.program import Program

#: Weight rows and activation rows of a tile, threads of its block (kernels/cuda/tiles.cuh).
TILE_WEIGHTS = 64
TILE_ROWS = 32
TILE_THREADS = 128
#: Queries of a block of `prefill_attention`, lines of S of one of `prefill_delta`.
_QUERIES = 8
_LINES = 16
#: There is a kernel for heads of up to so many times 32 elements.
_HEAD_DIMS = (2, 4, 8)
#: `Item` in kernels/cuda/prefill.cu.
ITEM = np.dtype([("record", "<u8"), ("first", "<i4"), ("count", "<i4")])


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The products of an expert layer. `first`: address of int32 [experts + 1], where each expert's pairs begin."""

    first: int
    experts: int
    items: int
    products: tuple[Argument, ...]
    down: tuple[Argument, ...]
    gate_tiles: int
    down_tiles: int
    inner: tuple[Argument, ...]
    spans: int

    def launches(self, items: int) -> list[Launch]:
        """For as many `ITEM`s at `items`."""
        return [
            Launch("prefill_experts", (self.gate_tiles, items, 2), TILE_THREADS, self.products),
            Launch("prefill_inner", (self.spans, items, 1), 256, self.inner),
            Launch("prefill_experts", (self.down_tiles, items, 1), TILE_THREADS, self.down),
        ]


def items_of(first: NDArray[np.int32], experts: Sequence[int], records: NDArray[np.uint64]) -> NDArray[np.void]:
    """`ITEM`s of the pairs of some experts, whose records lie there; `first` as in `RoutedExperts`."""
    chosen = np.asarray(experts)
    counts = first[chosen + 1] - first[chosen]
    tiles = -(-counts // TILE_ROWS)
    number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    items = np.zeros(len(number), ITEM)
    items["record"] = np.repeat(records, tiles)
    items["first"] = np.repeat(first[chosen], tiles) + number * TILE_ROWS
    items["count"] = np.minimum(np.repeat(counts, tiles) - number * TILE_ROWS, TILE_ROWS)
    return items


class PrefillLowering(Lowering):
    """The launches of a program for up to `rows` rows of one segment."""

    def pieces(self, count: int) -> Iterator[list[Launch]]:
        """Launches for `count` rows: to a layer's choice of experts, then what does not need them, and so on."""
        piece: list[Launch] = []
        for make in self._made:
            piece.append(make(count))
            for _ in range(self._ends.count(make)):
                yield piece
                piece = []
        yield piece

    def head(self, count: int) -> list[Launch]:
        """Logits of at most `count` rows of the step that was run last."""
        return [make(count) for make in self._head]

    # ---- memory: what a layer leaves is not needed by the next one ----

    def _cut(self, program: Program, keep: Collection[ops.Value]) -> tuple[list[Group], Plan]:
        groups = prompt_groups(program, keep)
        return groups, prompt_plan(program, groups, keep)

    def _take(self, floats: int) -> int:
        # Graphs use it for what they need between two launches: a step runs one after another.
        return self._memory.scratch.floats(floats)

    def _prepare(self) -> None:
        self._ends: list[object] = []
        #: By expert layer.
        self.experts: list[RoutedExperts] = []
        layers = self._program.expert_layers
        pairs = self._rows * max((layer.top_k for layer in layers), default=0)
        experts = max((layer.experts for layer in layers), default=0)
        self._first = self._device.allocate(4 * (experts + 1))
        self._pair = self._device.allocate(max(4, 4 * pairs))
        self._weights_of_ranks = self._device.allocate(max(4, 4 * pairs))
        #: Room for the items of a part of a layer's experts.
        self.items = self._device.allocate(max(1, ITEM.itemsize * (pairs // TILE_ROWS + experts)))
        elements = self._rows * multiplied_width(self._program)
        self._value_forms = _forms_at(self._device.allocate(4 * forms_width(elements)), elements)
        #: Where the present group may put what it needs for itself.
        self._room = 0

    def _new_forms(self, value: ops.Value) -> Forms:
        """The forms of one value at a time."""
        forms = _chosen_forms(self.address(value), self._value_forms, self._needs(value))
        self._forms = {value: forms}
        return forms

    # ---- launches ----

    def _emit_rows(self, kernel: str, per_row: int, in_a_block: int, sides: tuple[int, int], block: int,
                   *arguments: Argument, shared: int = 0) -> None:  # fmt: skip
        """Add a launch: `in_a_block` of the rows' `per_row` parts a block along x; `sides` are y and z."""

        def make(count: int) -> Launch:
            grid = (-(-count * per_row // in_a_block), *sides)
            return Launch(kernel, grid, block, (self._batch.address, *arguments), shared)

        self._made.append(make)

    def _end_piece(self) -> None:
        self._ends.append(self._made[-1])

    def _lower_number(self, number: int, group: Group) -> None:
        self._room = self._arena + self._values.rooms.get(number, 0) * self._rows * 4
        super()._lower_number(number, group)

    def _begin(self) -> None:
        floats = self._layout.record_bytes // 4
        if floats:
            grid = -(-floats // 256)
            self._emit("begin_sequences", (grid, 1, 1), 256, self._state.records, np.int64(floats), axis=None)

    def _blocks(self, weight: ops.Weight) -> int:
        return -(-weight.rows // TILE_WEIGHTS)

    def _multiply(self, grid: int, tasks: NDArray[np.void], forms: Forms) -> None:
        self._emit_rows(
            "prefill_linear", 1, TILE_ROWS, (grid, 1), TILE_THREADS, self._memory.put(tasks), i32(len(tasks)),
            *forms.arguments,
        )  # fmt: skip

    def _single(self, op: ops.Op) -> None:
        at = self.address
        match op:
            case ops.Attention():
                self._emit("write_kv", (op.kv_heads, 1, 1), 32, at(op.k), at(op.v), self._caches, i32(op.cache))
                self._attention(op, at(op.out))
            case ops.CausalConv():
                record = self._record(self._layout.conv_offsets[op.state])
                self._emit(
                    "prefill_conv", spans_of(op.out), 256, at(op.x), self._memory.vector(op.weight), at(op.out),
                    i32(op.out.width), i32(op.taps), *record,
                )  # fmt: skip
                self._emit(
                    "prefill_conv_state", spans_of(op.out), 256, at(op.x), i32(op.out.width), i32(op.taps), *record,
                    axis=None,
                )  # fmt: skip
            case ops.GatedDelta():
                self._delta(op)
            case _:
                super()._single(op)

    def _logits(self, op: ops.Logits) -> None:
        self._inputs(op.x)
        body, self._made = self._made, []
        super()._logits(op)
        self._head, self._made = self._made, body

    def _heads(self, group: Heads) -> None:
        gate = group.gate
        self._prepare_heads(group)
        self._attention(group.attention, self.address(gate.out))
        # In place: each number is read where it is written.
        self._emit(
            "output_gate", spans_of(gate.out), 256, self.address(gate.out), self.address(gate.gate),
            self.address(gate.out), i32(gate.gate.width), i32(gate.heads), i32(gate.head_dim),
            i32(gate.function is ops.Gate.SOFTPLUS), i32(gate.per_head), i32(gate.stride), i32(gate.offset),
        )  # fmt: skip

    def _attention(self, op: ops.Attention, out: int) -> None:
        group = op.heads // op.kv_heads
        dims = next(dims for dims in _HEAD_DIMS if 32 * dims >= op.head_dim)

        def make(count: int) -> Launch:
            grid = (op.kv_heads, -(-count * group // _QUERIES), 1)
            arguments = (
                self._batch.address, self.address(op.q), self._caches, i32(op.cache), i32(op.window),
                np.float32(op.scale), i32(group), out,
            )  # fmt: skip
            return Launch(f"prefill_attention_{dims}", grid, 128, arguments, 32 * op.head_dim * 4)

        self._made.append(make)

    def _delta(self, op: ops.GatedDelta) -> None:
        at, n = self.address, op.head_dim
        qk = self._room
        factors = qk + 4 * self._rows * 2 * op.k_heads * n
        numbers = i32(op.k_heads), i32(op.v_heads), i32(n)
        self._emit(
            "delta_inputs", (2 * op.k_heads + -(-op.v_heads // 32), 1, 1), 32, at(op.qkv), at(op.alpha), at(op.beta),
            self._memory.vector(op.a), self._memory.vector(op.dt_bias), *numbers, np.float32(op.eps), qk, factors,
        )  # fmt: skip
        self._emit(
            "prefill_delta", (op.v_heads, -(-n // _LINES), 1), 128, at(op.qkv), qk, factors, at(op.out), *numbers,
            *self._record(self._layout.delta_offsets[op.state]), axis=None,
        )  # fmt: skip

    def _route(self, op: ops.Route) -> None:
        top_k = op.out.top_k
        forms = self._inputs(op.x)
        logits = self._room
        tasks = np.zeros(1, TASK)
        tasks[0] = (self._memory.matrix(op.weight), logits, 0, op.experts, 0)
        self._multiply(self._blocks(op.weight), tasks, forms)
        ids = self.ids + self._rows * sum(choice.top_k for choice in self.choices) * 4
        choice = Choice(ids, self._weights_of_ranks, top_k)
        self._chosen[op.out] = choice
        self.choices.append(choice)
        bias = 0 if op.bias is None else self._memory.vector(op.bias)
        self._emit_rows(
            "prefill_choose", 1, 4, (1, 1), 128, logits, bias, i32(op.experts), i32(top_k),
            i32(op.function is ops.Router.SIGMOID), np.float32(op.scale), choice.address, choice.weights,
            shared=4 * 2 * op.experts * 4,
        )  # fmt: skip
        self._emit(
            "sort_pairs", (-(-op.experts // 8), 1, 1), 256, choice.address, i32(top_k), i32(op.experts), self._first,
            self._pair, axis=None,
        )  # fmt: skip
        self._end_piece()

    def _experts(self, op: ops.Experts, mixture: Mixture | None) -> None:
        assert mixture is None
        layer = self._program.expert_layers[op.layer]
        choice = self._chosen[op.routing]
        top_k = i32(choice.top_k)
        inputs = self._inputs(op.x).arguments
        self._end_piece()
        down = self._weights.pieces(op.layer)[2].format.arithmetic
        room = experts_room(self._program, op)
        ranked = self._room
        inner = ranked + 4 * self._rows * room.ranked
        up = inner + 4 * self._rows * room.inner
        places = _forms_at(up + 4 * self._rows * room.inner, self._rows * room.inner)
        forms = _chosen_forms(inner, places, set() if down is None else {down})
        row = self._pieces(op.layer)
        row["inner"], row["forms"], row["ranked"] = forms.x, forms.arguments[1:], ranked
        address = self._memory.put(row)
        self.experts.append(
            RoutedExperts(
                first=self._first,
                experts=layer.experts,
                items=self.items,
                products=(self.items, self._pair, address, top_k, i32(0), up, *inputs),
                down=(self.items, self._pair, address, top_k, i32(1), up, *Forms(0).arguments),
                gate_tiles=-(-layer.gate.rows // TILE_WEIGHTS),
                down_tiles=-(-layer.down.rows // TILE_WEIGHTS),
                inner=(self.items, address, up),
                spans=-(-layer.gate.rows // 256),
            )
        )
        self._emit(
            "weighted_sum", spans_of(op.out), 256, ranked, choice.weights, top_k, i32(op.out.width),
            self.address(op.out),
        )  # fmt: skip


def _forms_at(address: int, elements: int) -> tuple[int, int, int, int]:
    """Where both forms of as many elements lie from `address` on: q256, a256, q32, a32."""
    # The integers first: kernels read sixteen at a time, from places that are multiples of that.
    q32, a256 = address + elements, address + 2 * elements
    return address, a256, q32, a256 + elements // 256 * 4


def _chosen_forms(x: int, room: tuple[int, int, int, int], needs: Collection[Arithmetic]) -> Forms:
    q256, a256, q32, a32 = room
    wide, narrow = Arithmetic.INT256 in needs, Arithmetic.INT32 in needs
    return Forms(x, q256 * wide, a256 * wide, q32 * narrow, a32 * narrow)
