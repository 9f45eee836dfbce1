"""Slabs: the slots of one record size, which of them are free, and which records wait for one. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sparkd.residency.ring import Heats, Ring
from sparkd.residency.slots import GENERATIONS, Place, Record, Slot, SlotState


@dataclass(frozen=True, slots=True)
class SlabSize:
    """`slots` places, the last `reserve` of them for leases alone.

    `spare` ordinary slots are kept free by evicting ahead: what a step misses is then copied once, straight into the
    ring, instead of into the reserve first.
    """

    slots: int
    reserve: int
    spare: int = 0

    @property
    def ordinary(self) -> int:
        """Slots for hot set and ring."""
        return self.slots - self.reserve

    def hot(self, ring: float) -> int:
        """How many hot records leave the share `ring` (0 to 1) of the ordinary slots to the ring."""
        return self.ordinary - round(self.ordinary * ring)

    def holds(self, records: int) -> bool:
        """Whether each of `records` has an ordinary slot of its own, so that nothing is ever evicted.

        ValueError when `records` cannot be served at all: a slab that does not hold them needs a reserve, and one that
        does needs no spare.
        """
        full = self.ordinary >= records
        least = 0 if full else 1
        most = 0 if full else max(self.ordinary - 1, 0)
        if self.reserve < least or self.ordinary < 0 or not 0 <= self.spare <= most:
            raise ValueError(f"{records} records cannot be served from {self}")
        return full


@dataclass(frozen=True, slots=True)
class SlabUse:
    """How the slots of a slab are used: `hot` and `ring` are resident, `moving` are copied to, leased or drained."""

    slots: int
    reserve: int
    hot: int
    ring: int
    moving: int
    free: int


@dataclass(frozen=True, slots=True)
class LayerSize:
    """The slab and the number of records of an expert layer."""

    slab: int
    experts: int


class Slab:
    """The slots of one size and the queues in front of them.

    `returning` counts ordinary slots that become free without another eviction; `hot` counts slots of hot records and
    hot records that wait. `entering` and `leaving` are what a placement has yet to swap to its `target`. `size` is
    without `closed` slots: those are given up, and stay FREE once they are, until they are opened.
    """

    def __init__(self, number: int, size: SlabSize, records: int, heats: Heats[Record]) -> None:
        self.number = number
        self.size = size
        self.full = size.holds(records)
        self.slots = [Slot(number, Place(n, 0), n >= size.ordinary) for n in range(size.slots)]
        self.closed: set[Slot] = set()
        self.free = deque(self.slots[: size.ordinary])
        #: Free slots of the reserve, that which was freed first in front; and those of them that still hold a record.
        self.reserve = OrderedDict.fromkeys(self.slots[size.ordinary :])
        self.leftovers: dict[Record, Slot] = {}
        self.ring = Ring(heats)
        self.returning = 0
        self.hot = 0
        self.hot_wants: OrderedDict[Record, None] = OrderedDict()
        self.ring_wants: OrderedDict[Record, None] = OrderedDict()
        self.entering: OrderedDict[Record, None] = OrderedDict()
        self.leaving: OrderedDict[Record, None] = OrderedDict()
        self.target: frozenset[Record] = frozenset()

    def doubt(self, generation: int) -> None:
        """Take every slot for one that somebody may read, in a filling of `generation` at most."""
        for slot in self.slots:
            slot.place = Place(slot.place.slot, generation)
            slot.state = SlotState.DRAINING
        self.returning = len(self.free)
        self.free.clear()
        self.reserve.clear()

    def adopt(self, record: Record, place: Place) -> Slot:
        """The slot where a record is resident already. ValueError when it cannot be there."""
        if not 0 <= place.slot < self.size.ordinary or self.slots[place.slot].record is not None:
            raise ValueError(f"{record} cannot be resident at {place}")
        slot = self.slots[place.slot]
        slot.place, slot.state, slot.record = place, SlotState.RESIDENT, record
        self.returning -= 1
        self.ring.add(record)
        return slot

    def fill(self, slot: Slot, record: Record) -> None:
        """Begin a copy of `record` into a slot that was taken from `free` or `reserve`."""
        slot.turn(SlotState.COPYING)
        slot.place = Place(slot.place.slot, (slot.place.generation + 1) % GENERATIONS)
        slot.record = record

    def part(self, slot: Slot, state: SlotState) -> None:
        """Part a slot from its record; it returns when its copy or its readers have ended (`empty`)."""
        slot.turn(state)
        slot.record = None
        if not slot.reserve and slot not in self.closed:
            self.returning += 1

    def empty(self, slot: Slot) -> None:
        """Make a slot free: nobody reads or writes it any more."""
        closed = slot in self.closed
        if slot.state in (SlotState.CANCELLING, SlotState.DRAINING) and not slot.reserve and not closed:
            self.returning -= 1
        if slot.state is SlotState.COPIED:
            self.leftovers[slot.owner] = slot
        else:
            slot.record = None
        slot.turn(SlotState.FREE)
        if slot.reserve:
            self.reserve[slot] = None
        elif not closed:
            self.free.append(slot)

    def close(self, slots: Iterable[Slot]) -> list[Slot]:
        """Give up those of these slots that are ordinary, not leased and not copied to; residents are to be retracted.

        The placement wants no more than there is room for then.
        """
        residents = []
        for slot in slots:
            if slot in self.closed or slot.reserve or slot.leases:
                continue
            if slot.state is SlotState.RESIDENT:
                if slot.hot:
                    self.cool(slot)
                else:
                    self.ring.remove(slot.owner)
                residents.append(slot)
            elif slot.state is SlotState.FREE:
                self.free.remove(slot)
            elif slot.state is SlotState.DRAINING:
                self.returning -= 1
            else:
                continue
            self.closed.add(slot)
            self.size = replace(self.size, slots=self.size.slots - 1)
        while self.entering and self.hot - len(self.leaving) + len(self.entering) > self.size.ordinary:
            self.entering.popitem()
        return residents

    def open(self, slot: Slot) -> None:
        """Take back a slot that was given up. RuntimeError when it was not, or is not FREE yet."""
        if slot not in self.closed or slot.state is not SlotState.FREE:
            raise RuntimeError(f"{slot.place} of slab {slot.slab} is {slot.state.name} and cannot be opened")
        self.closed.remove(slot)
        self.size = replace(self.size, slots=self.size.slots + 1)
        self.free.append(slot)

    def take_reserve(self) -> Slot:
        """The slot of the reserve that has been free for longest; what it still holds is given up.

        The ring does not get it then: to fetch again what nobody waits for is not worth it.
        """
        slot, _ = self.reserve.popitem(last=False)
        if slot.record is not None:
            del self.leftovers[slot.record]
            self.ring_wants.pop(slot.record, None)
        return slot

    def revive(self, record: Record) -> Slot:
        """The free slot of the reserve that still holds `record`, in use again. KeyError when there is none."""
        slot = self.leftovers.pop(record)
        del self.reserve[slot]
        slot.turn(SlotState.COPIED)
        return slot

    # ---- the hot set ----

    def aim(self, ranked: Sequence[Record]) -> None:
        """Take another target, the most wanted first: what waits and is not in it goes, the rest are swaps to come."""
        self.target = frozenset(ranked)
        for record in [record for record in self.hot_wants if record not in self.target]:
            del self.hot_wants[record]
            self.hot -= 1
        hot = OrderedDict.fromkeys(slot.owner for slot in self.slots if slot.hot)
        self.entering = OrderedDict.fromkeys(r for r in ranked if r not in hot and r not in self.hot_wants)
        self.leaving = OrderedDict.fromkeys(record for record in hot if record not in self.target)

    def promote(self, record: Record, slot: Slot | None) -> None:
        """Have a record enter the hot set, in the slot that it has or, without one, once it gets one."""
        self.hot += 1
        if slot is None:
            self.ring_wants.pop(record, None)
            self.hot_wants[record] = None
            return
        slot.hot = True
        if slot.state is SlotState.RESIDENT:
            self.ring.remove(record)

    def demote(self, slot: Slot) -> None:
        """Have the record of a slot leave the hot set for the ring."""
        self.hot -= 1
        slot.hot = False
        if slot.state is SlotState.RESIDENT:
            self.ring.add(slot.owner)

    def cool(self, slot: Slot) -> None:
        """Take a slot that is about to lose its record out of the hot set."""
        if slot.hot:
            slot.hot = False
            self.not_hot(slot.owner)

    def not_hot(self, record: Record) -> None:
        """A hot record did not make it: if the placement still wants it, a later swap tries again."""
        self.hot -= 1
        self.leaving.pop(record, None)
        if record in self.target:
            self.entering[record] = None

    # ---- how much there is ----

    @property
    def ring_room(self) -> int:
        """Ordinary slots that the hot set leaves."""
        return max(self.size.ordinary - self.hot, 0)

    @property
    def shortage(self) -> int:
        """Members the ring has to give up, so that all that waits gets a slot and `spare` are free."""
        wanted = len(self.hot_wants) + len(self.ring_wants) + self.size.spare
        return wanted - len(self.free) - self.returning

    def use(self) -> SlabUse:
        """How the slots are used; looks at all of them."""
        states = [slot.state for slot in self.slots if slot not in self.closed]
        resident, free = states.count(SlotState.RESIDENT), states.count(SlotState.FREE)
        ring = len(self.ring)
        return SlabUse(self.size.slots, self.size.reserve, resident - ring, ring, len(states) - resident - free, free)
