"""Tests import their helpers by name, and those of a process share one list of folders."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_no_two_modules_of_tests_and_benches_have_one_name() -> None:
    files = [*ROOT.glob("tests/*/*.py"), *ROOT.glob("bench/*.py")]
    names = Counter(path.name for path in files if not path.name.startswith(("test_", "conftest")))
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []
