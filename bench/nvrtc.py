"""NVRTC, the compiler that a GPU worker has its kernels made by, without a GPU: from the wheel nvidia-cuda-nvrtc."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PACKAGE = "nvidia-cuda-nvrtc"


def version() -> str:
    """Of the wheel; empty: it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compile_log(source: str, options: Sequence[str]) -> str:
    """Compile CUDA C++ with some options: what NVRTC, and ptxas in it, say. RuntimeError where it does not compile."""
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    given = [option.encode() for option in options]
    failed = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    size = ctypes.c_size_t()
    _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    if failed:
        raise RuntimeError(log.value.decode())
    return log.value.decode()


@cache
def _library() -> ctypes.CDLL:
    """NVRTC looks for its second library by name: that is loaded first."""
    libraries = [
        Path(str(file.locate())) for file in importlib.metadata.files(PACKAGE) or () if ".alt." not in file.name
    ]
    [builtins] = [path for path in libraries if path.name.startswith("libnvrtc-builtins.so")]
    [compiler] = [path for path in libraries if path.name.startswith("libnvrtc.so")]
    ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(compiler))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"NVRTC says {error}")
