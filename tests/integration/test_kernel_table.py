"""The compile gate: NVRTC makes the kernels for six GPU generations, none spills, and docs/kernels.md agrees.

The document names the compiler and the sources that it was made of. While both are those at hand, the oldest and the
newest generation are compiled again, and `make soak` compiles all six; with another compiler all six are each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "bench")]

import kernel_table  # noqa: E402
import nvrtc  # noqa: E402

from sparkd.executors.cuda_source import COUNTS  # noqa: E402

DOCUMENT = (ROOT / "docs" / "kernels.md").read_text()
WRITE = "run: python bench/kernel_table.py --write docs/kernels.md"
#: The compiler of the document.
SAME = f"{kernel_table.COMPILER} {nvrtc.version()};" in DOCUMENT

pytestmark = pytest.mark.timeout(1800)  # where others use the machine, the compiler takes its time
Usages = dict[int, list[kernel_table.Usage]]


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.soak)])
def usages(request: pytest.FixtureRequest) -> Usages:
    if not nvrtc.version():
        pytest.skip(f"no {nvrtc.PACKAGE}, which compiles the kernels")
    if request.param == "all":
        return kernel_table.compile_all(dict.fromkeys(kernel_table.LIMITS, COUNTS))
    chosen = (min(kernel_table.LIMITS), max(kernel_table.LIMITS)) if SAME else kernel_table.LIMITS
    return kernel_table.compile_all(dict.fromkeys(chosen, (min(COUNTS), max(COUNTS))))


def cells() -> dict[tuple[str, str], str]:
    """The document's table: what it says of a kernel on an architecture."""
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.splitlines() if line.startswith("| ")]
    [heads] = [row for row in rows if row[0] == "kernel"]
    return {
        (row[0], head): cell for row in rows if len(row) == len(heads) for head, cell in zip(heads, row, strict=True)
    }


def test_no_kernel_spills_registers(usages: Usages) -> None:
    assert [f"{u.kernel} on sm_{a}: {u.spilled}" for a, of_one in usages.items() for u in of_one if u.spilled] == []


def test_the_document_was_made_of_these_sources_and_tells_of_no_spill() -> None:
    assert f"{kernel_table.SOURCE} {kernel_table.digest()}." in DOCUMENT, WRITE
    said = cells()
    assert {f"sm_{architecture}" for architecture in kernel_table.LIMITS} <= {head for _, head in said}
    assert [kernel for kernel, cell in said.items() if "spilled" in cell] == []


def test_the_document_says_what_the_compiler_says(usages: Usages) -> None:
    if not SAME:
        pytest.skip(f"docs/kernels.md was made by another compiler than {nvrtc.PACKAGE} {nvrtc.version()}")
    said = cells()
    wrong = [
        f"{usage.kernel} on sm_{architecture}: {usage.cell(architecture)}"
        for architecture, of_one in usages.items()
        for usage in of_one
        if said.get((usage.kernel, f"sm_{architecture}")) != usage.cell(architecture)
    ]
    assert wrong == [], WRITE
