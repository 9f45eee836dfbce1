"""The numbers that bench/gpu_fingerprint.py holds a GPU to are those of every CPU, and of the emulated kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from host_device import HostDevice

from sparkd import kernels

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu_fingerprint

KEPT = json.loads(gpu_fingerprint.KEPT.read_text())
MODELS = sorted(KEPT)
FEW = "qwen35moe-tinyk-s1-q4_k_m"


@pytest.fixture
def path(model_path: Callable[[str], Path]) -> Callable[[str], Path]:
    return lambda name: gpu_fingerprint.DEMO if name == gpu_fingerprint.DEMO.stem else model_path(name)


def test_it_is_kept_of_all_models_that_it_makes() -> None:
    with gpu_fingerprint.models() as paths:
        assert sorted(paths) == MODELS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("isa", [kernels.available()[0], kernels.available()[-1]])
def test_every_cpu_gives_it(name: str, isa: str, path: Callable[[str], Path]) -> None:
    assert gpu_fingerprint.fingerprint(path(name), partial(gpu_fingerprint.native, isa=isa)) == KEPT[name]


@pytest.mark.parametrize("name", [FEW, *(pytest.param(name, marks=pytest.mark.soak) for name in MODELS if name != FEW)])
def test_emulated_kernels_give_it(name: str, path: Callable[[str], Path], seed: int) -> None:
    device = HostDevice(size=4 << 30, seed=seed, order="random")
    assert gpu_fingerprint.fingerprint(path(name), gpu_fingerprint.on_card(device)) == KEPT[name]
