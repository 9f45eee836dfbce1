"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any


def data(value: Any, event: str | None = None) -> bytes:
    """One event; its name where the dialect has names."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


def comment(text: str) -> bytes:
    """A line that clients read over: it keeps the connection open."""
    return f": {text}\n\n".encode()
