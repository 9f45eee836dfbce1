"""What computes: a GPU where that can be, never one that was not asked for and cannot; and never silently the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkd.config import MemorySettings, Settings, WorkerSettings
from sparkd.errors import BudgetError, DeviceError
from sparkd.executors.gpu import NO_DRIVER, gpu_missing, gpu_unfit
from sparkd.gguf.model_file import ModelFile
from sparkd.models import build_program
from sparkd.store.plan import choose_device

HAS_NONE, NO_CUPY, HAS_ONE = NO_DRIVER, "CuPy is not installed", ""


def chosen(device: str, missing: str, *, vram_gib: float = 0, partial: bool = False) -> tuple[str, str]:
    settings = Settings(worker=WorkerSettings(device), memory=MemorySettings(vram_gib=vram_gib))  # type: ignore[arg-type]
    return choose_device(settings, partial, lambda: missing)


def test_a_gpu_computes_where_there_is_one_and_the_cpu_says_why_it_does_instead() -> None:
    assert chosen("auto", HAS_ONE) == ("cuda", "")
    assert chosen("auto", HAS_NONE) == ("cpu", "")
    assert chosen("auto", NO_CUPY) == ("cpu", "the CPU computes, not the GPU: CuPy is not installed")
    assert chosen("auto", HAS_ONE, partial=True)[0] == "cpu"
    assert "does not hold all experts" in chosen("auto", HAS_ONE, partial=True)[1]
    assert chosen("auto", HAS_NONE, partial=True) == ("cpu", "")


@pytest.mark.parametrize("missing", [HAS_NONE, NO_CUPY, HAS_ONE])
def test_what_was_asked_for_is_done_or_refused(missing: str) -> None:
    assert chosen("cpu", missing, vram_gib=8, partial=True) == ("cpu", "")
    assert chosen("cuda", missing) == ("cuda", ""), "the worker finds out"
    for device, vram_gib in (("cuda", 0), ("auto", 8)):
        with pytest.raises(BudgetError, match="all experts have to be in host memory"):
            chosen(device, missing, vram_gib=vram_gib, partial=True)


def test_memory_of_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"^memory\.vram_gib: there is no GPU driver"):
        chosen("auto", HAS_NONE, vram_gib=8)


def test_a_program_that_the_kernels_cannot_compute_is_known_before(model_path: Callable[[str], Path]) -> None:
    program = build_program(ModelFile.open(model_path("laguna-tiny-s1-q4_k_m")))
    assert gpu_unfit(program, ["Q4_K", "F32"]) == ""
    assert gpu_unfit(program, ["Q4_K", "TQ1_0"]) == "no kernel multiplies TQ1_0"
    wide = dataclasses.replace(program.expert_layers[0], top_k=17)
    greedy = dataclasses.replace(program, expert_layers=(wide, *program.expert_layers[1:]))
    assert "chooses 17 of" in gpu_unfit(greedy, ["Q4_K"])


def test_looking_for_a_gpu_gives_a_reason_or_none() -> None:
    assert isinstance(gpu_missing(), str)
