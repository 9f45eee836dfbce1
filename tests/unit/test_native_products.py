"""Products of every weight type and instruction set against their scalar definition, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.formats import FORMATS_BY_NAME, Arithmetic, Format
from sparkd.graph import ops
from sparkd.graph.ops import Value, Weight
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.kernels import available, native

COMPUTED = [f.name for f in FORMATS_BY_NAME.values() if f.arithmetic is not None]
#: Activation rows: one, few, as many as a tile takes at a time, what is left over of that, and more than share a tile.
COUNTS = (1, 2, 3, 4, 8, 15, 67)


class TwoTensors:
    """Activations as an embedding, and the weight under test."""

    def __init__(self, activations: NDArray[np.float32], table: NDArray[np.uint8], format: Format) -> None:
        self._activations, self._table, self._format = activations, table, format

    def tensor(self, name: str) -> Stored:
        if name == "activations":
            return Stored(self._activations.ctypes.data, FORMATS_BY_NAME["F32"])
        return Stored(self._table.ctypes.data, self._format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        raise AssertionError("no experts here")

    def records(self) -> list[NDArray[np.uint64]]:
        return []


def products(isa: str, format: Format, activations: NDArray[np.float32], table: NDArray[np.uint8]) -> NDArray:
    """[activation rows, weight rows], through a plan."""
    (count, columns), rows = activations.shape, len(table)
    x = Value("x", columns)
    head = ops.Logits(x, Weight("weight", rows, columns))
    embed = ops.Embed(Weight("activations", count, columns), x)
    program = Program("test", columns, rows, 128, (embed, head), *[()] * 5)
    layout = StateLayout.of(program, 2)
    memory = StateMemory.allocate(layout, (), 0)
    weights = TwoTensors(activations, table, format)
    executor = NativeExecutor(program, weights, layout, memory, max_rows=count, threads=1, isa=isa)
    tokens = np.arange(count, dtype=np.int32)
    return executor.step(Batch(tokens, (Segment(0, count, (), 0, RowKind.PREFILL),), tokens)).logits


def defined(format: Format, activations: NDArray[np.float32], table: NDArray[np.uint8]) -> NDArray:
    """The same by the scalar definition, product by product."""
    arithmetic = native("x86-64" if "x86-64" in available() else "auto").arithmetic
    if format.arithmetic is Arithmetic.FLOAT:
        floats = [arithmetic.dequantise_row(format.id, w.copy()) for w in table]
        return np.array([[arithmetic.dot32(x, w) for w in floats] for x in activations], np.float32)
    form = 32 if format.arithmetic is Arithmetic.INT32 else 256
    quantised = [arithmetic.quantise_row(x, form) for x in activations]
    return np.array([[arithmetic.product(format.id, w.copy(), *x) for w in table] for x in quantised], np.float32)


def unaligned(rng: np.random.Generator, rows: int, row_bytes: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, 1 + rows * row_bytes, np.uint8)[1:].reshape(rows, row_bytes)


def check(isa: str, format: Format, activations: NDArray[np.float32], table: NDArray[np.uint8]) -> None:
    result, expected = products(isa, format, activations, table), defined(format, activations, table)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(result), nan)
    # As bits, so that signs of zeros count.
    assert np.array_equal(result[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("isa", available())
def test_products_of_all_shapes_have_the_bits_of_their_definition(isa: str, name: str) -> None:
    format = FORMATS_BY_NAME[name]
    rng = np.random.default_rng(format.id)
    widths = [1, 2, 3, 4, 5, 7, 8, 11, 16, 19]
    columns = [256 * w for w in widths] + [w for w in (32, 64, 96, 288, 448, 2144) if w % format.block == 0]
    for number, width in enumerate([*columns, 31, 33] if format.block == 1 else columns):
        count = COUNTS[number % len(COUNTS)]
        rows = int(rng.integers(count, count + 30))
        activations = (rng.normal(size=(count, width)) * 2.0 ** rng.integers(-8, 8, (count, 1))).astype(np.float32)
        table = unaligned(rng, rows, format.row_bytes(width))
        table[::2] &= 0xBF  # in every second row no factor is infinite or NaN
        check(isa, format, activations, table)


def extreme(rng: np.random.Generator, count: int, width: int) -> NDArray[np.float32]:
    """Rows of zeros, denormals, numbers that overflow when multiplied, equal ones, and ones that are not finite."""
    rows = rng.normal(size=(count, width)).astype(np.float32)
    rows[0] = 0.0
    rows[1] *= np.float32(1e-42)
    rows[2] *= np.float32(2.0**-96)
    rows[3] *= np.float32(3e37)
    rows[4] = np.float32(-1.0)
    rows[5] = np.where(np.arange(width) % 2, -127.0, 127.0)
    rows[6, ::32] = 3e38
    rows[7, width // 2] = np.nan
    rows[8, width // 3] = np.inf
    rows[9, -1] = -np.inf
    return rows


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("isa", available())
def test_extreme_activations_and_weights_give_the_bits_of_their_definition(isa: str, name: str) -> None:
    format = FORMATS_BY_NAME[name]
    rng = np.random.default_rng(1000 + format.id)
    for count in (10, 11):
        for width in (512, 2560):
            table = unaligned(rng, 19, format.row_bytes(width))
            table[0] = 0
            table[1] = 0xFF
            table[2] = 0x80
            table[3] = 0x7F
            table[4::2] &= 0x83  # small factors, some denormal
            activations = extreme(rng, 11, width)[-count:]
            check(isa, format, activations, table)
            check(isa, format, activations[:1], table)
            check(isa, format, activations[1:4], table)
