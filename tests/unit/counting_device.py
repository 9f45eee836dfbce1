"""A device that only counts what is allocated, and weights that are nowhere: for a model of which there is a header."""

from __future__ import annotations

import numpy as np

from sparkd.executors.cuda import CudaExecutor
from sparkd.executors.weights import Piece, Stored
from sparkd.graph.state import StateLayout
from sparkd.planning.shape import Shape


class CountingDevice:
    """Takes every call that building an executor makes; `bytes` were allocated, nothing is ever there."""

    def __init__(self, size: int = 1 << 60, context: int = 0) -> None:
        self.bytes = 0
        self.context = context
        self._size = size

    def memory(self) -> tuple[int, int]:
        return self._size - self.context - self.bytes, self._size

    def allocate(self, size: int) -> int:
        assert size <= self.memory()[0], "more than the card has"
        self.bytes += size
        return self.bytes + (1 << 20)

    def pinned(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def register(self, address: int, size: int) -> int:
        return address

    def __getattr__(self, name: str) -> object:
        return lambda *given: None


class NoWeights:
    """Types and places of the weights of a model whose file has none."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def tensor(self, name: str) -> Stored:
        return Stored(1 << 40, self._shape.model.tensors[name].format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        return self._shape.whole.layers[layer].pieces

    def records(self) -> list[np.ndarray]:
        return [np.ones(layer.experts, np.uint64) for layer in self._shape.program.expert_layers]


def allocated(shape: Shape, context: int, chunk: int) -> int:
    """Bytes that a GPU worker allocates for one sequence of `context` positions, beside slots for experts."""
    device = CountingDevice()
    layout = StateLayout.of(shape.program, 2)
    pages = [group.pages_for(context, chunk) for group in layout.groups]
    CudaExecutor(
        device, shape.program, NoWeights(shape), layout, pages=pages, slots=1, context=context, prompt_rows=chunk
    )
    return device.bytes
