"""Which experts the next layer will probably choose, told before its router speaks: whether to read them is judged too.

The next layer's norm and router are applied to the present hidden state. That is a guess: it is computed in any order
of sums, and decides nothing but what is read. A right guess saves the wait for a read, a wrong one delays what is
missing by one at most, since what has not begun is given up: so guesses are followed while more are right than wrong.
While they are not, one step in a few still makes them, and nobody hears of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.weights import Weights
from sparkd.graph import ops
from sparkd.graph.program import Program

#: Rows that guesses are made for: more want more records than there is time to read.
MOST_ROWS = 2
#: Guesses count half after so many others; they are followed from this share of right ones on, and until that.
_HALF_LIFE = 1024.0
_ENOUGH = 64.0
_BEGIN, _END = 0.5, 0.4
#: Of the steps, one in so many guesses while guesses are not followed.
_SELDOM = 16


@dataclass(frozen=True, slots=True)
class _Router:
    hidden: ops.Value
    scale: NDArray[np.float32]
    matrix: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    eps: float
    top_k: int


class Foresight:
    """Guesses for one program, and what became of them."""

    def __init__(self, program: Program, weights: Weights) -> None:
        self._routers: list[_Router] = []
        self._why = ""
        norms = {op.out: op for op in program.ops if isinstance(op, ops.RmsNorm)}
        for route in (op for op in program.ops if isinstance(op, ops.Route)):
            norm = norms.get(route.x)
            matrix = _floats(weights, route.weight)
            if norm is None or matrix is None or (scale := _floats(weights, norm.weight)) is None:
                self._why = f"{route.weight.tensor} is not a matrix of F32 behind a norm"
                break
            bias = None if route.bias is None else _floats(weights, route.bias)
            shape = route.weight.rows, route.weight.columns
            top_k = route.out.top_k
            self._routers.append(_Router(norm.x, scale, matrix.reshape(shape), bias, norm.eps, top_k))
        self._steps = 0
        self._open: tuple[int, frozenset[int]] | None = None
        self._right = self._wrong = 0.0
        self.on = False

    def begin(self) -> None:
        """A step begins."""
        self._steps += 1
        self._judge(-1, ())

    def wanted(self, layer: int, rows: int) -> ops.Value | None:
        """The hidden state that a guess after this expert layer is made from; None: no guess is wanted now."""
        if self._why or rows > MOST_ROWS or layer + 1 >= len(self._routers):
            return None
        if self.on or self._right + self._wrong < _ENOUGH or self._steps % _SELDOM == 0:
            return self._routers[layer].hidden
        return None

    def guess(self, layer: int, hidden: NDArray[np.float32]) -> list[int]:
        """Experts of the next layer, the likeliest first: as many of each row as it chooses."""
        router = self._routers[layer + 1]
        ranked = []
        for row in hidden:
            scores = router.matrix @ (row * (router.scale / np.sqrt(row @ row / len(row) + router.eps)))
            if router.bias is not None:
                scores = 1.0 / (1.0 + np.exp(-scores)) + router.bias
            ranked.append(np.argsort(-scores)[: router.top_k].tolist())
        return list(dict.fromkeys(expert for rank in zip(*ranked, strict=True) for expert in rank))

    def guessed(self, layer: int, absent: Collection[int]) -> None:
        """These experts of a layer were guessed, and are not in memory."""
        self._open = layer, frozenset(absent)

    def missed(self, layer: int, experts: Collection[int]) -> None:
        """A layer misses these: some were guessed."""
        self._judge(layer, experts)

    def status(self) -> dict[str, Any]:
        """Whether guesses are followed, and why or why not; `right`: the share of late ones that were right."""
        made = self._right + self._wrong
        share = self._right / made if made else 0.0
        why = self._why or (f"{share:.0%} of what would be read is used" if made >= _ENOUGH else "too few guesses yet")
        return {"on": self.on, "why": why, "right": round(share, 3)}

    def _judge(self, layer: int, missed: Collection[int]) -> None:
        if self._open is None:
            return
        guessed_for, guessed = self._open
        self._open = None
        fade = 0.5 ** (len(guessed) / _HALF_LIFE)
        right = len(guessed.intersection(missed)) if layer == guessed_for else 0
        self._right = self._right * fade + right
        self._wrong = self._wrong * fade + len(guessed) - right
        made = self._right + self._wrong
        if made >= _ENOUGH:
            self.on = self._right >= made * (_END if self.on else _BEGIN)


def _floats(weights: Weights, weight: ops.Weight) -> NDArray[np.float32] | None:
    """The numbers of a tensor where they lie, unless they are of another type than F32."""
    stored = weights.tensor(weight.tensor)
    if stored.format.name != "F32":
        return None
    size = weight.rows * weight.columns
    memory = (ctypes.c_float * size).from_address(stored.address + 4 * weight.first_row * weight.columns)
    return np.ctypeslib.as_array(memory)
