"""The compile gate: NVRTC makes the kernels for six GPU generations, none spills, and docs/kernels.md agrees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "bench")]

import kernel_table  # noqa: E402
import nvrtc  # noqa: E402

from sparkd.executors.cuda_source import COUNTS  # noqa: E402

#: Every number of rows on one architecture, the least and the most on the others: what takes a minute, not three.
COMPILED = {architecture: COUNTS if architecture == 86 else (1, 8) for architecture in kernel_table.LIMITS}

pytestmark = [
    pytest.mark.skipif(not nvrtc.version(), reason=f"no {nvrtc.PACKAGE}, which compiles the kernels"),
    pytest.mark.timeout(1800),  # where others use the machine, the compiler takes its time
]


@pytest.fixture(scope="module")
def usages() -> dict[int, list[kernel_table.Usage]]:
    return kernel_table.compile_all(COMPILED)


def test_no_kernel_spills_registers(usages: dict[int, list[kernel_table.Usage]]) -> None:
    assert [f"{u.kernel} on sm_{a}: {u.spilled}" for a, of_one in usages.items() for u in of_one if u.spilled] == []


def test_the_document_says_what_the_compiler_says(usages: dict[int, list[kernel_table.Usage]]) -> None:
    document = (ROOT / "docs" / "kernels.md").read_text()
    if f"{kernel_table.COMPILER} {nvrtc.version()};" not in document:
        pytest.skip(f"docs/kernels.md was made by another compiler than {nvrtc.PACKAGE} {nvrtc.version()}")
    rows = [line.strip("| ").split(" | ") for line in document.splitlines() if line.startswith("| ")]
    [heads] = [row for row in rows if row[0] == "kernel"]
    cells = {
        (row[0], head): cell for row in rows if len(row) == len(heads) for head, cell in zip(heads, row, strict=True)
    }
    wrong = [
        f"{usage.kernel} on sm_{architecture}: {usage.cell(architecture)}"
        for architecture, of_one in usages.items()
        for usage in of_one
        if cells.get((usage.kernel, f"sm_{architecture}")) != usage.cell(architecture)
    ]
    assert wrong == [], "run: python bench/kernel_table.py --write docs/kernels.md"
