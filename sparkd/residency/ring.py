"""The ring: slots of resident records that are not hot, the least recently used first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sparkd.residency.slots import Slot


class Ring:
    """Members in the order of their last use; constant time, but that `oldest` passes over older members with leases.

    These are few: one part of an operation leases at most the reserve.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Slot, None] = OrderedDict()

    def add(self, slot: Slot) -> None:
        """Take in a member, as the most recent."""
        self._order[slot] = None

    def touch(self, slot: Slot) -> None:
        """Make a member the most recent. KeyError when it is none."""
        self._order.move_to_end(slot)

    def remove(self, slot: Slot) -> None:
        """Let a member go. KeyError when it is none."""
        del self._order[slot]

    def oldest(self) -> Slot | None:
        """The least recent member that no lease is on; None without one."""
        return next((slot for slot in self._order if not slot.leases), None)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
