"""Output without tables."""

from __future__ import annotations

import json
from typing import Any

from spark_client.terminal import printable as printable


def write_json(document: Any) -> None:
    """Write a document for programs."""
    print(json.dumps(document, ensure_ascii=False, indent=2))


def one_line(text: object) -> str:
    """As `printable`, without line ends."""
    return printable(text).replace("\n", "\\n")
