"""Helpers of the process tests lie beside them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are for one user alone."""
    made = Path(tempfile.mkdtemp(prefix="sparkd-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)
