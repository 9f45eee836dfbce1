"""A device for tests: kernels run in the emulator, streams are as late as they may be, memory is counted."""

from __future__ import annotations

import ctypes
import math
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from simt import Kernel, build, races, sanitized

from sparkd.errors import DeviceError
from sparkd.executors.device import ALIGNMENT, Launch

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
    """Nothing that is given runs before somebody waits for it, or the dice say so; copies read their source then."""

    def __init__(self, dice: random.Random) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._dice = dice
        self.given = 0
        self.run = 0

    def push(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.given += 1

    def run_to(self, mark: int) -> None:
        while self.run < mark:
            self._queue.popleft()()
            self.run += 1

    def poke(self) -> None:
        """Go on a little, or to the end, or not at all."""
        if self._dice.random() < 0.5:
            self.run_to(self.run + self._dice.randint(0, len(self._queue)))

    def record(self) -> HostEvent:
        return HostEvent(self)

    def wait(self, event: HostEvent) -> None:
        self.push(event.synchronize)

    def synchronize(self) -> None:
        self.run_to(self.given)


class HostGraph:
    """Work that was captured: the same operations with the same arguments, again and again."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self._work = work

    def replay(self, stream: HostStream) -> None:
        for operation in self._work:
            stream.push(operation)
        stream.poke()


class _Recorder:
    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def push(self, operation: Callable[[], None]) -> None:
        self.work.append(operation)


class HostDevice:
    """Implements `sparkd.executors.device.Device`. Fresh memory is full of 0xFF: a NaN in every form.

    `foreign` bytes are used by others; registering is refused beyond `pinnable` bytes. Threads run in the order that
    SPARKD_SIMT_ORDER names, else in `order`. Where kernels are sanitized, so is the memory beside an allocation.
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
        self._registered: list[range] = []
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._freed: list[NDArray[np.uint8]] = []
        self._kernels: dict[str, Kernel] = {}

    def compile(self, source: str, kernels: Sequence[str]) -> None:
        self.library = library = build(self._prelude + source, kernels, self._find_races)
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

    def capture(self, work: Callable[[HostStream], None]) -> HostGraph:
        recorder = _Recorder()
        work(recorder)
        return HostGraph(recorder.work)

    def register(self, address: int, size: int) -> int:
        """As a driver does it: whole pages, each once."""
        assert address % PAGE == size % PAGE == 0, "not whole pages"
        assert all(address + size <= other.start or other.stop <= address for other in self._registered), "pages twice"
        if sum(map(len, self._registered)) + size > self.pinnable:
            raise DeviceError(f"host memory cannot be pinned for the GPU: {size} bytes more are too many")
        self._registered.append(range(address, address + size))
        return address


def _forbid(memory: NDArray[np.uint8]) -> None:
    """Have the sanitizer, where there is one, report whoever reads or writes there; until NumPy gives it back."""
    if sanitized():
        poison = ctypes.CDLL(None).__asan_poison_memory_region
        poison(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes))
