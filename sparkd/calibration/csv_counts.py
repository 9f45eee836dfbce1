"""Counts as text, for other programs: a line `layer,expert,count` for each record, below a line with these words.

Layers are expert layers, numbered from 0. A file is taken whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import SparkError

HEADER = "layer,expert,count"
#: Longest line that is looked at, and largest count.
_LINE = 100
_MAX_COUNT = 1 << 53


class CountsFileError(SparkError):
    """A file of counts that cannot be taken: which line, what is wrong, what to do."""

    code = "counts_file"


def write_counts(table: NDArray[np.float64], experts: Sequence[int]) -> Iterator[str]:
    """The lines of a table [layers, most experts]; `experts[layer]` are there."""
    yield HEADER
    for layer, (row, count) in enumerate(zip(np.rint(table).astype(np.int64).tolist(), experts, strict=True)):
        for expert in range(count):
            yield f"{layer},{expert},{row[expert]}"


def read_counts(lines: Iterable[str], experts: Sequence[int], where: str) -> NDArray[np.float64]:
    """The table [layers, most experts] of such lines; records without a line count 0. CountsFileError."""
    table = np.full((len(experts), max(experts)), -1, np.int64)
    number = 0
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if number == 1:
            if text != HEADER:
                raise _error(where, number, f"it begins with {text[:_LINE]!r}", f"begin with {HEADER!r}")
            continue
        layer, expert, count = _numbers(text, where, number)
        if not 0 <= layer < len(experts):
            raise _error(where, number, f"there is no expert layer {layer}", f"layers are 0 to {len(experts) - 1}")
        if not 0 <= expert < experts[layer]:
            what = f"expert layer {layer} has no expert {expert}"
            raise _error(where, number, what, f"experts are 0 to {experts[layer] - 1}")
        if not 0 <= count <= _MAX_COUNT:
            raise _error(where, number, f"{count} is no count", f"counts are 0 to {_MAX_COUNT}")
        if table[layer, expert] >= 0:
            what = f"expert {expert} of expert layer {layer} is there twice"
            raise _error(where, number, what, "give one line for each")
        table[layer, expert] = count
    if number == 0:
        raise _error(where, 1, "the file is empty", f"begin with {HEADER!r}")
    return np.maximum(table, 0).astype(np.float64)


def _numbers(text: str, where: str, number: int) -> tuple[int, int, int]:
    fields = text.split(",") if len(text) <= _LINE else []
    if len(fields) != 3 or not all(field.isascii() and field.isdigit() for field in fields):
        raise _error(where, number, f"{text[:_LINE]!r} is not three whole numbers", f"write {HEADER}")
    layer, expert, count = map(int, fields)
    return layer, expert, count


def _error(where: str, number: int, what: str, fix: str) -> CountsFileError:
    return CountsFileError(what, where=f"{where}, line {number}", fix=fix)
