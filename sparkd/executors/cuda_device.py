"""A real GPU behind the device seam: CuPy, and libcuda by ctypes where CuPy has no call.

Thin on purpose: tests here show what becomes of errors, by stand-ins; tests/emulator runs the rest of the GPU path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import DeviceError
from sparkd.executors.device import HostCall, Launch
from sparkd.residency.device_budget import CARD_CONTEXT

#: Rounding as docs/arithmetic.md says: nothing fused, nothing flushed, division and square root correctly rounded.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
#: Bytes of one registration: one call of 512 GiB fails in some drivers, large ones stall other work of the GPU.
_REGISTERED_AT_ONCE = 1 << 30
_PORTABLE_AND_MAPPED = 3


class Refusals:
    """A context in which CUDA's errors become DeviceError. What a kernel did wrong comes up wherever one waits."""

    def __init__(self, cupy: Any) -> None:
        self.kinds = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self.kinds):
            raise DeviceError(f"the GPU refuses: {error}") from error


class CudaEvent:
    """A point in a stream's work."""

    def __init__(self, event: Any, refusals: Refusals) -> None:
        self.event = event
        self._refusals = refusals

    def done(self) -> bool:
        """Whether everything before the point has ended."""
        with self._refusals:
            return bool(self.event.done)


class CudaStream:
    """Work in order."""

    def __init__(self, stream: Any, cupy: Any, refusals: Refusals) -> None:
        self.stream = stream
        self._cupy = cupy
        self._refusals = refusals

    def record(self) -> CudaEvent:
        """The point after all work given so far."""
        with self._refusals:
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
            return CudaEvent(event, self._refusals)

    def wait(self, event: CudaEvent) -> None:
        """Work given from now on begins after the event."""
        with self._refusals:
            self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        """Return when all work given so far has ended."""
        with self._refusals:
            self.stream.synchronize()


class CudaGraph:
    """Captured work."""

    def __init__(self, graph: Any, refusals: Refusals) -> None:
        self._graph = graph
        self._refusals = refusals

    def replay(self, stream: CudaStream) -> None:
        """Give all of it to the stream."""
        with self._refusals:
            self._graph.launch(stream.stream)


class CudaDevice:
    """Implements `sparkd.executors.device.Device` on one GPU. DeviceError where there is none, or no CuPy."""

    context = CARD_CONTEXT

    def __init__(self, number: int = 0) -> None:
        try:
            import cupy
        except ImportError as error:
            # CuPy's own words about a library that it misses are pages.
            raise DeviceError(
                f"a GPU needs CuPy: {error.__cause__ or error}", fix="pip install cupy-cuda13x (or -cuda12x)"
            ) from error
        self._cupy = cupy
        self._refusals = Refusals(cupy)
        self._number = number
        self._runtime = cupy.cuda.runtime
        try:
            self._runtime.setDevice(number)
            self._runtime.free(0)
            self._driver = ctypes.CDLL("libcuda.so.1")
        except (self._runtime.CUDARuntimeError, OSError) as error:
            old = "InsufficientDriver" in str(error)
            fix = "update the driver, or install the CuPy of an older CUDA (cupy-cuda12x)" if old else ""
            raise DeviceError(f"GPU {number} cannot be used: {error}", fix=fix) from error
        self._kernels: dict[str, Any] = {}
        self._registered: list[int] = []

    def compile(self, source: str, kernels: Sequence[str]) -> None:
        """Compile with NVRTC for this GPU; CuPy keeps the result in CUPY_CACHE_DIR."""
        try:
            module = self._cupy.RawModule(code=source, options=OPTIONS)
            self._kernels.update((name, module.get_function(name)) for name in kernels)
        except (self._cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:  # no NVRTC; no room on disk
            raise DeviceError(f"kernels do not compile: {error}") from error

    def allocate(self, size: int) -> int:
        """The address of `size` bytes."""
        try:
            return int(self._runtime.malloc(size))
        except self._runtime.CUDARuntimeError as error:
            free, total = self.memory()
            raise DeviceError(
                f"{size} bytes of GPU memory are not to be had, {free} of {total} are free: {error}",
                fix="end other programs on the GPU, or lower memory.vram_gib",
            ) from error

    def free(self, address: int) -> None:
        """Give memory back."""
        self._checked(self._runtime.free, address)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Page-locked host memory; it lives as long as the array."""
        memory = self._checked(self._cupy.cuda.alloc_pinned_memory, max(1, size))
        return np.frombuffer(memory, np.uint8, size)

    def stream(self) -> CudaStream:
        """A new stream that does not wait for the default one."""
        return CudaStream(self._checked(self._cupy.cuda.Stream, non_blocking=True), self._cupy, self._refusals)

    def upload(self, stream: CudaStream, address: int, data: NDArray[np.generic]) -> None:
        """Copy an array; from pageable memory the driver takes it before it returns."""
        source = np.ascontiguousarray(data)
        kind = self._runtime.memcpyHostToDevice
        self._checked(self._runtime.memcpyAsync, address, source.ctypes.data, source.nbytes, kind, stream.stream.ptr)

    def download(self, stream: CudaStream, address: int, out: NDArray[np.generic]) -> None:
        """Copy to an array."""
        kind = self._runtime.memcpyDeviceToHost
        self._checked(self._runtime.memcpyAsync, out.ctypes.data, address, out.nbytes, kind, stream.stream.ptr)

    def copy(self, stream: CudaStream, target: int, source: int, size: int) -> None:
        """Copy between addresses that the device can read."""
        kind = self._runtime.memcpyDefault
        self._checked(self._runtime.memcpyAsync, target, source, size, kind, stream.stream.ptr)

    def zero(self, stream: CudaStream, address: int, size: int) -> None:
        """Fill with zero bytes."""
        self._checked(self._runtime.memsetAsync, address, 0, size, stream.stream.ptr)

    def launch(self, stream: CudaStream, launch: Launch) -> None:
        """Run a kernel."""
        arguments = tuple(np.uint64(a) if isinstance(a, int) else a for a in launch.arguments)
        with stream.stream:
            self._checked(
                self._kernels[launch.kernel], launch.grid, (launch.block, 1, 1), arguments, shared_mem=launch.shared
            )

    def call(self, stream: CudaStream, call: HostCall) -> None:
        """Through the driver: CuPy's own call takes Python functions, which need the interpreter's lock."""
        code = self._driver.cuLaunchHostFunc(
            ctypes.c_void_p(stream.stream.ptr), ctypes.c_void_p(call.function), ctypes.c_void_p(call.data)
        )
        if code:
            raise DeviceError(f"the GPU refuses to call the host: CUDA error {code}")

    def capture(self, work: Callable[[CudaStream], None]) -> CudaGraph:
        """Record what `work` gives to a stream of its own, and to those that join it."""
        stream = self.stream()
        with self._refusals:
            stream.stream.begin_capture()
            try:
                work(stream)
            finally:
                graph = stream.stream.end_capture()
            return CudaGraph(graph, self._refusals)

    def register(self, address: int, size: int) -> int:
        """Pin host memory in place, chunk by chunk, through the driver: a refusal leaves no error behind."""
        self._checked(self._runtime.setDevice, self._number)  # for this thread
        page = 4096
        begin, end = address // page * page, -(-(address + size) // page) * page
        for first in range(begin, end, _REGISTERED_AT_ONCE):
            length = min(_REGISTERED_AT_ONCE, end - first)
            code = self._driver.cuMemHostRegister_v2(
                ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_uint(_PORTABLE_AND_MAPPED)
            )
            if code not in (0, 712):  # 712: it is registered already
                raise DeviceError(f"host memory cannot be pinned for the GPU: CUDA error {code} for {length} bytes")
            self._registered.append(first)
        pointer = ctypes.c_uint64()
        code = self._driver.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
        if code:
            raise DeviceError(f"the GPU cannot read host memory in place: CUDA error {code}")
        return int(pointer.value)

    def memory(self) -> tuple[int, int]:
        """Free and all bytes."""
        free, total = self._checked(self._runtime.memGetInfo)
        return int(free), int(total)

    def _checked(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self._refusals:
            return call(*arguments, **named)
