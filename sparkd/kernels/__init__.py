"""The native kernels: the same C++ sources compiled once per instruction set, chosen at run time."""

from __future__ import annotations

import ctypes
import functools
import importlib
import platform
from pathlib import Path
from types import ModuleType

from sparkd.errors import UnsupportedError

#: Flags of /proc/cpuinfo that x86-64-v3 stands for (lzcnt is called abm there), besides those of every x86-64 kernel.
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
#: x86-64-v3 with the products of bytes that processors have which lack AVX-512.
_V3_VNNI = _V3 | {"avx_vnni"}
#: x86-64-v4 with VNNI.
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
#: x86-64-v4 with the matrix unit.
_V4_AMX = _V4 | {"amx_tile", "amx_int8"}

# arch_prctl and two of its numbers, of the kernel's documentation "Using XSTATE features in user space applications".
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The flags of the first processor; empty where the kernel lists none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


@functools.cache
def _matrix_unit() -> bool:
    """Asks for the registers of the matrix unit, which the kernel keeps for processes that did; False if it refuses."""
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def available() -> tuple[str, ...]:
    """Instruction sets that this machine runs, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("portable",)
    flags = _cpu_flags()
    needs = {
        "x86-64-v4-amx": _V4_AMX,
        "x86-64-v4": _V4,
        "x86-64-v3-vnni": _V3_VNNI,
        "x86-64-v3": _V3,
        "x86-64": frozenset[str](),
    }
    return tuple(isa for isa, needed in needs.items() if flags >= needed and (needed is not _V4_AMX or _matrix_unit()))


def native(isa: str = "auto") -> ModuleType:
    """The extension module for `isa`: "auto" takes the best one this machine runs (setting `cpu.isa`).

    All modules compute equal bits. Raises UnsupportedError for an instruction set this machine lacks.
    """
    names = available()
    chosen = names[0] if isa == "auto" else isa
    if chosen not in names:
        raise UnsupportedError(
            f"this machine does not run {isa}", where="cpu.isa", fix=f"choose auto or one of: {', '.join(names)}"
        )
    return importlib.import_module(f"sparkd._native_{chosen.replace('-', '_')}")
