"""What the residency engine has its owner do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.residency.slots import Place, Record


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the record into the slot of its slab, and call `copied` or `failed` with this command when that has ended.

    `reserve`: the slot is one of the reserve; its record is never published. `source`: a slot of the same slab that has
    the record's bytes, until the copy has ended; None: they are in the next tier alone. `ahead`: nobody waits for it,
    but somebody soon may; it comes behind what is waited for, and may end as failed if it was not begun.
    """

    record: Record
    slab: int
    place: Place
    reserve: bool
    source: Place | None = None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Hurry:
    """A part of a step waits for the copy, which began when nobody did."""

    copy: Copy


@dataclass(frozen=True, slots=True)
class Cancel:
    """The copy is not wanted any more: end it early if that is easy. `copied` or `failed` stays due."""

    copy: Copy


@dataclass(frozen=True, slots=True)
class Publish:
    """Make the record's word lead to the place. Its bytes are complete."""

    record: Record
    place: Place


@dataclass(frozen=True, slots=True)
class Retract:
    """Make the record's word lead nowhere, before the counters of the steps are read next."""

    record: Record
    place: Place


@dataclass(frozen=True, slots=True)
class Lend:
    """A lease has these places for its records, and will be granted; one whose copy is complete can be read already."""

    lease: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The records of a lease can be read at these places, in the order they were asked for, until it is released."""

    lease: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """A lease is over before it was granted: its record could not be copied."""

    lease: int
    record: Record
    reason: str


Command = Copy | Hurry | Cancel | Publish | Retract | Lend | Grant | Refuse
