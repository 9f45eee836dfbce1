"""CUDA kernels on a CPU: their source compiled by g++ behind `simt_host.h`, launched with the call shape of a GPU's."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparkd.errors import DeviceError
from sparkd.executors.device import Argument, Grid

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
_HEADER = Path(__file__).parent / "simt_host.h"
_STUB = """#include "simt_host.h"
#define SPARK_DYNAMIC_SHARED(T, name) SIMT_DYN_SHARED(T, name)
namespace {
#include "%s"
}
"""
#: Dynamic shared memory that every GPU gives without being asked twice.
_MOST_SHARED = 48 << 10


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("most_shared", ctypes.c_uint32),
    ]


def sanitized() -> bool:
    """Whether kernels are built with the address and undefined-behaviour sanitizers (SPARKD_SIMT_SANITIZE=1)."""
    return os.environ.get("SPARKD_SIMT_SANITIZE") == "1"


def build(source: str, kernels: Sequence[str]) -> ctypes.CDLL:
    """Compile (once for each source) and load. DeviceError with the compiler's words."""
    flags = ["-std=c++17", "-x", "c++", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
    flags += ["-fno-strict-aliasing", "-w", "-I", str(_HEADER.parent)]
    flags += ["-mfma"] if "fma" in Path("/proc/cpuinfo").read_text().split() else []
    if sanitized():
        flags += ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
        flags += ["-fno-omit-frame-pointer", "-fsanitize-sections=simt_shared"]
    else:
        flags.append("-O1")
    key = hashlib.sha256(repr((source, kernels, flags, _HEADER.read_bytes())).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("SPARKD_TEST_MODELS") or tempfile.gettempdir()) / f"sparkd-emulated-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = folder / f"{key}.so"
    if not library.exists():
        text = folder / f"{key}.{os.getpid()}.cu"
        text.write_text(source)
        stub = _STUB % text + "".join(f"SIMT_EXPORT_AS({name}, spark::{name})\n" for name in kernels)
        made = library.with_suffix(f".{os.getpid()}.tmp")
        command = [os.environ.get("CXX", "g++"), *flags, "-o", str(made), "-"]
        done = subprocess.run(command, input=stub.encode(), capture_output=True, check=False)
        text.unlink()
        if done.returncode:
            raise DeviceError(f"kernels do not compile: {done.stderr.decode()[:4000]}")
        made.replace(library)
    return ctypes.CDLL(str(library))


class Kernel:
    """One kernel of a loaded library."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._library = library
        self._launch = getattr(library, f"simt_launch_{name}")
        sizes = (ctypes.c_int32 * 64)()
        count = getattr(library, f"simt_sig_{name}")(sizes, 64)
        #: Size of each argument in bytes; negative for pointers.
        self._signature = list(sizes[:count])

    def __call__(
        self,
        grid: Grid,
        block: int,
        arguments: Sequence[Argument],
        shared: int = 0,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        """Run all blocks, one after another. DeviceError: arguments of the wrong width, a deadlock, a trap."""
        if len(arguments) != len(self._signature):
            raise DeviceError(f"{self.name} takes {len(self._signature)} arguments, not {len(arguments)}")
        values = [self._packed(i, argument) for i, argument in enumerate(arguments)]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
        config = _Config(
            (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(block, 1, 1), shared, ORDERS[order], seed, _MOST_SHARED
        )
        if self._launch(ctypes.byref(config), pointers):
            self._library.simt_error.restype = ctypes.c_char_p
            raise DeviceError(f"{self.name}: {self._library.simt_error().decode()}")

    def _packed(self, index: int, argument: Argument) -> ctypes.Array[ctypes.c_char]:
        data = np.uint64(argument).tobytes() if isinstance(argument, int) else argument.tobytes()
        wanted = self._signature[index]
        if len(data) != abs(wanted) or (wanted < 0) is not isinstance(argument, int):
            kind = "pointer" if wanted < 0 else "number"
            raise DeviceError(
                f"{self.name}: argument {index} is {argument!r}, the kernel takes a {kind} of {abs(wanted)} bytes"
            )
        return ctypes.create_string_buffer(data, len(data))
