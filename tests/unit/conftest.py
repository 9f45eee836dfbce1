"""Fixtures of the client tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fake_daemon(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a FakeDaemon with the given fields at `tmp_path/client.sock`."""
    from fake_daemon import FakeDaemon

    with ExitStack() as stack:
        yield lambda **fields: stack.enter_context(FakeDaemon(tmp_path / "client.sock", **fields))
