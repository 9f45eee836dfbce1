"""What refusals of a real GPU become. CuPy and libcuda are stand-ins: whether calls are right only a GPU can say."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkd.errors import DeviceError
from sparkd.executors.cuda_device import CudaDevice
from sparkd.executors.device import HostCall, Launch


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class CompileException(Exception):
    pass


class Gpu:
    """Counts nothing and does nothing, until `error` is set: then every call raises it."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def __int__(self) -> int:
        return 4096

    @property
    def done(self) -> bool:
        self()
        return True

    def memGetInfo(self) -> tuple[int, int]:
        return 5, 7


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    gpu.CUDARuntimeError = CUDARuntimeError
    cuda = SimpleNamespace(
        runtime=gpu,
        driver=SimpleNamespace(CUDADriverError=CUDADriverError),
        compiler=SimpleNamespace(CompileException=CompileException),
        Stream=gpu,
        Event=gpu,
        alloc_pinned_memory=gpu,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=gpu))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: gpu)
    return gpu


@pytest.mark.parametrize("kind", [CUDARuntimeError, CUDADriverError])
def test_whatever_the_gpu_refuses_is_a_device_error(gpu: Gpu, kind: type[Exception]) -> None:
    """So that a worker that has lost its GPU says so, wherever it notices."""
    device = CudaDevice()
    device.compile("", ["kernel"])
    stream = device.stream()
    event = stream.record()
    graph = device.capture(lambda stream: None)
    data = np.zeros(4, np.uint8)
    calls: list[Callable[[], object]] = [
        event.done,
        stream.record,
        lambda: stream.wait(event),
        stream.synchronize,
        lambda: graph.replay(stream),
        lambda: device.capture(lambda stream: None),
        device.stream,
        lambda: device.launch(stream, Launch("kernel", (1, 1, 1), 32, (1, np.int32(2)))),
        lambda: device.upload(stream, 1, data),
        lambda: device.download(stream, 1, data),
        lambda: device.copy(stream, 1, 2, 3),
        lambda: device.zero(stream, 1, 2),
        lambda: device.free(1),
        lambda: device.pinned(1),
        lambda: device.register(4096, 4096),
    ]
    gpu.error = kind("cudaErrorIllegalAddress: an illegal memory access was encountered")
    for call in calls:
        with pytest.raises(DeviceError, match=r"^the GPU refuses: cudaErrorIllegalAddress"):
            call()


def test_memory_that_is_not_there_is_refused_with_what_is_free(gpu: Gpu) -> None:
    device = CudaDevice()
    gpu.error = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(DeviceError, match=r"^123 bytes of GPU memory are not .* 5 of 7 are free: .*memory\.vram_gib"):
        device.allocate(123)


def test_an_old_driver_is_named(gpu: Gpu) -> None:
    gpu.error = CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
    with pytest.raises(DeviceError, match=r"GPU 0 cannot be used: cudaErrorInsufficientDriver.*; update the driver"):
        CudaDevice()


@pytest.mark.parametrize("error", [CompileException("line 3"), RuntimeError("no libnvrtc.so.13"), OSError("disk full")])
def test_kernels_that_cannot_be_compiled_are_one_line(gpu: Gpu, error: Exception) -> None:
    device = CudaDevice()
    gpu.error = error
    with pytest.raises(DeviceError, match=f"kernels do not compile: {error}"):
        device.compile("", ["kernel"])


def test_a_cupy_that_misses_a_library_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *given: object) -> None:
            if name == "cupy":
                raise ImportError("pages of advice") from OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(DeviceError, match=r"^a GPU needs CuPy: libcudart.so.13: cannot open .*; pip install cupy"):
        CudaDevice()


def test_the_host_is_called_through_the_driver_with_whole_addresses(gpu: Gpu) -> None:
    """As a C function gets them; its code is the refusal."""
    given: list[tuple[int, ...]] = []
    codes = iter((0, 900))

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def launch(*arguments: int) -> int:
        given.append(arguments)
        return next(codes)

    gpu.ptr, gpu.cuLaunchHostFunc = 1 << 40, launch
    device = CudaDevice()
    stream, call = device.stream(), HostCall((1 << 41) + 1, (1 << 42) + 2)
    device.call(stream, call)
    assert given == [(1 << 40, call.function, call.data)]
    with pytest.raises(DeviceError, match=r"^the GPU refuses to call the host: CUDA error 900$"):
        device.call(stream, call)
