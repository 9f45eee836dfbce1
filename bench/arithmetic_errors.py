"""Largest errors of exp, sigmoid, silu and softplus of docs/arithmetic.md over every float32 of their range.

    python bench/arithmetic_errors.py

Takes some minutes on one core. The truth is float64 (numpy). An error in ulp is in steps of the float32 result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sparkd.kernels import native

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

#: Floats taken at a time.
CHUNK = 1 << 22


def step_of(x: Float64) -> Float64:
    """Distance of neighbouring float32 numbers at x."""
    exponent = np.maximum(np.frexp(x)[1], -125)
    return np.ldexp(1.0, exponent - 24)


def floats(low: float, high: float) -> list[tuple[int, int]]:
    """Ranges of bit patterns that hold every float32 from low (negative) to high (positive)."""
    return [
        (0x80000000, int(np.float32(low).view(np.uint32)) + 1),
        (0, int(np.float32(high).view(np.uint32)) + 1),
    ]


def largest_error(
    function: Callable[[Float32], Float32], truth: Callable[[Float64], Float64], low: float, high: float
) -> tuple[float, float]:
    """Largest error in ulp over [low, high] and the x where it occurs."""
    worst, where = 0.0, 0.0
    for first, last in floats(low, high):
        for start in range(first, last, CHUNK):
            x = np.arange(start, min(last, start + CHUNK), dtype=np.uint32).view(np.float32)
            expected = truth(x.astype(np.float64))
            error = np.abs(function(x) - expected) / step_of(expected)
            i = int(np.argmax(error))
            if error[i] > worst:
                worst, where = float(error[i]), float(x[i])
    return worst, where


def main() -> None:
    m = native().arithmetic
    functions = (
        ("exp", m.exp, np.exp, -87.33654, 88.0),
        ("sigmoid", m.sigmoid, lambda x: 1 / (1 + np.exp(-x)), -87.0, 88.0),
        ("silu", m.silu, lambda x: x / (1 + np.exp(-x)), -87.0, 88.0),
        ("softplus", m.softplus, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), -87.0, 88.0),
    )
    print("| function | range | largest error (ulp) | at x |")
    print("| --- | --- | --- | --- |")
    for name, function, truth, low, high in functions:
        worst, where = largest_error(function, truth, low, high)
        print(f"| {name} | {low:g} .. {high:g} | {worst:.3f} | {where!r} |", flush=True)


if __name__ == "__main__":
    main()
