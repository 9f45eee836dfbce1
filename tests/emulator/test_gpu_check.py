"""bench/gpu_check.py where there is no GPU: what it does with a device, and what it says without one."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.skipif(not gpu_missing(), reason="there is a GPU here")
def test_without_a_gpu_one_line_says_that_nothing_was_checked(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, BENCH / "gpu_check.py", "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1 and not run.stdout and not list(tmp_path.iterdir())
    assert run.stderr.splitlines() == [f"gpu_check: nothing was checked: {gpu_missing()}"]
