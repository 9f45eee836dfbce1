"""Output without tables."""

from __future__ import annotations

import json
import re
from typing import Any

#: Control characters but newline and tab, line separators, and marks that change the direction of writing.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def write_json(document: Any) -> None:
    """Write a document for programs."""
    print(json.dumps(document, ensure_ascii=False, indent=2))


def printable(text: object) -> str:
    r"""Text of unknown origin, unable to steer a terminal: control characters are spelled out (`\x1b`)."""
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], str(text))


def one_line(text: object) -> str:
    """As `printable`, without line ends."""
    return printable(text).replace("\n", "\\n")


def counted(count: int, thing: str) -> str:
    """`1 turn`, `2 turns`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
