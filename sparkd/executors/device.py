"""The device seam: all that the CUDA executor asks of a GPU. Whatever stands behind it, above it runs everywhere.

Addresses are those of the device. Kernels take addresses as int (8 bytes) and numbers as numpy scalars of the width
that the kernel declares. Work on one stream is done in the order in which it was given; between streams only events
order it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: What a kernel takes: an address, or a number.
Argument = int | np.generic
Grid = tuple[int, int, int]
#: Memory that `Device.allocate` gives begins at a multiple of this, and may be read up to the next one after its end.
ALIGNMENT = 64


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether everything before the point has ended."""
        ...


class Stream(Protocol):
    """Work in order."""

    def record(self) -> Event:
        """The point after all work given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Work given from now on begins after the event."""
        ...

    def synchronize(self) -> None:
        """Return when all work given so far has ended."""
        ...


class Graph(Protocol):
    """Captured work, to be given to a stream again and again."""

    def replay(self, stream: Stream) -> None:
        """Give all of it to the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with its arguments: what a graph consists of."""

    kernel: str
    grid: Grid
    block: int
    arguments: tuple[Argument, ...]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class HostCall:
    """A native function `void (*)(void*)` and what it is given, as addresses.

    It runs in a thread that it does not know: it asks nothing of a device, and needs no interpreter.
    """

    function: int
    data: int


class Device(Protocol):
    """One GPU, or what stands in for it. `context`: bytes that a process takes on it before it allocates any."""

    context: int

    def compile(self, source: str, kernels: Sequence[str]) -> None:
        """Make these kernels of a CUDA C++ source known under their names. DeviceError with the compiler's words."""
        ...

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, undefined contents. DeviceError when there is not so much."""
        ...

    def free(self, address: int) -> None:
        """Give memory back."""
        ...

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Host memory, undefined contents, to and from which copies need not wait for anything but their stream.

        Kernels may read and write it, at the address that it has here.
        """
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def upload(self, stream: Stream, address: int, data: NDArray[np.generic]) -> None:
        """Copy an array to the device; it may be changed when this returns."""
        ...

    def download(self, stream: Stream, address: int, out: NDArray[np.generic]) -> None:
        """Copy to an array, whose contents count once the stream has come so far."""
        ...

    def copy(self, stream: Stream, target: int, source: int, size: int) -> None:
        """Copy between two addresses that the device can read; `source` may be registered host memory."""
        ...

    def zero(self, stream: Stream, address: int, size: int) -> None:
        """Fill with zero bytes."""
        ...

    def launch(self, stream: Stream, launch: Launch) -> None:
        """Run a kernel."""
        ...

    def call(self, stream: Stream, call: HostCall) -> None:
        """Have the host call a function, between what the stream was given before and what it is given later."""
        ...

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """What `work` gives to the stream that it gets; nothing runs yet.

        Also what it gives to other streams, from where they wait for that one to where it waits for them.
        """
        ...

    def register(self, address: int, size: int) -> int:
        """Let the device read host memory in place: the address to read it at. DeviceError where that is refused.

        For any thread. Ranges that were registered before are not touched again: they share no page with this one.
        """
        ...

    def memory(self) -> tuple[int, int]:
        """Free and all bytes of the device."""
        ...
