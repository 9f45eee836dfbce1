"""Tables, bars and numbers: colours on a terminal, plain lines into a pipe."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Literal, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparkctl.plain import printable

#: Columns of what goes into a file or pipe: more than any table has, so that a row stays a line.
PIPE_WIDTH = 1000
_GIB = 1 << 30


def console() -> Console:
    """Standard output for tables; a pipe gets neither colours nor other control codes."""
    terminal = sys.stdout.isatty()
    return Console(
        file=None if terminal else cast(IO[str], _Trimmed()),
        force_terminal=None if terminal else False,
        width=None if terminal else PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


class _Trimmed(io.TextIOBase):
    """Standard output without blanks at the ends of lines."""

    def write(self, text: str) -> int:
        sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def table(*columns: str, title: str = "") -> Table:
    """An empty table; a column whose name ends in > is set to the right."""
    made = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.endswith(">") else "left"
        made.add_column(name.removesuffix(">"), justify=justify, overflow="fold")
    return made


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values, one pair a line."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value if isinstance(value, Text) else Text(printable(value)))
    return made


def bar(share: float) -> Text:
    """A bar that is full at share 1."""
    width = 20 if _wide() else 8
    full = round(min(max(share, 0.0), 1.0) * width)
    filled, empty = ("█", "░") if _unicode() else ("#", ".")
    return Text.assemble((filled * full, "green"), (empty * (width - full), "dim"))


def strip(counts: Sequence[int]) -> Text:
    """Counts as a line of columns, the largest full; neighbours share a column when there are more than fit."""
    width = 32 if _wide() else 12
    marks = " ▁▂▃▄▅▆▇█" if _unicode() else " .:-=+*#@"
    group = -(-len(counts) // width)
    sums = [sum(counts[start : start + group]) for start in range(0, len(counts), group)] if counts else []
    top = max(sums, default=0) or 1
    return Text("".join(marks[-(-value * (len(marks) - 1) // top)] for value in sums), style="cyan")


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves a whole part."""
    for unit, factor in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def amount(count: float) -> str:
    """A number in thousands, millions or billions."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """Seconds in words as short as a table wants."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _wide() -> bool:
    """Whether bars may have their full length beside the words of a table."""
    return not sys.stdout.isatty() or shutil.get_terminal_size().columns >= 110


def _unicode() -> bool:
    # While a table is shown live, rich stands before standard output.
    out = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return (out.encoding or "").lower().replace("-", "").startswith("utf")
