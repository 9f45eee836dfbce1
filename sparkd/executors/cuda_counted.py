"""What the CUDA executor makes of a program, counted on a device where nothing is and nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.cuda import CudaExecutor
from sparkd.executors.device import Event, HostCall, Launch, Stream
from sparkd.executors.weights import Weights
from sparkd.graph.program import Program
from sparkd.graph.state import PAGE, StateLayout


@dataclass(frozen=True, slots=True)
class Launches:
    """Of a token; of a prompt's step, but for products with routed experts; of each part of a layer's experts there."""

    token: int
    prompt: int
    part: int


def count_launches(program: Program, weights: Weights, layout: StateLayout) -> Launches:
    """The launches of `program`. UnsupportedError where the kernels cannot compute it."""
    pages = [1] * len(layout.groups)
    executor = CudaExecutor(
        CountingDevice(), program, weights, layout, pages=pages, slots=1, context=PAGE, prompt_rows=PAGE
    )
    layers = executor.routed_experts
    # What says which rows a part has is copied there: that takes as long as a launch.
    part = 1 + len(layers[0].launches(1)) if layers else 0
    return Launches(len(executor.launches(1)), len(executor.prompt_launches(PAGE)), part)


class CountingDevice:
    """Implements `Device`: `bytes` were allocated of `size`, nothing is ever there. `context` as others have it."""

    def __init__(self, size: int = 1 << 60, context: int = 0) -> None:
        self.bytes = 0
        self.context = context
        self._size = size

    def memory(self) -> tuple[int, int]:
        """What is left of `size`."""
        return self._size - self.context - self.bytes, self._size

    def allocate(self, size: int) -> int:
        """Count."""
        if size > self.memory()[0]:
            raise RuntimeError(f"{size} bytes are more than the {self.memory()[0]} that are left")
        self.bytes += size
        return self.bytes + (1 << 20)

    def free(self, address: int) -> None:
        """Nothing."""

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Memory of the host."""
        return np.zeros(size, np.uint8)

    def register(self, address: int, size: int) -> int:
        """Nothing: it is read where it lies."""
        return address

    def compile(self, source: str, kernels: Sequence[str]) -> None:
        """Nothing."""

    def stream(self) -> _NoStream:
        """One that has always ended."""
        return _NoStream()

    def upload(self, stream: Stream, address: int, data: NDArray[np.generic]) -> None:
        """Nothing."""

    def download(self, stream: Stream, address: int, out: NDArray[np.generic]) -> None:
        """Nothing."""

    def copy(self, stream: Stream, target: int, source: int, size: int) -> None:
        """Nothing."""

    def zero(self, stream: Stream, address: int, size: int) -> None:
        """Nothing."""

    def launch(self, stream: Stream, launch: Launch) -> None:
        """Nothing."""

    def call(self, stream: Stream, call: HostCall) -> None:
        """Nothing."""

    def capture(self, work: Callable[[Stream], None]) -> _NoGraph:
        """Nothing."""
        return _NoGraph()


class _NoStream:
    def record(self) -> _NoEvent:
        return _NoEvent()

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoEvent:
    def done(self) -> bool:
        return True


class _NoGraph:
    def replay(self, stream: Stream) -> None:
        pass
