"""What a program has in device memory: its weights, values as kernels multiply them, what they are told about both."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import UnsupportedError
from sparkd.executors.cuda_batch import MAX_ROWS
from sparkd.executors.device import Device, Stream
from sparkd.executors.weights import Weights
from sparkd.gguf.formats import Arithmetic, Format
from sparkd.graph import ops
from sparkd.graph.program import Program

#: Blocks that look for the best token of a row; at most the threads of one.
_BEST_BLOCKS = 64
#: `Matrix`, `Task`, `Cache`, `Piece`, `Quantised`, `SharedExpert` and `Layer` in the kernels.
MATRIX = np.dtype(
    [("address", "<u8"), ("type", "<i4"), ("rows", "<i4"), ("columns", "<i4"), ("row_bytes", "<i4")]
)  # fmt: skip
TASK = np.dtype(
    [("weight", MATRIX), ("out", "<u8"), ("residual", "<u8"), ("out_width", "<i4"), ("first_block", "<i4")]
)  # fmt: skip
CACHE = np.dtype(
    [("pages", "<u8"), ("table", "<u8"), ("page_bytes", "<i8"), ("k_offset", "<i8"), ("v_offset", "<i8"),
     ("table_width", "<i4"), ("kv_heads", "<i4"), ("head_dim", "<i4"), ("half", "<i4")]
)  # fmt: skip
PIECE = np.dtype([("offset", "<i8"), ("type", "<i4"), ("rows", "<i4"), ("columns", "<i4"), ("row_bytes", "<i4")])
SHARED = np.dtype(
    [("gate", MATRIX), ("up", MATRIX), ("down", MATRIX), ("scalar", MATRIX), ("inner", "<u8"),
     ("forms", "<u8", 4), ("out", "<u8"), ("factor", "<u8")]
)  # fmt: skip
LAYER = np.dtype(
    [("gate", PIECE), ("up", PIECE), ("down", PIECE), ("inner", "<u8"), ("forms", "<u8", 4), ("ranked", "<u8"),
     ("counters", "<u8"), ("shared", SHARED)]
)  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class Head:
    """What steps leave: `logits` float32 [MAX_ROWS, vocab] and the best id of each row, int32 [MAX_ROWS].

    `parts`: of a row, among which the best is looked for; `counters` and `partials` are for that.
    """

    logits: int
    best: int
    counters: int
    partials: int
    parts: int


class DeviceMemory:
    """Allocates and fills; `tensors`: address and type of each core tensor. DeviceError where there is no room."""

    def __init__(self, device: Device, stream: Stream, program: Program, weights: Weights) -> None:
        self._device = device
        self._stream = stream
        self.tensors = self._upload(program, weights)
        self.scratch = Scratch(device)
        self._inner: dict[tuple[str, int, int, Arithmetic], Forms] = {}
        parts = min(_BEST_BLOCKS, -(-program.vocab // 256))
        self.head = Head(
            logits=device.allocate(4 * MAX_ROWS * program.vocab),
            best=device.allocate(4 * MAX_ROWS),
            counters=self.zeros(4 * MAX_ROWS),
            partials=device.allocate(8 * MAX_ROWS * parts),
            parts=parts,
        )

    def put(self, data: np.ndarray) -> int:
        """Copy an array there."""
        address = self._device.allocate(max(1, data.nbytes))
        self._device.upload(self._stream, address, np.ascontiguousarray(data).view(np.uint8).reshape(-1))
        return address

    def zeros(self, size: int) -> int:
        """`size` bytes of 0."""
        address = self._device.allocate(size)
        self._device.zero(self._stream, address, size)
        return address

    def _upload(self, program: Program, weights: Weights) -> dict[str, tuple[int, Format]]:
        """Core tensors, byte for byte."""
        sizes: dict[str, int] = {}
        for weight in _core_weights(program):
            row_bytes = weights.tensor(weight.tensor).format.row_bytes(weight.columns)
            sizes[weight.tensor] = max(sizes.get(weight.tensor, 0), (weight.first_row + weight.rows) * row_bytes)
        placed = {}
        for name, size in sizes.items():
            stored = weights.tensor(name)
            host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(stored.address))
            address = self._device.allocate(size)
            self._device.upload(self._stream, address, host)
            placed[name] = (address, stored.format)
        return placed

    def weight(self, weight: ops.Weight) -> tuple[int, Format, int]:
        """Address of the first row, type, bytes of a row."""
        address, format = self.tensors[weight.tensor]
        row_bytes = format.row_bytes(weight.columns)
        return address + weight.first_row * row_bytes, format, row_bytes

    def matrix(self, weight: ops.Weight) -> tuple[int, int, int, int, int]:
        """A weight as `MATRIX`."""
        address, format, row_bytes = self.weight(weight)
        return address, format.id, weight.rows, weight.columns, row_bytes

    def vector(self, weight: ops.Weight) -> int:
        """The address of a weight that is a vector."""
        address, format, _ = self.weight(weight)
        if format.name != "F32":
            raise UnsupportedError(f"{weight.tensor} is {format.name}; a vector of weights must be F32")
        return address

    def make_forms(self, value: ops.Value, address: int, rows: int, needs: set[Arithmetic]) -> Forms:
        """Memory for the forms of a value of `rows` rows."""
        forms = Forms(address)
        if Arithmetic.INT256 in needs:
            q, a = self._device.allocate(rows * value.width), self._device.allocate(rows * value.width // 256 * 4)
            forms = replace(forms, q256=q, a256=a)
        if Arithmetic.INT32 in needs:
            q, a = self._device.allocate(rows * value.width), self._device.allocate(rows * value.width // 32 * 4)
            forms = replace(forms, q32=q, a32=a)
        return forms

    def inner(self, name: str, width: int, rows: int, down: Format) -> Forms:
        """Memory for inner rows of experts in the forms that `down` is multiplied with, the same for all layers."""
        assert down.arithmetic is not None
        key = (name, width, rows, down.arithmetic)
        if key not in self._inner:
            x = self._device.allocate(rows * width * 4)
            self._inner[key] = self.make_forms(ops.Value("inner", width), x, rows, {down.arithmetic})
        return self._inner[key]


class Scratch:
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


class Pinned:
    """Host memory for what a step leaves; grows with the largest step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def room(self, size: int) -> NDArray[np.uint8]:
        """The first `size` bytes."""
        if size > len(self._memory):
            self._memory = self._device.pinned(size)
        return self._memory[:size]


def _core_weights(program: Program) -> Iterator[ops.Weight]:
    for op in program.ops:
        for name in ("weight", "bias", "a", "dt_bias"):
            weight = getattr(op, name, None)
            if isinstance(weight, ops.Weight):
                yield weight
