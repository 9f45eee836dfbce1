"""Where the values of a program lie: each gets a place in one arena for as long as some operation still reads it.

Sizes are float32 numbers per row. A step of at most `r` rows needs an arena of r * `width` numbers, in which a value at
`offset` occupies [r * offset, r * (offset + value.width)), rows one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

from sparkd.graph.ops import Experts, Op, Value
from sparkd.graph.program import Program

#: Places begin at multiples of this, so that every row block starts on a cache line.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value exists from the operation that writes it (index `first`) to the last one that reads it (`last`)."""

    value: Value
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Offset of every value, and the size of the arena; both in float32 numbers per row.

    `rooms`: offsets of what groups need for themselves, by the group's index.
    """

    offsets: Mapping[Value, int]
    width: int
    rooms: Mapping[int, int] = field(default_factory=dict)


def reads(op: Op) -> tuple[Value, ...]:
    """The values an operation reads."""
    operands = ((f.name, getattr(op, f.name)) for f in fields(op))
    return tuple(v for name, v in operands if name != "out" and isinstance(v, Value))


def written(op: Op) -> Value | None:
    """The value an operation writes; None for those that write a routing or the logits."""
    out = getattr(op, "out", None)
    return out if isinstance(out, Value) else None


def overtakers(program: Program) -> dict[int, int]:
    """For each experts operation, by its index: how many behind it do without its result, so may run before its end.

    No other experts operation is among them.
    """
    found = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Experts):
            behind = enumerate(program.ops[index + 1 :])
            found[index] = next((n for n, later in behind if op.out in reads(later) or isinstance(later, Experts)), 0)
    return found


def lifetimes(
    program: Program,
    keep: Collection[Value] = (),
    groups: Sequence[Sequence[Op]] | None = None,
    overtaken: Mapping[int, int] | None = None,
) -> tuple[Lifetime, ...]:
    """Lifetime of every value, in order of writing; values in `keep` live to the end of the step.

    `groups`: operations that run together, and so count as one; by default each is a group of its own. `overtaken`: of
    some, by index, how many behind them may run before their end: what they read lives as long.

    Raises ValueError for a value that is read before it is written, written twice, or kept but never written.
    """
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    groups = [(op,) for op in program.ops] if groups is None else groups
    for index, op in ((index, op) for index, group in enumerate(groups) for op in group):
        for value in reads(op):
            if value not in first:
                raise ValueError(f"operation {index} reads {value.name} before any operation writes it")
            last[value] = max(last[value], index + (overtaken or {}).get(index, 0))
        out = written(op)
        if out is not None:
            if out in first:
                raise ValueError(f"operation {index} writes {out.name}, which operation {first[out]} wrote")
            first[out] = last[out] = index
    for value in keep:
        if value not in first:
            raise ValueError(f"{value.name} is to be kept, but no operation writes it")
        last[value] = len(groups)
    return tuple(Lifetime(value, start, last[value]) for value, start in first.items())


def plan(
    program: Program,
    keep: Collection[Value] = (),
    groups: Sequence[Sequence[Op]] | None = None,
    unwritten: Collection[Value] = (),
    rooms: Mapping[int, int] | None = None,
    overtaken: Mapping[int, int] | None = None,
) -> Plan:
    """Place every value at the lowest offset that no value living at the same time occupies (`lifetimes`).

    `unwritten` values are never in memory. `rooms[i]`: numbers per row that group i needs while it runs.
    """
    offsets: dict[Value, int] = {}
    placed: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, end, last reader; by offset
    width = 0

    def place(size: int, first: int, last: int) -> int:
        nonlocal live, width
        live = [place for place in live if place[2] >= first]
        size = -(-size // ALIGNMENT) * ALIGNMENT
        offset = 0
        for start, end, _ in live:
            if offset + size <= start:
                break
            offset = end
        live.append((offset, offset + size, last))
        live.sort()
        width = max(width, offset + size)
        return offset

    left = sorted((rooms or {}).items())
    lives = [life for life in lifetimes(program, keep, groups, overtaken) if life.value not in unwritten]
    for life in lives:
        while left and left[0][0] < life.first:
            group, size = left.pop(0)
            placed[group] = place(size, group, group)
        offsets[life.value] = place(life.value.width, life.first, life.last)
    for group, size in left:
        placed[group] = place(size, group, group)
    return Plan(offsets, width, placed)
