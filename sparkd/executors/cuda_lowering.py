"""What a program becomes on a device: memory for its values, and the launches of a step.

`cuda_groups` says which operations share launches; whatever writes a value also writes the quantised forms that its
readers need, where its kernel can. Launches are made for a number of rows; rows that a batch does not have are left
alone by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from sparkd.errors import UnsupportedError
from sparkd.executors.cuda_batch import MAX_ROWS, BatchMemory
from sparkd.executors.cuda_groups import Group, Heads, Linears, Mixture, Shared, Single, groups_of
from sparkd.executors.cuda_host import HostExperts
from sparkd.executors.cuda_memory import CACHE, LAYER, TASK, DeviceMemory, Forms
from sparkd.executors.cuda_source import MAX_TOP_K, check_shapes
from sparkd.executors.device import Argument, Device, Grid, Launch
from sparkd.executors.weights import Weights
from sparkd.gguf.formats import Arithmetic
from sparkd.graph import ops
from sparkd.graph.plan import Plan
from sparkd.graph.plan import plan as plan_values
from sparkd.graph.program import ExpertLayer, Program
from sparkd.graph.state import PAGE, StateLayout

_WARPS = 4
_PAIRS = MAX_ROWS * MAX_TOP_K
_GROUPS_BYTES = 4 * (1 + _PAIRS + (_PAIRS + 1) + _PAIRS)
_Make = Callable[[int], Launch]
#: Launches of steps in which the host computes experts, before and after it is called.
TELL_HOST, TAKE_HOST = "tell_host", "take_host"


@dataclass(frozen=True, slots=True)
class StateAddresses:
    """Where the pages of each group and the records of sequences lie."""

    pages: tuple[int, ...]
    records: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Routed ids int32 [rows, top_k] and their weights float32."""

    address: int
    weights: int
    top_k: int


def i32(value: int) -> np.int32:
    """A number of the width of int."""
    return np.int32(value)


def spans_of(value: ops.Value) -> Grid:
    """A block for every 256 elements of a row."""
    return -(-value.width // 256), 1, 1


def blocks(rows: int, columns: int, warps: int = _WARPS) -> int:
    """Blocks of which `warps` multiply `rows` weight rows of `columns` elements (`rows_per_warp` in products.cuh)."""
    per_warp = 1 if columns > 512 else 2 if columns > 256 else 4
    return -(-rows // (warps * per_warp))


class Lowering:
    """The launches of a program. UnsupportedError for shapes beyond what the kernels take."""

    def __init__(
        self,
        device: Device,
        program: Program,
        weights: Weights,
        layout: StateLayout,
        state: StateAddresses,
        batch: BatchMemory,
        memory: DeviceMemory,
        keep: Collection[ops.Value],
        rows: int = MAX_ROWS,
        host: HostExperts | None = None,
    ) -> None:
        """For steps of the batches in `batch`, of at most `rows` rows. `host`: computes what has no record here."""
        self._device = device
        self._weights = weights
        self._layout = layout
        self._state = state
        self._batch = batch
        self._program = program
        self._rows = rows
        self._host = host
        self._memory = memory
        check_shapes(program)
        groups, self._values = self._cut(program, keep)
        self._arena = self._take(self._values.width * rows)
        self._forms: dict[ops.Value, Forms] = {}
        self._tables: dict[ops.RopeTable, tuple[int, int]] = {}
        self._chosen: dict[ops.Routing, Choice] = {}
        self._made: list[_Make] = []
        #: Routed ids of all layers, one after another: int32 [expert layers, rows, top_k].
        self.ids = device.allocate(max(1, rows * sum(layer.top_k for layer in program.expert_layers) * 4))
        self.choices: list[Choice] = []
        self._caches = self._upload_caches()
        self._prepare()
        self._begin()
        for number, group in enumerate(groups):
            self._lower_number(number, group)

    def address(self, value: ops.Value) -> int:
        """Where the rows of a value lie."""
        return self._arena + self._values.offsets[value] * self._rows * 4

    def launches(self, count: int, host: bool = False) -> list[Launch]:
        """One step of at most `count` rows; `host`: in which the host is told what is missing, and computes it."""
        launches = [make(count) for make in self._made]
        return launches if host else [one for one in launches if one.kernel not in (TELL_HOST, TAKE_HOST)]

    # ---- memory ----

    def _cut(self, program: Program, keep: Collection[ops.Value]) -> tuple[list[Group], Plan]:
        groups = groups_of(program, keep)
        return groups, plan_values(program, keep, [group.members for group in groups])

    def _take(self, floats: int) -> int:
        """Memory for values."""
        return self._device.allocate(4 * floats)

    def _prepare(self) -> None:
        """Take what only steps of a few rows need."""
        #: Addresses of the table of each expert layer: u64 [experts].
        self.record_tables = [self._device.allocate(8 * layer.experts) for layer in self._program.expert_layers]
        self._groups = self._device.allocate(_GROUPS_BYTES)

    def _upload_caches(self) -> int:
        rows = np.zeros(max(1, len(self._layout.caches)), CACHE)
        for row, place, cache in zip(rows, self._layout.caches, self._program.caches, strict=False):
            group = self._layout.groups[place.group]
            row["pages"], row["table"] = self._state.pages[place.group], self._batch.tables[place.group]
            row["page_bytes"], row["k_offset"], row["v_offset"] = group.page_bytes, place.k_offset, place.v_offset
            row["table_width"], row["kv_heads"] = self._batch.table_width, cache.kv_heads
            row["head_dim"], row["half"] = cache.head_dim, self._layout.kv_bytes == 2
        return self._memory.put(rows)

    def _table(self, table: ops.RopeTable) -> tuple[int, int]:
        """Cosines and sines of the step's rows; made once per step."""
        if table not in self._tables:
            pairs = len(table.inv_freq)
            cosine, sine = (self._device.allocate(self._rows * pairs * 4) for _ in range(2))
            frequencies = self._memory.put(np.array(table.inv_freq, "<f8"))
            magnitude = np.float64(table.magnitude)
            grid = -(-pairs // 32)
            self._emit("angles", (grid, 1, 1), 32, frequencies, i32(pairs), magnitude, cosine, sine, first=True)
            self._tables[table] = cosine, sine
        return self._tables[table]

    # ---- launches ----

    def _emit(
        self,
        kernel: str,
        grid: Grid,
        block: int,
        *arguments: Argument,
        shared: int = 0,
        batch: bool = True,
        axis: int | None = 1,
        more: int = 0,
        sized: bool = False,
        first: bool = False,
    ) -> None:
        """Add a launch: `grid[axis]` is for one row, `more` is added to it.

        `sized`: the kernel's name ends with the number of rows.

        `first`: before all others. `batch`: the kernel takes the batch before its other arguments.
        """
        given = (self._batch.address, *arguments) if batch else arguments

        def make(count: int) -> Launch:
            sides = [side * count + more if number == axis else side for number, side in enumerate(grid)]
            return Launch(
                f"{kernel}_{count}" if sized else kernel, (sides[0], sides[1], sides[2]), block, given, shared
            )

        self._made.insert(0 if first else len(self._made), make)

    def _begin(self) -> None:
        floats = self._layout.record_bytes // 4
        if floats:
            grid = -(-floats // 256)
            self._emit("begin_sequences", (grid, 1, 1), 256, self._state.records, np.int64(floats))

    def _needs(self, value: ops.Value) -> set[Arithmetic]:
        """The forms that readers of a value multiply with."""
        needs: set[Arithmetic | None] = set()
        for op in self._program.ops:
            match op:
                case ops.Linear() | ops.Route() | ops.Logits() if op.x == value:
                    needs.add(self._memory.tensors[op.weight.tensor][1].arithmetic)
                case ops.Experts() if op.x == value:
                    needs.update(piece.format.arithmetic for piece in self._weights.pieces(op.layer)[:2])
        if None in needs:
            raise UnsupportedError(f"{value.name} is multiplied with a type that sparkd cannot compute")
        return {need for need in needs if need is not None}

    def _new_forms(self, value: ops.Value) -> Forms:
        """Memory for the forms that readers of a value need, for the kernel that writes it."""
        forms = self._memory.make_forms(value, self.address(value), self._rows, self._needs(value))
        self._forms[value] = forms
        return forms

    def _inputs(self, value: ops.Value) -> Forms:
        """The forms of a value, quantised now unless whoever wrote it did so."""
        if value not in self._forms:
            forms = self._new_forms(value)
            if forms.q256 or forms.q32:
                grid = -(-value.width // 256)
                self._emit(
                    "quantise", (grid, 1, 1), 256, self._batch.address, forms.x, i32(value.width),
                    *forms.arguments[1:], batch=False,
                )  # fmt: skip
        return self._forms[value]

    def _lower_number(self, number: int, group: Group) -> None:
        """Make the launches of a group."""
        match group:
            case Single():
                self._single(group.op)
            case Linears():
                self._linears(group)
            case Heads():
                self._heads(group)
            case Mixture():
                self._experts(group.experts, group)

    def _single(self, op: ops.Op) -> None:
        at = self.address
        match op:
            case ops.Embed():
                address, format, row_bytes = self._memory.weight(op.weight)
                self._emit(
                    "embed", spans_of(op.out), 256, address, i32(format.id), i32(op.out.width), i32(row_bytes),
                    at(op.out),
                )  # fmt: skip
            case ops.RmsNorm():
                forms = self._new_forms(op.out)
                self._emit(
                    "rms_norm", (1, 1, 1), 256, at(op.x), self._memory.vector(op.weight), at(op.out),
                    i32(op.out.width), np.float32(op.eps), *forms.arguments[1:], axis=0,
                )  # fmt: skip
            case ops.QkNorm():
                self._emit(
                    "qk_norm", (op.heads, 1, 1), 32, at(op.x), self._memory.vector(op.weight),
                    at(op.out), i32(op.x.width), i32(op.heads), i32(op.head_dim), np.float32(op.eps), i32(op.stride),
                    i32(op.offset),
                )  # fmt: skip
            case ops.Rope():
                cosine, sine = self._table(op.table)
                self._emit(
                    "rope", (op.heads, 1, 1), 32, at(op.x), at(op.out), i32(op.heads),
                    i32(op.head_dim), i32(len(op.table.inv_freq)), cosine, sine,
                )  # fmt: skip
            case ops.Attention():
                self._emit("write_kv", (op.kv_heads, 1, 1), 32, at(op.k), at(op.v), self._caches, i32(op.cache))
                partials, pages = self._attend(op)
                self._emit(
                    "merge_pages", (op.heads, 1, 1), 128, partials, i32(op.window), i32(pages), i32(op.head_dim),
                    at(op.out),
                )  # fmt: skip
            case ops.OutputGate():
                self._emit(
                    "output_gate", spans_of(op.out), 256, at(op.x), at(op.gate), at(op.out),
                    i32(op.gate.width), i32(op.heads), i32(op.head_dim), i32(op.function is ops.Gate.SOFTPLUS),
                    i32(op.per_head), i32(op.stride), i32(op.offset),
                )  # fmt: skip
            case ops.CausalConv():
                self._emit(
                    "causal_conv", spans_of(op.out), 256, at(op.x), self._memory.vector(op.weight), at(op.out),
                    i32(op.out.width), i32(op.taps), *self._record(self._layout.conv_offsets[op.state]),
                )  # fmt: skip
            case ops.GatedDelta():
                self._emit(
                    "gated_delta", (op.v_heads, 1, 1), 256, at(op.qkv), at(op.alpha),
                    at(op.beta), self._memory.vector(op.a), self._memory.vector(op.dt_bias), at(op.out),
                    i32(op.k_heads), i32(op.v_heads), i32(op.head_dim), np.float32(op.eps),
                    *self._record(self._layout.delta_offsets[op.state]), shared=2 * op.head_dim * 4,
                )  # fmt: skip
            case ops.GatedRmsNorm():
                together = _span_heads(op.heads, op.head_dim)
                forms = self._new_forms(op.out) if together else Forms(at(op.out))
                heads = together or 1
                self._emit(
                    "gated_rms_norm", (op.heads // heads, 1, 1), 32 * heads, at(op.x), at(op.gate),
                    self._memory.vector(op.weight), at(op.out), i32(op.heads), i32(op.head_dim), np.float32(op.eps),
                    *forms.arguments[1:],
                )  # fmt: skip
            case ops.Route():
                self._route(op)
            case ops.Experts():
                self._experts(op, None)
            case ops.SwiGlu():
                self._emit("swiglu", spans_of(op.out), 256, at(op.gate), at(op.up), at(op.out), i32(op.out.width))
            case ops.Add():
                self._emit("add", spans_of(op.out), 256, at(op.x), at(op.y), at(op.out), i32(op.out.width))
            case ops.Logits():
                self._logits(op)

    def _logits(self, op: ops.Logits) -> None:
        """Logits of the rows that the batch wants, and the best of each."""
        address, format, row_bytes = self._memory.weight(op.weight)
        head, rows = self._memory.head, i32(op.weight.rows)
        self._emit(
            "logits", (blocks(op.weight.rows, op.weight.columns), 1, 1), 32 * _WARPS, address, i32(format.id), rows,
            i32(op.weight.columns), i32(row_bytes), *self._inputs(op.x).arguments, head.logits, sized=True, axis=None,
        )  # fmt: skip
        self._emit(
            "argmax", (head.parts, 1, 1), 256, head.logits, rows, head.counters, head.partials, head.best
        )  # fmt: skip

    def _record(self, offset: int) -> tuple[Argument, ...]:
        return self._state.records, np.int64(self._layout.record_bytes // 4), np.int64(offset // 4)

    def _linears(self, group: Linears) -> None:
        forms = self._inputs(group.maps[0].x)
        tasks = np.zeros(len(group.maps), TASK)
        grid = 0
        for number, op in enumerate(group.maps):
            add = group.adds.get(number)
            out, residual = op.out, 0
            if add is not None:
                out, residual = add.out, self.address(add.y if add.x == op.out else add.x)
            tasks[number] = (self._memory.matrix(op.weight), self.address(out), residual, out.width, grid)
            grid += self._blocks(op.weight)
        self._multiply(grid, tasks, forms)

    def _blocks(self, weight: ops.Weight) -> int:
        """Blocks that share the rows of a weight."""
        return blocks(weight.rows, weight.columns)

    def _multiply(self, grid: int, tasks: np.ndarray, forms: Forms) -> None:
        """`TASK`s in `grid` blocks together, of a value with these forms."""
        self._emit(
            "linear", (grid, 1, 1), 32 * _WARPS, self._memory.put(tasks), i32(len(tasks)), *forms.arguments,
            sized=True, axis=None,
        )  # fmt: skip

    def _prepare_heads(self, group: Heads) -> None:
        """Norms and rotation of q and k; k and v go to the cache."""
        at, op = self.address, group.attention
        q, k = group.q_norm, group.k_norm
        cosine, sine = self._table(group.q_rope.table)
        self._emit(
            "prepare_heads", (op.heads + 2 * op.kv_heads, 1, 1), 32, at(q.x), at(k.x), at(op.v),
            self._memory.vector(q.weight), self._memory.vector(k.weight), at(op.q), self._caches, i32(op.cache),
            i32(op.heads), i32(q.x.width), i32(q.stride), i32(q.offset), i32(k.x.width), i32(k.stride), i32(k.offset),
            np.float32(q.eps), i32(len(group.q_rope.table.inv_freq)), cosine, sine, shared=4 * op.head_dim,
        )  # fmt: skip

    def _heads(self, group: Heads) -> None:
        at, op, gate = self.address, group.attention, group.gate
        self._prepare_heads(group)
        partials, pages = self._attend(op)
        together = _span_heads(op.heads, op.head_dim)
        forms = self._new_forms(gate.out) if together else Forms(at(gate.out))
        heads = together or 1
        self._emit(
            "merge_and_gate", (op.heads // heads, 1, 1), 256, partials, i32(op.window), i32(pages), i32(op.head_dim),
            i32(op.heads), i32(heads), at(gate.gate), i32(gate.gate.width), i32(gate.function is ops.Gate.SOFTPLUS),
            i32(gate.per_head), i32(gate.stride), i32(gate.offset), at(gate.out), *forms.arguments[1:],
        )  # fmt: skip

    def _attend(self, op: ops.Attention) -> tuple[int, int]:
        """Every page by itself: where the results lie, and how many pages each row and head has room for."""
        positions = min(self._program.context, self._batch.table_width * PAGE)
        pages = -(-positions // PAGE)
        if op.window:
            pages = min(pages, -(-(op.window - 1) // PAGE) + 1)
        group = op.heads // op.kv_heads
        partials = self._memory.scratch.floats(MAX_ROWS * op.heads * pages * (op.head_dim + 2))
        words = op.head_dim * self._layout.kv_bytes // 4
        self._emit(
            "attend_pages", (op.kv_heads, pages, 1), 32 * group, self.address(op.q), self._caches, i32(op.cache),
            i32(op.window), np.float32(op.scale), i32(pages), partials,
            shared=4 * (group * op.head_dim + 32 * (words + 1)), axis=2,
        )  # fmt: skip
        return partials, pages

    def _route(self, op: ops.Route) -> None:
        top_k = op.out.top_k
        logits = self._device.allocate(MAX_ROWS * op.experts * 4)
        ids = self.ids + MAX_ROWS * sum(choice.top_k for choice in self.choices) * 4
        choice = Choice(ids, self._device.allocate(MAX_ROWS * top_k * 4), top_k)
        self._chosen[op.out] = choice
        self.choices.append(choice)
        address, *numbers = self._memory.matrix(op.weight)
        bias = 0 if op.bias is None else self._memory.vector(op.bias)
        self._emit(
            "route", (blocks(op.experts, op.weight.columns), 1, 1), 32 * _WARPS, address, *map(i32, numbers),
            *self._inputs(op.x).arguments, logits, self._memory.zeros(4), bias, i32(top_k),
            i32(op.function is ops.Router.SIGMOID), np.float32(op.scale), choice.address, choice.weights, self._groups,
            shared=_WARPS * 2 * op.experts * 4, axis=None, sized=True,
        )  # fmt: skip

    def _experts(self, op: ops.Experts, mixture: Mixture | None) -> None:
        """Routed experts; with the shared one, the sums and the norm that follow, where they form a group."""
        layer = self._program.expert_layers[op.layer]
        choice, table = self._chosen[op.routing], self.record_tables[op.layer]
        top_k = choice.top_k
        row = self._pieces(op.layer)
        down = self._weights.pieces(op.layer)[2].format
        inner = self._memory.inner("routed", layer.gate.rows, _pairs(top_k), down)
        row["inner"], row["forms"] = inner.x, inner.arguments[1:]
        row["ranked"] = ranked = self._memory.scratch.floats(_pairs(top_k) * op.out.width)
        spans = -(-layer.gate.rows // 256)
        shared = None if mixture is None else mixture.shared
        shared_spans = 0 if shared is None else -(-shared.gate.out.width // 256)
        row["counters"] = self._memory.zeros(4 * (_PAIRS * spans + shared_spans))
        gate_blocks = blocks(layer.gate.rows, layer.gate.columns, _WARPS // 2)
        down_blocks = blocks(layer.down.rows, layer.down.columns)
        if shared is not None:
            self._shared_expert(row["shared"], shared)
            longer = blocks(shared.gate.weight.rows, shared.gate.weight.columns, _WARPS // 2)
            gate_blocks = max(gate_blocks, longer)
            down_blocks = max(down_blocks, blocks(shared.down.weight.rows, shared.down.weight.columns))
        address = self._memory.put(row)
        host, x = self._host, self._inputs(op.x)
        if host is not None:
            self._emit(
                TELL_HOST, spans_of(op.x), 256, choice.address, table, x.x, i32(top_k), i32(op.x.width), host.told,
                host.x,
            )  # fmt: skip
        self._emit(
            "gate_up", (gate_blocks, top_k, 1), 32 * _WARPS, self._groups, table, address, i32(top_k),
            *x.arguments, more=2, sized=True,
        )  # fmt: skip
        self._emit("down", (down_blocks, top_k, 1), 32 * _WARPS, self._groups, table, address, more=1, sized=True)
        if host is not None:
            self._emit(
                TAKE_HOST, spans_of(op.out), 256, choice.address, table, host.results, i32(top_k), i32(op.out.width),
                ranked,
            )  # fmt: skip
        if mixture is None:
            self._emit(
                "weighted_sum", spans_of(op.out), 256, ranked, choice.weights, i32(top_k), i32(op.out.width),
                self.address(op.out),
            )  # fmt: skip
            return
        assert shared is not None
        last, norm = mixture.residual, mixture.norm
        residual = last.y if last.x == mixture.both.out else last.x
        softly = shared.gated is not None and shared.gated.function is ops.Gate.SOFTPLUS
        factor = 0 if shared.scalar is None else int(row["shared"]["factor"][0])
        self._emit(
            "mixture_sum", (1, 1, 1), 256, ranked, choice.weights, i32(top_k), i32(op.out.width),
            int(row["shared"]["out"][0]), factor, i32(softly), self.address(residual), self.address(last.out),
            self._memory.vector(norm.weight), np.float32(norm.eps), self.address(norm.out),
            *self._new_forms(norm.out).arguments[1:], axis=0,
        )  # fmt: skip

    def _pieces(self, number: int) -> np.ndarray:
        """A `LAYER` in which gate, up and down of an expert layer are."""
        row = np.zeros(1, LAYER)
        layer = self._program.expert_layers[number]
        matrices = zip(("gate", "up", "down"), self._weights.pieces(number), _matrices(layer), strict=True)
        for name, piece, weight in matrices:
            row_bytes = piece.format.row_bytes(weight.columns)
            row[name] = (piece.offset, piece.format.id, weight.rows, weight.columns, row_bytes)
        return row

    def _shared_expert(self, row: np.ndarray, shared: Shared) -> None:
        """Fill `SHARED`."""
        width = shared.gate.out.width
        for name, op in (("gate", shared.gate), ("up", shared.up), ("down", shared.down), ("scalar", shared.scalar)):
            if op is not None:
                row[name] = self._memory.matrix(op.weight)
        inner = self._memory.inner("shared", width, MAX_ROWS, self._memory.tensors[shared.down.weight.tensor][1])
        row["inner"], row["forms"] = inner.x, inner.arguments[1:]
        row["out"] = self._device.allocate(MAX_ROWS * shared.down.out.width * 4)
        row["factor"] = self._device.allocate(MAX_ROWS * 4)


def _pairs(top_k: int) -> int:
    return MAX_ROWS * top_k


def _matrices(layer: ExpertLayer) -> tuple[ops.Weight, ops.Weight, ops.Weight]:
    return layer.gate, layer.up, layer.down


def _span_heads(heads: int, head_dim: int) -> int:
    """Heads that fill a span of 256 elements, a warp at least for each; 0: none do."""
    together = 256 // head_dim if 32 <= head_dim <= 256 and 256 % head_dim == 0 else 0
    return together if together and heads % together == 0 else 0
