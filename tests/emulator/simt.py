"""CUDA kernels on a CPU: their source compiled by g++ behind `simt_host.h`, launched with the call shape of a GPU's."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
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
_CODE = re.compile(r"0x[0-9a-f]+")
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


def races() -> bool:
    """Whether all kernels are built so that accesses which nothing orders are found (SPARKD_SIMT_RACES=1)."""
    return os.environ.get("SPARKD_SIMT_RACES") == "1"


def build(source: str, kernels: Sequence[str], find_races: bool = False) -> ctypes.CDLL:
    """Compile (once for each source) and load. DeviceError with the compiler's words."""
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-O1"]
    flags += ["-I", str(_HEADER.parent)]
    flags += ["-mfma"] if "fma" in Path("/proc/cpuinfo").read_text().split() else []
    linked = []
    if find_races:
        flags += ["-g", "-fsanitize=thread"]
    elif sanitized():
        linked = ["-fsanitize=address,undefined"]
        flags += ["-g", *linked, "-fno-sanitize-recover=undefined"]
        flags += ["-fno-omit-frame-pointer", "-fsanitize-sections=simt_shared"]
    headers = [header.read_bytes() for header in sorted(_HEADER.parent.glob("simt_*.h"))]
    key = hashlib.sha256(repr((source, kernels, flags, headers)).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("SPARKD_TEST_MODELS") or tempfile.gettempdir()) / f"sparkd-emulated-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = folder / f"{key}.so"
    if not library.exists():
        text, made, object = (folder / f"{key}.{os.getpid()}.{kind}" for kind in ("cu", "tmp", "o"))
        text.write_text(source)
        stub = _STUB % text + "".join(f"SIMT_EXPORT_AS({name}, spark::{name})\n" for name in kernels)
        compiler = os.environ.get("CXX", "g++")
        # Linked by itself: what finds races is no library of the compiler's.
        for command, given in (
            ([compiler, *flags, "-x", "c++", "-c", "-o", str(object), "-"], stub.encode()),
            ([compiler, "-shared", *linked, "-o", str(made), str(object)], b""),
        ):
            done = subprocess.run(command, input=given, capture_output=True, check=False)
            if done.returncode:
                raise DeviceError(f"kernels do not compile: {done.stderr.decode()[:4000]}")
        if not find_races:  # whose reports quote it
            text.unlink()
        object.unlink()
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
            raise DeviceError(f"{self.name}: {_CODE.sub(self._line, self._library.simt_error().decode())}")

    def _line(self, code: re.Match[str]) -> str:
        """The line of a source that was compiled to some code, for which the report has the address after it."""
        command = ["addr2line", "-i", "-e", self._library._name, hex(int(code.group(), 16) - 1)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for place in done.stdout.splitlines():
            file, _, line = place.partition(":")
            if file.endswith(".cu") and line.isdigit():
                return f"{line} `{Path(file).read_text().splitlines()[int(line) - 1].strip()}`"
        return code.group()

    def _packed(self, index: int, argument: Argument) -> ctypes.Array[ctypes.c_char]:
        data = np.uint64(argument).tobytes() if isinstance(argument, int) else argument.tobytes()
        wanted = self._signature[index]
        if len(data) != abs(wanted) or (wanted < 0) is not isinstance(argument, int):
            kind = "pointer" if wanted < 0 else "number"
            raise DeviceError(
                f"{self.name}: argument {index} is {argument!r}, the kernel takes a {kind} of {abs(wanted)} bytes"
            )
        return ctypes.create_string_buffer(data, len(data))
