"""Leases: what a part of a step has asked for and may read until it gives it back. Pure.

stage ───► WAITING ───────────────► COPYING ───────────► GRANTED
              │    every record        │    every copy      │
              │    has a slot          │    is complete     │
              │                        │                    │
              │                        ├─► refused: a copy failed
              └────────────────────────┴────────────────────┴─► released, or its worker is gone
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sparkd.residency.slots import Place, Record, Slot


class Use(Enum):
    """What a step uses records for. Prefill sees most experts once: it leaves the ring and decode's counts alone."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(slots=True)
class Counts:
    """Records that steps used, and how many of them were not resident."""

    uses: int = 0
    misses: int = 0


class LeaseState(Enum):
    """How far a lease is."""

    WAITING = "waiting"
    COPYING = "copying"
    GRANTED = "granted"


@dataclass(slots=True)
class Lease:
    """One part of a worker's step: its records in the order they were asked for, and where they are.

    `copying` counts the slots that are being copied to.
    """

    number: int
    worker: int
    use: Use
    records: tuple[Record, ...]
    slots: dict[Record, Slot] = field(default_factory=dict)
    copying: int = 0

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its records are, or will be, in the order they were asked for."""
        return tuple(self.slots[record].place for record in self.records)

    @property
    def state(self) -> LeaseState:
        """How far it is."""
        if self.records and not self.slots:
            return LeaseState.WAITING
        return LeaseState.COPYING if self.copying else LeaseState.GRANTED
