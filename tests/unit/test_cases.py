"""The list of cases in docs/cases.md is true: every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_case_names_tests_that_exist() -> None:
    cases = (ROOT / "docs" / "cases.md").read_text().split("\n**")[1:]
    for case in cases:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", case)
        assert named, f"a case without a test: {case[:80]}"
        for path, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / path).read_text(), re.M), f"{path}::{name}"
