"""Helpers of these tests lie beside them; those that start daemons, with the integration tests.

The table of kills is printed when all tests are done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]

#: Lines of tables by their heading.
TABLES: pytest.StashKey[dict[str, list[str]]] = pytest.StashKey()


@pytest.fixture
def model(model_path: Callable[[str], Path]) -> Path:
    """The model that all faults are made with."""
    return model_path("laguna-tiny-s1-q4_k_m")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str, list[str]], None]:
    """Add lines to the table with a heading, which is printed when all tests are done."""
    tables = request.config.stash.setdefault(TABLES, {})
    return lambda heading, lines: tables.setdefault(heading, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for heading, lines in config.stash.get(TABLES, {}).items():
        terminalreporter.section("table")
        for line in (heading, *lines):
            terminalreporter.write_line(line)
