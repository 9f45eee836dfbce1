"""Slots: places of one size in a tier, and what each of them holds. Pure.

                       ┌──────── copied, failed or cancelled ──── CANCELLING
                       │                                              ▲
                       ├──────────────── failed ──────────┐           │ cancel
                       ▼                                  │           │
                     FREE ───────────── copy ──────────► COPYING ─────┘
                      ▲ ▲                                 │
    every step that   │ │                                 │ copied
    could read it     │ │     the last lease ends         ▼
    has ended         │ └──────────────────────────────  COPIED
                      │             (reserve)             │
                      │                                   │ publish (ordinary)
                      │                                   ▼
                   DRAINING ◄────────── retract ──────  RESIDENT

The last slots of a slab are its *reserve*: for records that are wanted inside a step and have no slot of their own.
They are read only under a lease and never become resident, but keep what they hold until they are filled again: a FREE
one may be COPIED once more, without a copy. All others are *ordinary*: hot set and ring live there, and
what is resident in them is read without a lease. A restarted owner adopts what is resident, and all else as DRAINING.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

#: Generations wrap here: a directory word has 30 bits for them.
GENERATIONS = 1 << 30


class Record(NamedTuple):
    """One expert's weights: index of the expert layer, and of the expert in it."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of the slab of a record's layer, and which filling of that slot."""

    slot: int
    generation: int


class SlotState(IntEnum):
    """What a slot is doing."""

    FREE = 0
    COPYING = 1
    CANCELLING = 2
    COPIED = 3
    RESIDENT = 4
    DRAINING = 5


_NEXT = (
    (SlotState.COPYING, SlotState.COPIED),
    (SlotState.COPIED, SlotState.CANCELLING, SlotState.FREE),
    (SlotState.FREE,),
    (SlotState.RESIDENT, SlotState.FREE),
    (SlotState.DRAINING,),
    (SlotState.FREE,),
)


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. `record` is whose bytes it holds or gets; None while CANCELLING or DRAINING, and where FREE is empty.

    The generation in `place` rises with every copy into the slot, so that a place never means two fillings. `leases`
    are the numbers of the leases on it, `sources` counts the copies that read from it; `hot`: its record is, or will
    be, of the hot set; `ahead`: it was copied ahead of need, and nobody has leased it since.
    """

    slab: int
    place: Place
    reserve: bool
    state: SlotState = SlotState.FREE
    record: Record | None = None
    hot: bool = False
    leases: set[int] = field(default_factory=set)
    sources: int = 0
    ahead: bool = False

    def turn(self, state: SlotState) -> None:
        """Change state. RuntimeError when the diagram has no such arrow."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self.place} of slab {self.slab} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def owner(self) -> Record:
        """The record. RuntimeError when there is none."""
        if self.record is None:
            raise RuntimeError(f"{self.place} of slab {self.slab} is {self.state.name} and has no record")
        return self.record
