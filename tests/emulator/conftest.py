"""Fixtures of the emulator's tests."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from sparkd.executors import cuda
from sparkd.executors.cuda_source import TYPES
from sparkd.gguf.formats import FORMATS_BY_NAME

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), *(str(_TESTS / name) for name in ("integration", "golden", "unit"))]


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    """Kernels are compiled when they are first needed."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no g++ to compile the kernels with")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed for dice, printed with a failure; SPARKD_SEED repeats it."""
    chosen = int(os.environ.get("SPARKD_SEED", random.SystemRandom().getrandbits(32)))
    print(f"SPARKD_SEED={chosen}")
    return chosen


@pytest.fixture
def every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for all types of weights, whatever a program multiplies: compiled once, not for each type."""
    formats = {FORMATS_BY_NAME[name] for name in TYPES}
    monkeypatch.setattr(cuda, "_formats", lambda program, weights: formats)
