"""`calibration/shadow.Shadow`, compiled when it is first needed: the same hits, many times faster."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from sparkd.calibration.shadow import Rule, Shadow
from sparkd.residency.ring import Heats

_SOURCE = Path(__file__).with_name("fast_shadow.cpp")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "shadow.so"
        command = ["g++", "-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", str(_SOURCE), "-o", str(built)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(built))
    library.shadow_new.restype = ctypes.c_void_p
    library.shadow_pin.restype = library.shadow_step.restype = ctypes.c_int64
    return library


def build() -> None:
    """Compile now, before other processes begin."""
    _library()


class FastShadow(Shadow):
    """One policy; see `Shadow` for what everything means."""

    def __init__(
        self, slabs: Sequence[int], capacity: Sequence[int], rule: Rule, heats: Heats[int] | None = None
    ) -> None:
        self.rule = rule
        self._capacity = capacity
        held, room = np.ascontiguousarray(slabs, np.int32), np.ascontiguousarray(capacity, np.int64)
        made = _library().shadow_new(_pointer(held), _count(len(held)), _pointer(room), _count(len(room)))
        self._shadow = ctypes.c_void_p(made)
        self.change(rule)

    def __del__(self) -> None:
        _library().shadow_free(self._shadow)

    def pin(self, records: Iterable[int]) -> int:
        wanted = np.array(sorted(set(records)), np.int32)
        return int(_library().shadow_pin(self._shadow, _pointer(wanted), _count(len(wanted))))

    def change(self, rule: Rule) -> None:
        self.rule = rule
        _library().shadow_half_life(self._shadow, ctypes.c_double(rule.half_life))

    def step(self, records: Iterable[int]) -> int:
        named = np.ascontiguousarray(records if isinstance(records, np.ndarray) else list(records), np.int32)
        return int(_library().shadow_step(self._shadow, _pointer(named), _count(len(named))))

    def find(self, named: Sequence[int]) -> int:
        return self.step(named)  # it has heats of its own


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _count(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)
