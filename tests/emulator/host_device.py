"""A device for tests: kernels run in the emulator, streams are as late as they may be, memory is counted."""

from __future__ import annotations

import ctypes
import math
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from simt import Kernel, build, races, sanitized

from sparkd.errors import DeviceError
from sparkd.executors.device import ALIGNMENT, HostCall, Launch

PAGE = 4096


class HostEvent:
    """A point in a stream: reached once `mark` operations have run."""

    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._mark = stream.given

    def done(self) -> bool:
        self._stream.poke()
        return self.reached

    @property
    def reached(self) -> bool:
        return self._stream.run >= self._mark

    def synchronize(self) -> None:
        self._stream.run_to(self._mark)


class HostStream:
    """Nothing that is given runs before somebody waits for it, or the dice say so; copies read their source then.

    While it belongs to a capture, what it is given goes there.
    """

    def __init__(self, dice: random.Random, capture: Capture | None = None) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._dice = dice
        self.capture = capture
        #: Of a capture: what comes next waits for these.
        self.last: frozenset[int] = frozenset()
        self.given = 0
        self.run = 0

    def push(self, work: Callable[[], None]) -> None:
        if self.capture is not None:
            self.last = self.capture.add(work, self.last)
            return
        self._queue.append(work)
        self.given += 1

    def run_to(self, mark: int) -> None:
        while self.run < mark:
            self._queue.popleft()()
            self.run += 1

    def poke(self) -> None:
        """Go on a little, or to the end, or not at all."""
        if self.capture is None and self._dice.random() < 0.5:
            self.run_to(self.run + self._dice.randint(0, len(self._queue)))

    def record(self) -> HostEvent | CapturedEvent:
        return HostEvent(self) if self.capture is None else CapturedEvent(self.capture, self.last)

    def wait(self, event: HostEvent | CapturedEvent) -> None:
        if isinstance(event, HostEvent):
            self.push(event.synchronize)
        else:
            event.capture.join(self)
            self.last |= event.last

    def synchronize(self) -> None:
        self.run_to(self.given)


@dataclass(frozen=True)
class CapturedEvent:
    """A point in a stream of a capture: after these operations."""

    capture: Capture
    last: frozenset[int]


class Capture:
    """Operations, and which of them each waits for; streams that join."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.waits: list[frozenset[int]] = []
        self._joined: list[HostStream] = []

    def add(self, work: Callable[[], None], waits: frozenset[int]) -> frozenset[int]:
        self.work.append(work)
        self.waits.append(waits)
        return frozenset({len(self.work) - 1})

    def join(self, stream: HostStream) -> None:
        if stream.capture is None:
            stream.capture = self
            self._joined.append(stream)
        assert stream.capture is self

    def end(self, stream: HostStream) -> None:
        """As a driver does it: all that was captured is waited for by `stream`."""
        seen, todo = set(stream.last), list(stream.last)
        while todo:
            new = self.waits[todo.pop()] - seen
            seen |= new
            todo += new
        for other in self._joined:
            other.capture, other.last = None, frozenset()
        if len(seen) < len(self.work):
            raise DeviceError("a capture ends before streams that have joined it")


class HostGraph:
    """Work that was captured: the same operations with the same arguments, again and again.

    Each in an order of its own: any that keeps what waits for what.
    """

    def __init__(self, capture: Capture, dice: random.Random) -> None:
        self.work, self.waits = capture.work, capture.waits
        self._dice = dice

    def replay(self, stream: HostStream) -> None:
        left = [len(waits) for waits in self.waits]
        after: list[list[int]] = [[] for _ in self.waits]
        for number, waits in enumerate(self.waits):
            for first in waits:
                after[first].append(number)
        ready = [number for number, count in enumerate(left) if not count]
        while ready:
            number = ready.pop(self._dice.randrange(len(ready)) if len(ready) > 1 else 0)
            stream.push(self.work[number])
            for follower in after[number]:
                left[follower] -= 1
                if not left[follower]:
                    ready.append(follower)
        stream.poke()


class HostDevice:
    """Implements `sparkd.executors.device.Device`. Fresh memory is full of 0xFF: a NaN in every form.

    `foreign` bytes are used by others. Registering is refused of more than `pinned_at_once` bytes, and of more than
    `pinnable` in all. Threads run in the order that SPARKD_SIMT_ORDER names, else in `order`. Where kernels are
    sanitized, so is the memory beside an allocation.
    """

    context = 0

    def __init__(
        self,
        *,
        size: int = 1 << 30,
        seed: int = 0,
        order: str = "forward",
        tensor_cores: bool = False,
        find_races: bool = False,
    ) -> None:
        """`tensor_cores`: integers of prompts by a model of `mma` (sm_80 and later), not by dp4a.

        `find_races`: accesses to memory that nothing orders are errors.
        """
        self._find_races = find_races or races()
        self._prelude = "#define SPARK_TENSOR_CORES 1\n" if tensor_cores else ""
        self.dice = random.Random(seed)
        self.order = os.environ.get("SPARKD_SIMT_ORDER", order)
        self.launched: Counter[str] = Counter()
        self._size = size
        self.foreign = 0
        self.pinnable: float = math.inf
        self.pinned_at_once: float = math.inf
        self._registered: list[range] = []
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._freed: list[NDArray[np.uint8]] = []
        self._kernels: dict[str, Kernel] = {}

    def compile(self, source: str, kernels: Sequence[str]) -> None:
        self.compiled = library = build(self._prelude + source, kernels, self._find_races)
        self._kernels.update((name, Kernel(library, name)) for name in kernels)

    def allocate(self, size: int) -> int:
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if self.memory()[0] < room:
            raise DeviceError(f"{size} bytes of device memory are not to be had, {self.memory()[0]} are free")
        # NumPy keeps blocks of less than 1 KiB for its next arrays, which then would not be theirs to write.
        memory = np.full(max(room + 3 * ALIGNMENT, 1024), 0xFF, np.uint8)
        start = ALIGNMENT + -memory.ctypes.data % ALIGNMENT
        self._memory[memory.ctypes.data + start] = memory[start : start + room]
        _forbid(memory[:start])
        _forbid(memory[start + room :])
        return memory.ctypes.data + start

    def pinned(self, size: int) -> NDArray[np.uint8]:
        return np.full(size, 0xFF, np.uint8)

    def free(self, address: int) -> None:
        """Nobody may read it from now on: who does finds no record there."""
        memory = self._memory.pop(address)
        memory[:] = 0xFF
        _forbid(memory)
        self._freed.append(memory)

    def memory(self) -> tuple[int, int]:
        used = self.foreign + sum(memory.nbytes for memory in self._memory.values())
        return self._size - used, self._size

    def stream(self) -> HostStream:
        return HostStream(self.dice)

    def upload(self, stream: HostStream, address: int, data: NDArray[np.generic]) -> None:
        staged = np.ascontiguousarray(data).copy()
        stream.push(lambda: ctypes.memmove(address, staged.ctypes.data, staged.nbytes))
        stream.poke()

    def download(self, stream: HostStream, address: int, out: NDArray[np.generic]) -> None:
        assert out.flags.c_contiguous
        stream.push(lambda: ctypes.memmove(out.ctypes.data, address, out.nbytes))

    def copy(self, stream: HostStream, target: int, source: int, size: int) -> None:
        stream.push(lambda: ctypes.memmove(target, source, size))
        stream.poke()

    def zero(self, stream: HostStream, address: int, size: int) -> None:
        stream.push(lambda: ctypes.memset(address, 0, size))

    def launch(self, stream: HostStream, launch: Launch) -> None:
        kernel = self._kernels[launch.kernel]

        def work() -> None:
            self.launched[launch.kernel] += 1
            seed = self.dice.getrandbits(32)
            kernel(launch.grid, launch.block, launch.arguments, launch.shared, self.order, seed)

        stream.push(work)

    def call(self, stream: HostStream, call: HostCall) -> None:
        stream.push(lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)(call.data))

    def capture(self, work: Callable[[HostStream], None]) -> HostGraph:
        captured = Capture()
        stream = HostStream(self.dice, captured)
        work(stream)
        captured.end(stream)
        return HostGraph(captured, self.dice)

    def register(self, address: int, size: int) -> int:
        """As a driver does it: whole pages, each once."""
        assert address % PAGE == size % PAGE == 0, "not whole pages"
        assert all(address + size <= other.start or other.stop <= address for other in self._registered), "pages twice"
        if size > self.pinned_at_once or sum(map(len, self._registered)) + size > self.pinnable:
            raise DeviceError(f"host memory cannot be pinned for the GPU: {size} bytes more are too many")
        self._registered.append(range(address, address + size))
        return address


def _forbid(memory: NDArray[np.uint8]) -> None:
    """Have the sanitizer, where there is one, report whoever reads or writes there; until NumPy gives it back."""
    if sanitized():
        poison = ctypes.CDLL(None).__asan_poison_memory_region
        poison(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes))
