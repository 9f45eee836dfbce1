"""Whether a GPU could compute a program here, found out without taking any of it."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Collection

from sparkd.errors import UnsupportedError
from sparkd.graph.program import Program

#: What `gpu_missing` says of a machine that has none.
NO_DRIVER = "there is no GPU driver (libcuda.so.1)"


def gpu_missing() -> str:
    """Why no GPU can be used; empty: one can. Neither CuPy nor a context is loaded for that."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the GPU driver finds no GPU"
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed ({sys.executable} -m pip install cupy-cuda13x)"
    return ""


def gpu_unfit(program: Program, types: Collection[str]) -> str:
    """Why the kernels cannot compute a program whose weights are of these types; empty: they can."""
    # A machine without a GPU never needs these.
    from sparkd.executors.cuda_source import TYPES, check_shapes

    unknown = sorted(set(types) - TYPES)
    try:
        check_shapes(program)
    except UnsupportedError as error:
        return str(error)
    return f"no kernel multiplies {', '.join(unknown)}" if unknown else ""
