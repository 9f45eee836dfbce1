"""The one table of quantisation types: how many bytes a block has, and how sparkd multiplies with it.

A tensor's elements are stored in blocks along its first dimension; a row is a whole number of blocks. Ids, names and
sizes are those of ggml. Types without an `arithmetic` can be read and reported, not computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray


class Arithmetic(Enum):
    """How a product with a weight of a type is computed (`docs/arithmetic.md`)."""

    FLOAT = "float"
    """Dequantised, then multiplied and added in float32."""
    INT32 = "integer, activation scale per 32"
    """Exact integer sums; activations are int8 with one float32 scale per 32 elements."""
    INT256 = "integer, activation scale per 256"
    """Exact integer sums; activations are int8 with one float32 scale per 256 elements."""


@dataclass(frozen=True, slots=True)
class Format:
    """A quantisation type: `block` elements take `bytes` bytes; `arithmetic` is None where sparkd cannot compute."""

    name: str
    id: int
    block: int
    bytes: int
    arithmetic: Arithmetic | None = None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` elements; ValueError when that is not a whole number of blocks."""
        blocks, rest = divmod(columns, self.block)
        if rest:
            raise ValueError(f"a row of {columns} elements is not a whole number of {self.name} blocks of {self.block}")
        return blocks * self.bytes


_TABLE = (
    Format("F32", 0, 1, 4, Arithmetic.FLOAT),
    Format("F16", 1, 1, 2, Arithmetic.FLOAT),
    Format("Q4_0", 2, 32, 18, Arithmetic.INT32),
    Format("Q4_1", 3, 32, 20, Arithmetic.INT32),
    Format("Q5_0", 6, 32, 22, Arithmetic.INT32),
    Format("Q5_1", 7, 32, 24, Arithmetic.INT32),
    Format("Q8_0", 8, 32, 34, Arithmetic.INT32),
    Format("Q8_1", 9, 32, 36),
    Format("Q2_K", 10, 256, 84, Arithmetic.INT256),
    Format("Q3_K", 11, 256, 110, Arithmetic.INT256),
    Format("Q4_K", 12, 256, 144, Arithmetic.INT256),
    Format("Q5_K", 13, 256, 176, Arithmetic.INT256),
    Format("Q6_K", 14, 256, 210, Arithmetic.INT256),
    Format("Q8_K", 15, 256, 292),
    Format("IQ2_XXS", 16, 256, 66, Arithmetic.FLOAT),
    Format("IQ2_XS", 17, 256, 74, Arithmetic.FLOAT),
    Format("IQ3_XXS", 18, 256, 98, Arithmetic.FLOAT),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ4_NL", 20, 32, 18, Arithmetic.INT32),
    Format("IQ3_S", 21, 256, 110, Arithmetic.FLOAT),
    Format("IQ2_S", 22, 256, 82, Arithmetic.FLOAT),
    Format("IQ4_XS", 23, 256, 136, Arithmetic.INT256),
    Format("I8", 24, 1, 1),
    Format("I16", 25, 1, 2),
    Format("I32", 26, 1, 4),
    Format("I64", 27, 1, 8),
    Format("F64", 28, 1, 8),
    Format("IQ1_M", 29, 256, 56),
    Format("BF16", 30, 1, 2, Arithmetic.FLOAT),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17, Arithmetic.INT32),
    Format("NVFP4", 40, 64, 36, Arithmetic.FLOAT),
    Format("Q1_0", 41, 128, 18),
)

#: Every type by its ggml id, also those that sparkd cannot compute with, so that they are refused by name.
FORMATS: Mapping[int, Format] = MappingProxyType({format.id: format for format in _TABLE})

#: The same by name.
FORMATS_BY_NAME: Mapping[str, Format] = MappingProxyType({format.name: format for format in _TABLE})


def dequantise(format: Format, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The float32 values of a tensor's bytes, as an array of `shape` in row-major (reversed ne) order.

    For tests, the reference executor and inspection: goes through the `gguf` package, whose values the format defines.
    ValueError when `data` has not the bytes that `shape` needs, NotImplementedError for types that it cannot decode.
    """
    import gguf

    rows = 1
    for dimension in shape[:-1]:
        rows *= dimension
    row_bytes = format.row_bytes(shape[-1])
    if data.size != rows * row_bytes:
        raise ValueError(f"{format.name} {shape} takes {rows * row_bytes} bytes, got {data.size}")
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(rows, row_bytes)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(format.id))
    return np.asarray(values, dtype=np.float32).reshape(shape)
