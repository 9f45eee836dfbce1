"""docs/kernels.md is what bench/roofline.py makes of the launches as they are, and counts what the planner counts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sparkd.config import ModelSettings, Settings
from sparkd.executors.cuda_source import kernel_names
from sparkd.planning.shape import Shape

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "data" / "tools")]

import roofline  # noqa: E402


def test_the_document_is_up_to_date() -> None:
    _, _, kept = (ROOT / "docs" / "kernels.md").read_text().partition(roofline.BEGIN)
    assert "\n".join(roofline.lines(2048)) in kept, "run: python bench/roofline.py --write docs/kernels.md"


def test_every_kernel_has_a_row() -> None:
    document = (ROOT / "docs" / "kernels.md").read_text()
    assert [name for name in kernel_names() if f"| {name} | " not in document.partition(roofline.BEGIN)[0]] == []


def test_bytes_and_operations_stand_beside_every_kernel() -> None:
    assert set(roofline.costs()) == {re.sub(r"_\d$", "", name) for name in kernel_names()}


@pytest.mark.parametrize("arch", roofline.NAMES)
def test_bytes_of_experts_are_the_planners(arch: str, tmp_path: Path) -> None:
    found = roofline.token(arch, tmp_path, 2048)
    shape = Shape.open(Settings(model=ModelSettings(str(tmp_path / f"{arch}.gguf"))))
    # A record has up to 63 bytes of padding.
    padding = 64 * sum(shape.work.top_k)
    assert 0 <= shape.work.experts_bytes - sum(load.cold for load in found.values()) < padding
    assert all(load.launches and load.bytes for name, load in found.items() if name != "begin_sequences")
