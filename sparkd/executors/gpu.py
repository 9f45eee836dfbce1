"""Whether a GPU could compute here, found out without taking any of it."""

from __future__ import annotations

import ctypes
import importlib.util

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
        return "CuPy is not installed (pip install 'sparkd[gpu]')"
    return ""
