"""bench/gpu_check.py where there is no GPU: what it does with a device, and what it says without one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from host_device import HostDevice, HostStream

from sparkd.executors.gpu import gpu_missing

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))
import gpu_check  # noqa: E402

SIZE = 1 << 20


class Forgetful(HostDevice):
    """Copies all but the last byte."""

    def copy(self, stream: HostStream, target: int, source: int, size: int) -> None:
        super().copy(stream, target, source, size - 1)


def test_the_link_is_measured_with_copies_of_every_size() -> None:
    device = HostDevice()
    free = device.memory()
    rows = gpu_check.link(device, SIZE).rows
    assert [(row[0], int(row[1])) for row in rows][1:3] == [("host to card", SIZE), ("host to card", SIZE // 8)]
    assert all(float(row[3]) > 0 for row in rows)
    assert device.memory() == free


def test_a_copy_that_comes_out_wrong_is_a_failure() -> None:
    with pytest.raises(gpu_check.Failed, match=f"1 of {SIZE} copied bytes came out wrong"):
        gpu_check.link(Forgetful(), SIZE)


@pytest.mark.parametrize("name", ["laguna-tinyk-s1-q4_k_m", "qwen35moe-tinyk-s1-q4_k_m"])
def test_a_model_is_compared_with_the_cpu_at_every_residency(
    name: str, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.gpu_residency, "SHARES", (1.0, 0.25))
    monkeypatch.setattr(gpu_check.gpu_residency, "RINGS", (0, 2))
    rows = gpu_check.residencies(HostDevice(), [model_path(name)], tokens=6).rows
    assert [(row[1], row[2]) for row in rows] == [("CPU", ""), ("100%", "0"), ("25%", "0"), ("25%", "2")]
    assert [row[-1] for row in rows[1:]] == ["equal"] * 3
    slots = [int(row[3]) for row in rows[1:]]
    assert slots[1] < slots[2] < slots[0]
    assert rows[1][4] == "0.00%"


@pytest.mark.soak
def test_all_that_may_become_of_what_is_missed_is_compared(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.gpu_residency, "LOW_SHARES", (0.3,))
    rows = gpu_check.misses(HostDevice(), [model_path("laguna-tinyk-s1-q4_k_m")], tokens=3).rows
    assert [(row[1], row[2]) for row in rows[:2]] == [("CPU", ""), ("", "auto")] and "GB/s" in rows[1][-1]
    assert [row[2] for row in rows[2:]] == ["in_place", "copy", "host"]
    assert all(row[3] != "0.00%" and row[-1] == "equal" for row in rows[2:])


def test_other_tokens_than_the_cpus_are_a_failure(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = gpu_check.gpu_residency.Model.at
    monkeypatch.setattr(gpu_check.gpu_residency, "RINGS", (0,))
    monkeypatch.setattr(gpu_check.gpu_residency.Model, "at", lambda *given: replace(at(*given), equal=given[2] != 0.4))
    with pytest.raises(gpu_check.Failed, match=r"\| 40% .* DIFFERENT"):
        gpu_check.residencies(HostDevice(), [model_path("laguna-tinyk-s1-q4_k_m")], tokens=3)


@pytest.mark.parametrize("code, outcome", [(0, "passed"), (9, "ERROR SUMMARY")])
def test_what_compute_sanitizer_finds_is_a_failure(code: int, outcome: str, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho {outcome} $2\nexit {code}\n")
    tool.chmod(0o755)
    if code:
        with pytest.raises(gpu_check.Failed, match="ERROR SUMMARY memcheck"):
            gpu_check.sanitizers(str(tool))
    else:
        assert [row[:2] for row in gpu_check.sanitizers(str(tool)).rows] == [
            ["memcheck", "passed memcheck"],
            ["racecheck", "passed racecheck"],
        ]
    assert gpu_check.sanitizers(None).rows == [["compute-sanitizer", "is not installed", ""]]


@pytest.mark.skipif(not gpu_missing(), reason="there is a GPU here")
def test_without_a_gpu_one_line_says_that_nothing_was_checked(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, BENCH / "gpu_check.py", "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1 and not run.stdout and not list(tmp_path.iterdir())
    assert run.stderr.splitlines() == [f"gpu_check: nothing was checked: {gpu_missing()}"]
