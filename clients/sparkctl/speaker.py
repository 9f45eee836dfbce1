"""Answers of chats on standard output."""

from __future__ import annotations

import sys

from spark_client import Chunk, Part
from sparkctl.plain import printable


class Speaker:
    """An answer as it comes: its text to standard output, its thought dim before it, or beside it where that is piped.

    A pipe holds the answer alone: the thought, and calls of tools, go to standard error then.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._kind = "text"
        #: The last that was written of the kind of now.
        self._last = "\n"

    def say(self, chunk: Chunk) -> None:
        """Write what a chunk brings."""
        for part in chunk.parts if chunk.parts is not None else [Part("text", chunk.text)]:
            if part.kind != self._kind:
                self.end()
                self._kind = part.kind
            self._write(f"{part.name}: {part.text}" if part.name else part.text)

    def end(self) -> None:
        """End the line that was begun."""
        if not self._last.endswith("\n"):
            self._write("\n")
        self._last = "\n"

    def _write(self, text: str) -> None:
        if not text:
            return
        self._last = text
        out = sys.stdout if self._terminal or self._kind == "text" else sys.stderr
        shown = printable(text) if out.isatty() else text
        out.write(f"\x1b[2m{shown}\x1b[22m" if self._kind != "text" and out.isatty() else shown)
        out.flush()
