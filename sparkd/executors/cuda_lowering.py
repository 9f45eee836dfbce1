"""What a program becomes on a device: memory for its values, and the launches of a step.

Linear maps of one value share a launch; a norm writes the quantised forms that its readers need. Launches are made for
a number of rows; rows that a batch does not have are left alone by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sparkd.errors import UnsupportedError
from sparkd.executors.device import Argument, Device, Grid, Launch, Stream
from sparkd.executors.weights import Weights
from sparkd.gguf.formats import Arithmetic, Format
from sparkd.graph import ops
from sparkd.graph.plan import plan as plan_values
from sparkd.graph.program import Program
from sparkd.graph.state import PAGE, StateLayout

#: `kMaxRows` in kernels/cuda/device.cuh.
MAX_ROWS = 8
_WARPS = 4
_MAX_TOP_K = 16
_MAX_EXPERTS = 1024
_MAX_HEAD_DIM = 256
_PAIRS = MAX_ROWS * _MAX_TOP_K
_GROUPS_BYTES = 4 * (1 + _PAIRS + (_PAIRS + 1) + _PAIRS)
#: `Task`, `Cache` and `Piece` in the kernels.
_TASK = np.dtype(
    [("address", "<u8"), ("type", "<i4"), ("rows", "<i4"), ("columns", "<i4"), ("row_bytes", "<i4"), ("out", "<u8"),
     ("out_width", "<i4"), ("first_block", "<i4")]
)  # fmt: skip
_CACHE = np.dtype(
    [("pages", "<u8"), ("table", "<u8"), ("page_bytes", "<i8"), ("k_offset", "<i8"), ("v_offset", "<i8"),
     ("table_width", "<i4"), ("kv_heads", "<i4"), ("head_dim", "<i4"), ("half", "<i4")]
)  # fmt: skip
_PIECE = np.dtype([("offset", "<i8"), ("type", "<i4"), ("rows", "<i4"), ("columns", "<i4"), ("row_bytes", "<i4")])

_Make = Callable[[int], Launch]


@dataclass(frozen=True, slots=True)
class StateAddresses:
    """Where the batch, the page tables of each group, pages and records lie."""

    batch: int
    tables: tuple[int, ...]
    table_width: int
    pages: tuple[int, ...]
    records: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Routed ids int32 [rows, top_k] and their weights float32."""

    address: int
    weights: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Forms:
    """A value as kernels multiply it: floats, and quantised with one factor per 256 or 32 elements; 0: not made."""

    x: int
    q256: int = 0
    a256: int = 0
    q32: int = 0
    a32: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """In the order in which kernels take them."""
        return self.x, self.q256, self.a256, self.q32, self.a32


def i32(value: int) -> np.int32:
    """A number of the width of int."""
    return np.int32(value)


def spans_of(value: ops.Value) -> Grid:
    """A block for every 256 elements of a row."""
    return -(-value.width // 256), 1, 1


def blocks(rows: int, columns: int) -> int:
    """Blocks that multiply `rows` weight rows of `columns` elements (`rows_per_warp` in products.cuh)."""
    per_warp = 1 if columns > 512 else 2 if columns > 256 else 4
    return -(-rows // (_WARPS * per_warp))


class Lowering:
    """The launches of a program. UnsupportedError for shapes beyond what the kernels take."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        program: Program,
        weights: Weights,
        layout: StateLayout,
        state: StateAddresses,
        keep: Collection[ops.Value],
    ) -> None:
        self._device = device
        self._stream = stream
        self._weights = weights
        self._layout = layout
        self._state = state
        self._program = program = replace(program, ops=tuple(_linear_together(program.ops)))
        _check(program)
        values = plan_values(program, keep)
        self._arena = device.allocate(values.width * MAX_ROWS * 4)
        self._offsets = values.offsets
        self._tensors = self._upload_tensors()
        self._forms: dict[ops.Value, Forms] = {}
        self._tables: dict[ops.RopeTable, tuple[int, int]] = {}
        self._chosen: dict[ops.Routing, Choice] = {}
        self._made: list[_Make] = []
        #: Addresses of the table of each expert layer: u64 [experts].
        self.record_tables = [device.allocate(8 * layer.experts) for layer in program.expert_layers]
        self.choices: list[Choice] = []
        self.logits = device.allocate(MAX_ROWS * program.vocab * 4)
        self._caches = self._upload_caches()
        self._groups = device.allocate(_GROUPS_BYTES)
        self._scratch = _Scratch(device)
        self._begin()
        for group in _launched_together(program.ops):
            self._lower(group)

    def address(self, value: ops.Value) -> int:
        """Where the rows of a value lie."""
        return self._arena + self._offsets[value] * MAX_ROWS * 4

    def launches(self, count: int) -> list[Launch]:
        """One step of at most `count` rows."""
        return [make(count) for make in self._made]

    # ---- memory ----

    def _put(self, data: np.ndarray) -> int:
        address = self._device.allocate(max(1, data.nbytes))
        self._device.upload(self._stream, address, np.ascontiguousarray(data).view(np.uint8).reshape(-1))
        return address

    def _upload_tensors(self) -> dict[str, tuple[int, Format]]:
        """Core tensors, byte for byte."""
        sizes: dict[str, int] = {}
        for weight in _core_weights(self._program):
            row_bytes = self._weights.tensor(weight.tensor).format.row_bytes(weight.columns)
            sizes[weight.tensor] = max(sizes.get(weight.tensor, 0), (weight.first_row + weight.rows) * row_bytes)
        placed = {}
        for name, size in sizes.items():
            stored = self._weights.tensor(name)
            address = self._device.allocate(size)
            self._device.copy(self._stream, address, self._device.register(stored.address, size), size)
            placed[name] = (address, stored.format)
        return placed

    def _upload_caches(self) -> int:
        rows = np.zeros(max(1, len(self._layout.caches)), _CACHE)
        for row, place, cache in zip(rows, self._layout.caches, self._program.caches, strict=False):
            group = self._layout.groups[place.group]
            row["pages"], row["table"] = self._state.pages[place.group], self._state.tables[place.group]
            row["page_bytes"], row["k_offset"], row["v_offset"] = group.page_bytes, place.k_offset, place.v_offset
            row["table_width"], row["kv_heads"] = self._state.table_width, cache.kv_heads
            row["head_dim"], row["half"] = cache.head_dim, self._layout.kv_bytes == 2
        return self._put(rows)

    def _weight(self, weight: ops.Weight) -> tuple[int, Format, int]:
        """Address of the first row, type, bytes of a row."""
        address, format = self._tensors[weight.tensor]
        row_bytes = format.row_bytes(weight.columns)
        return address + weight.first_row * row_bytes, format, row_bytes

    def _vector(self, weight: ops.Weight) -> int:
        address, format, _ = self._weight(weight)
        if format.name != "F32":
            raise UnsupportedError(f"{weight.tensor} is {format.name}; a vector of weights must be F32")
        return address

    def _table(self, table: ops.RopeTable) -> tuple[int, int]:
        """Cosines and sines of the step's rows; made once per step."""
        if table not in self._tables:
            pairs = len(table.inv_freq)
            cosine, sine = (self._device.allocate(MAX_ROWS * pairs * 4) for _ in range(2))
            frequencies = self._put(np.array(table.inv_freq, "<f8"))
            magnitude = np.float64(table.magnitude)
            grid = -(-pairs // 32)
            self._emit("angles", (grid, 1, 1), 32, frequencies, i32(pairs), magnitude, cosine, sine, first=True)
            self._tables[table] = cosine, sine
        return self._tables[table]

    def _make_forms(self, value: ops.Value, address: int, rows: int, needs: set[Arithmetic]) -> Forms:
        """Memory for the forms of a value of `rows` rows."""
        forms = Forms(address)
        if Arithmetic.INT256 in needs:
            q, a = self._device.allocate(rows * value.width), self._device.allocate(rows * value.width // 256 * 4)
            forms = replace(forms, q256=q, a256=a)
        if Arithmetic.INT32 in needs:
            q, a = self._device.allocate(rows * value.width), self._device.allocate(rows * value.width // 32 * 4)
            forms = replace(forms, q32=q, a32=a)
        return forms

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
        sized: bool = False,
        first: bool = False,
    ) -> None:
        """Add a launch: `grid[axis]` is for one row. `sized`: the kernel's name ends with the number of rows.

        `first`: before all others. `batch`: the kernel takes the batch before its other arguments.
        """
        given = (self._state.batch, *arguments) if batch else arguments

        def make(count: int) -> Launch:
            sides = tuple(side * count if number == axis else side for number, side in enumerate(grid))
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
                    needs.add(self._tensors[op.weight.tensor][1].arithmetic)
                case ops.Experts() if op.x == value:
                    needs.update(piece.format.arithmetic for piece in self._weights.pieces(op.layer)[:2])
        if None in needs:
            raise UnsupportedError(f"{value.name} is multiplied with a type that sparkd cannot compute")
        return {need for need in needs if need is not None}

    def _inputs(self, value: ops.Value) -> Forms:
        """The forms of a value, quantised now unless whoever wrote it did so."""
        if value not in self._forms:
            address = self.address(value)
            forms = self._make_forms(value, address, MAX_ROWS, self._needs(value))
            self._forms[value] = forms
            if forms.q256 or forms.q32:
                grid = -(-value.width // 256)
                self._emit(
                    "quantise", (grid, 1, 1), 256, self._state.batch, address, i32(value.width),
                    *forms.arguments[1:], batch=False,
                )  # fmt: skip
        return self._forms[value]

    def _lower(self, group: list[ops.Op]) -> None:
        at = self.address
        op = group[0]
        match op:
            case ops.Linear():
                self._linear([member for member in group if isinstance(member, ops.Linear)])
            case ops.Embed():
                address, format, row_bytes = self._weight(op.weight)
                self._emit(
                    "embed", spans_of(op.out), 256, address, i32(format.id), i32(op.out.width), i32(row_bytes),
                    at(op.out),
                )  # fmt: skip
            case ops.RmsNorm():
                forms = self._make_forms(op.out, at(op.out), MAX_ROWS, self._needs(op.out))
                self._forms[op.out] = forms
                self._emit(
                    "rms_norm", (1, 1, 1), 256, at(op.x), self._vector(op.weight), at(op.out),
                    i32(op.out.width), np.float32(op.eps), *forms.arguments[1:], axis=0,
                )  # fmt: skip
            case ops.QkNorm():
                self._emit(
                    "qk_norm", (op.heads, 1, 1), 32, at(op.x), self._vector(op.weight),
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
                self._attention(op)
            case ops.OutputGate():
                self._emit(
                    "output_gate", spans_of(op.out), 256, at(op.x), at(op.gate), at(op.out),
                    i32(op.gate.width), i32(op.heads), i32(op.head_dim), i32(op.function is ops.Gate.SOFTPLUS),
                    i32(op.per_head), i32(op.stride), i32(op.offset),
                )  # fmt: skip
            case ops.CausalConv():
                self._emit(
                    "causal_conv", spans_of(op.out), 256, at(op.x), self._vector(op.weight), at(op.out),
                    i32(op.out.width), i32(op.taps), *self._record(self._layout.conv_offsets[op.state]),
                )  # fmt: skip
            case ops.GatedDelta():
                self._emit(
                    "gated_delta", (op.v_heads, 1, 1), 256, at(op.qkv), at(op.alpha),
                    at(op.beta), self._vector(op.a), self._vector(op.dt_bias), at(op.out), i32(op.k_heads),
                    i32(op.v_heads), i32(op.head_dim), np.float32(op.eps),
                    *self._record(self._layout.delta_offsets[op.state]), shared=2 * op.head_dim * 4,
                )  # fmt: skip
            case ops.GatedRmsNorm():
                self._emit(
                    "gated_rms_norm", (op.heads, 1, 1), 32, at(op.x), at(op.gate),
                    self._vector(op.weight), at(op.out), i32(op.heads), i32(op.head_dim), np.float32(op.eps),
                )  # fmt: skip
            case ops.Route():
                self._route(op)
            case ops.Experts():
                self._experts(op)
            case ops.SwiGlu():
                self._emit("swiglu", spans_of(op.out), 256, at(op.gate), at(op.up), at(op.out), i32(op.out.width))
            case ops.Add():
                self._emit("add", spans_of(op.out), 256, at(op.x), at(op.y), at(op.out), i32(op.out.width))
            case ops.Logits():
                address, format, row_bytes = self._weight(op.weight)
                grid = blocks(op.weight.rows, op.weight.columns)
                self._emit(
                    "logits", (grid, 1, 1), 32 * _WARPS, address, i32(format.id), i32(op.weight.rows),
                    i32(op.weight.columns), i32(row_bytes), *self._inputs(op.x).arguments, self.logits, sized=True,
                    axis=None,
                )  # fmt: skip

    def _record(self, offset: int) -> tuple[Argument, ...]:
        return self._state.records, np.int64(self._layout.record_bytes // 4), np.int64(offset // 4)

    def _linear(self, members: list[ops.Linear]) -> None:
        forms = self._inputs(members[0].x)
        tasks = np.zeros(len(members), _TASK)
        grid = 0
        for task, op in zip(tasks, members, strict=True):
            address, format, row_bytes = self._weight(op.weight)
            task["address"], task["type"], task["row_bytes"] = address, format.id, row_bytes
            task["rows"], task["columns"] = op.weight.rows, op.weight.columns
            task["out"], task["out_width"], task["first_block"] = self.address(op.out), op.out.width, grid
            grid += blocks(op.weight.rows, op.weight.columns)
        self._emit(
            "linear", (grid, 1, 1), 32 * _WARPS, self._put(tasks), i32(len(members)), *forms.arguments,
            sized=True, axis=None,
        )  # fmt: skip

    def _attention(self, op: ops.Attention) -> None:
        at, window = self.address, op.window
        positions = min(self._program.context, self._state.table_width * PAGE)
        pages = -(-positions // PAGE)
        if window:
            pages = min(pages, -(-(window - 1) // PAGE) + 1)
        group = op.heads // op.kv_heads
        self._emit("write_kv", (op.kv_heads, 1, 1), 32, at(op.k), at(op.v), self._caches, i32(op.cache))
        partials = self._scratch.floats(MAX_ROWS * op.heads * pages * (op.head_dim + 2))
        words = op.head_dim * self._layout.kv_bytes // 4
        self._emit(
            "attend_pages", (op.kv_heads, pages, 1), 32 * group, at(op.q), self._caches, i32(op.cache),
            i32(window), np.float32(op.scale), i32(pages), partials,
            shared=4 * (group * op.head_dim + 32 * (words + 1)), axis=2,
        )  # fmt: skip
        self._emit(
            "merge_pages", (op.heads, 1, 1), 128, partials, i32(window), i32(pages), i32(op.head_dim),
            at(op.out),
        )  # fmt: skip

    def _route(self, op: ops.Route) -> None:
        top_k = op.out.top_k
        address, format, row_bytes = self._weight(op.weight)
        logits = self._device.allocate(MAX_ROWS * op.experts * 4)
        choice = Choice(self._device.allocate(MAX_ROWS * top_k * 4), self._device.allocate(MAX_ROWS * top_k * 4), top_k)
        self._chosen[op.out] = choice
        self.choices.append(choice)
        task = np.array([(address, format.id, op.experts, op.weight.columns, row_bytes, logits, op.experts, 0)], _TASK)
        grid = blocks(op.experts, op.weight.columns)
        self._emit(
            "linear", (grid, 1, 1), 32 * _WARPS, self._put(task), i32(1), *self._inputs(op.x).arguments,
            sized=True, axis=None,
        )  # fmt: skip
        bias = 0 if op.bias is None else self._vector(op.bias)
        self._emit(
            "route", (1, 1, 1), 32, logits, bias, i32(op.experts), i32(top_k),
            i32(op.function is ops.Router.SIGMOID), np.float32(op.scale), choice.address, choice.weights, axis=0,
        )  # fmt: skip

    def _experts(self, op: ops.Experts) -> None:
        layer = self._program.expert_layers[op.layer]
        choice = self._chosen[op.routing]
        top_k, table = choice.top_k, self.record_tables[op.layer]
        pieces = np.zeros(3, _PIECE)
        placed = zip(pieces, self._weights.pieces(op.layer), (layer.gate, layer.up, layer.down), strict=True)
        for row, piece, weight in placed:
            row["offset"], row["type"], row["rows"] = piece.offset, piece.format.id, weight.rows
            row["columns"], row["row_bytes"] = weight.columns, piece.format.row_bytes(weight.columns)
        address = self._put(pieces)
        hidden = ops.Value("inner", layer.gate.rows)
        down = self._weights.pieces(op.layer)[2].format.arithmetic
        assert down is not None
        inner = self._make_forms(hidden, self._device.allocate(_pairs(top_k) * hidden.width * 4), _pairs(top_k), {down})
        ranked = self._scratch.floats(_pairs(top_k) * op.out.width)
        self._emit("group", (1, 1, 1), _PAIRS, choice.address, i32(top_k), self._groups, axis=None)
        grid = blocks(layer.gate.rows, layer.gate.columns)
        self._emit(
            "gate_up", (grid, top_k, 1), 32 * _WARPS, self._groups, table, address, i32(top_k),
            *self._inputs(op.x).arguments, inner.x, batch=False, sized=True,
        )  # fmt: skip
        if inner.q256 or inner.q32:
            spans = -(-hidden.width // 256)
            self._emit(
                "quantise", (spans, top_k, 1), 256, 0, inner.x, i32(hidden.width), *inner.arguments[1:],
                batch=False,
            )  # fmt: skip
        down_grid = blocks(layer.down.rows, layer.down.columns)
        self._emit(
            "down", (down_grid, top_k, 1), 32 * _WARPS, self._groups, table, address, *inner.arguments,
            ranked, batch=False, sized=True,
        )  # fmt: skip
        self._emit(
            "weighted_sum", spans_of(op.out), 256, ranked, choice.weights, i32(top_k),
            i32(op.out.width), self.address(op.out),
        )  # fmt: skip


class _Scratch:
    """Memory that launches use one after another: as large as the largest that was asked for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._address = 0
        self._size = 0

    def floats(self, count: int) -> int:
        """The address of `count` floats, or more."""
        if 4 * count > self._size:
            self._address, self._size = self._device.allocate(4 * count), 4 * count
        return self._address


def _pairs(top_k: int) -> int:
    return MAX_ROWS * top_k


def _core_weights(program: Program) -> Iterator[ops.Weight]:
    for op in program.ops:
        for name in ("weight", "bias", "a", "dt_bias"):
            weight = getattr(op, name, None)
            if isinstance(weight, ops.Weight):
                yield weight


def _linear_together(operations: tuple[ops.Op, ...]) -> Iterator[ops.Op]:
    """The same operations, each linear map right after the first one of its value."""
    moved: set[int] = set()
    for index, op in enumerate(operations):
        if index in moved:
            continue
        yield op
        if isinstance(op, ops.Linear):
            for later in range(index + 1, len(operations)):
                other = operations[later]
                if isinstance(other, ops.Linear) and other.x == op.x:
                    moved.add(later)
                    yield other


def _launched_together(operations: tuple[ops.Op, ...]) -> Iterator[list[ops.Op]]:
    """Linear maps of one value that follow each other form a group; every other operation is one by itself."""
    group: list[ops.Op] = []
    for op in operations:
        last = group[-1] if group else None
        if isinstance(op, ops.Linear) and isinstance(last, ops.Linear) and op.x == last.x:
            group.append(op)
            continue
        if group:
            yield group
        group = [op]
    if group:
        yield group


def _check(program: Program) -> None:
    """UnsupportedError for what the kernels' fixed sizes do not hold."""
    for layer in program.expert_layers:
        if layer.top_k > _MAX_TOP_K or layer.experts > _MAX_EXPERTS:
            raise UnsupportedError(
                f"layer {layer.layer} chooses {layer.top_k} of {layer.experts} experts; a GPU worker takes at most"
                f" {_MAX_TOP_K} of {_MAX_EXPERTS}"
            )
    for cache in program.caches:
        if cache.head_dim > _MAX_HEAD_DIM or cache.head_dim % 2:
            raise UnsupportedError(
                f"layer {cache.layer} has heads of {cache.head_dim}, a GPU worker takes {_MAX_HEAD_DIM}"
            )
