"""The residency engine: one state machine for both borders, disk to host (in the store) and host to device (a worker).

Pure: the owner of a tier calls it with what happened, and carries out the commands it gets back, in order, before the
next call. `slots` draws the states of a slot; `epochs` says when a slot that could be read is safe to be written.

A record becomes resident by being admitted, to the hot set (`place`, `swap`) or to the ring (`admit`, and what `stage`
misses for decode): it waits for an ordinary slot, the ring gives up its coldest member for it, and once copied it is
published, unless the copy fails or is cancelled. Prefill admits nothing and heats nothing.

What a step needs and does not find is staged, part by part, under leases (`leases` draws their states). Parts wait in
order; a part names at most as many records of a slab as its reserve has slots, and gets all it needs at once. So a part
that waits, waits for parts that lack nothing, and a step of any size comes to its end. Nothing that a slot of the
reserve still holds is fetched again: it is leased once more, or copied from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sparkd.residency.commands import Cancel, Command, Copy, Grant, Hurry, Lend, Publish, Refuse, Retract
from sparkd.residency.epochs import Adopted, Epochs, Steps
from sparkd.residency.leases import Counts, Lease, LeaseState, Use
from sparkd.residency.placement import Placement, PlacementError
from sparkd.residency.ring import Heats
from sparkd.residency.slabs import LayerSize, Slab, SlabSize, SlabUse
from sparkd.residency.slots import Place, Record, Slot, SlotState


class Residency:
    """Which record is in which slot of one tier. Every call costs constant time per record it is about.

    (Beyond that: the number of slabs; `observe` the number of workers; `place` and the views all records.)
    """

    def __init__(self, layers: Sequence[LayerSize], slabs: Sequence[SlabSize], adopted: Adopted | None = None) -> None:
        """ValueError when a slab cannot serve its records, or what is adopted is not of this shape."""
        self._layers = tuple(layers)
        records = [sum(layer.experts for layer in layers if layer.slab == slab) for slab in range(len(slabs))]
        self._heats: Heats[Record] = Heats()
        self._slabs = [Slab(number, size, records[number], self._heats) for number, size in enumerate(slabs)]
        #: Ordinary slots that are copied to, copied or resident; reserve slots that are copied to or copied.
        self._homes: dict[Record, Slot] = {}
        self._staged: dict[Record, Slot] = {}
        self._copied: list[Slot] = []
        #: Copies under way by their target, and the slots of the reserve that some of them read from.
        self._copying: dict[Slot, Copy] = {}
        self._sources: dict[Slot, Slot] = {}
        self._residents = [0] * len(layers)
        self._leases: dict[int, Lease] = {}
        self._waiting: OrderedDict[int, Lease] = OrderedDict()
        self._last_lease = 0
        self._missed: dict[tuple[int, Use], set[Record]] = {}
        self._epochs = Epochs()
        self._commands: list[Command] = []
        self.counts = {use: Counts() for use in Use}
        if adopted is not None:
            self._adopt(adopted)

    # ---- what is where ----

    def place_of(self, record: Record) -> Place | None:
        """Where a resident record is; None for any other."""
        slot = self._homes.get(record)
        return slot.place if slot is not None and slot.state is SlotState.RESIDENT else None

    def residents(self) -> list[int]:
        """Resident records of each expert layer."""
        return list(self._residents)

    def hot(self) -> frozenset[Record]:
        """The hot set: resident or on the way."""
        homes = {record for record, slot in self._homes.items() if slot.hot}
        return frozenset(homes.union(*(slab.hot_wants for slab in self._slabs)))

    def leases(self, worker: int | None = None) -> dict[int, LeaseState]:
        """How far each lease of one worker, or of all, is; by its number."""
        return {number: lease.state for number, lease in self._leases.items() if worker in (None, lease.worker)}

    def part_limit(self, layer: int) -> int | None:
        """Records of an expert layer that one part may name; None: any number."""
        slab = self._slabs[self._layers[layer].slab]
        return None if slab.full else slab.size.reserve

    def full(self, number: int) -> bool:
        """Whether a slab has a slot for each of its records, so that no part is ever limited."""
        return self._slabs[number].full

    @property
    def draining(self) -> bool:
        """Whether `observe` has something to find out."""
        return self._epochs.pending

    @property
    def retiring(self) -> bool:
        """Whether `observe` has to find out something that it did not know of at its last call."""
        return self._epochs.retiring

    def hottest(self, records: Iterable[Record], most: int) -> list[Record]:
        """At most `most` of the records, those that decode uses most; of equals the first."""
        return sorted(records, key=lambda record: -self._heats.heat(record))[:most]

    def swaps_left(self) -> int:
        """Steps that `swap` has yet to take towards the placement."""
        return sum(max(len(slab.entering), len(slab.leaving)) for slab in self._slabs)

    def rooms(self) -> list[int]:
        """Free slots of each slab that may be filled without anything to give up for it."""
        return [len(slab.free) - slab.size.spare for slab in self._slabs]

    def slab_use(self) -> list[SlabUse]:
        """How each slab is used."""
        return [slab.use() for slab in self._slabs]

    # ---- admission ----

    def admit(self, records: Iterable[Record]) -> list[Command]:
        """Bring records into the ring, as many as it has room for: of more, the last ones."""
        for record in records:
            self._want(self._slab(record), record)
        return self._settle()

    def used(self, worker: int, records: Iterable[Record], use: Use) -> list[Record]:
        """A step of a worker used these records, each named once: counts them, and heats them for decode.

        The records that the step missed: they were not resident, or only because it staged them.
        """
        staged = self._missed.pop((worker, use), set())
        named = tuple(records)
        missed = [record for record in named if record in staged or self.place_of(record) is None]
        counts = self.counts[use]
        counts.uses += len(named)
        counts.misses += len(missed)
        if use is Use.DECODE:
            self._heats.use(named)
        return missed

    def place(self, placement: Placement) -> None:
        """Take a placement as the goal of later swaps. PlacementError when this tier cannot hold it.

        What it says of the ring holds at once.
        """
        ranked = placement.ranked([layer.experts for layer in self._layers])
        for slab, count in self._per_slab(ranked).items():
            if count > slab.size.hot(placement.ring):
                most = slab.size.hot(placement.ring)
                raise PlacementError(f"{count} hot records of one size, beside the ring there is room for {most}")
        self._heats.set_half_life(placement.half_life)
        for number, slab in enumerate(self._slabs):
            slab.aim([record for record in ranked if self._layers[record.layer].slab == number])

    def swap(self, limit: int) -> list[Command]:
        """Take at most `limit` steps towards the placement: a record leaves the hot set, another enters, or both.

        What leaves joins the ring. What enters keeps its slot if it has one.
        """
        for slab in self._slabs:
            while limit > 0 and (slab.entering or slab.leaving):
                if slab.leaving:
                    slab.demote(self._homes[slab.leaving.popitem(last=False)[0]])
                if slab.entering:
                    record, _ = slab.entering.popitem(last=False)
                    slab.promote(record, self._homes.get(record))
                limit -= 1
        return self._settle()

    def cancel(self, record: Record) -> list[Command]:
        """Give up the admission of a record, unless it is complete or a lease waits for it."""
        slab = self._slab(record)
        slot = self._homes.get(record)
        slab.ring_wants.pop(record, None)
        if record in slab.hot_wants:
            del slab.hot_wants[record]
            slab.not_hot(record)
        elif slot is not None and slot.state is SlotState.COPYING and not slot.leases:
            self._abandon(slot)
        return self._settle()

    def close(self, number: int, slots: Iterable[int]) -> tuple[bool, list[Command]]:
        """Give up ordinary slots of a slab: whether nobody reads or writes any of them now.

        While that is not so, ask again. Who is in them leaves; what the placement wants comes back by later swaps, as
        far as there is room.
        """
        slab = self._slabs[number]
        closing = [slab.slots[slot] for slot in slots]
        for slot in slab.close(closing):
            self._retract(slab, slot)
        commands = self._settle()
        return all(slot in slab.closed and slot.state is SlotState.FREE for slot in closing), commands

    def open(self, number: int, slots: Iterable[int]) -> list[Command]:
        """Take back slots that `close` gave up, and that nobody reads or writes. RuntimeError for others.

        The ring grows by them; the hot set by later placements.
        """
        slab = self._slabs[number]
        for slot in slots:
            slab.open(slab.slots[slot])
        return self._settle()

    # ---- copies ----

    def copied(self, copy: Copy) -> list[Command]:
        """A copy is complete. RuntimeError when it is not under way."""
        slot = self._ended(copy)
        if slot.state is SlotState.CANCELLING:
            self._slabs[slot.slab].empty(slot)
            return self._settle()
        slot.turn(SlotState.COPIED)
        for number in slot.leases:
            lease = self._leases[number]
            lease.copying -= 1
            if not lease.copying:
                self._grant(lease)
        if slot.reserve:
            self._let_go(slot)
        else:
            self._copied.append(slot)
        return self._settle()

    def failed(self, copy: Copy, reason: str) -> list[Command]:
        """A copy ended before it was complete: whoever waits for it is refused. RuntimeError: it is not under way."""
        slot = self._ended(copy)
        slab = self._slabs[slot.slab]
        if slot.state is SlotState.COPYING:
            record = slot.owner
            del (self._staged if slot.reserve else self._homes)[record]
            slab.cool(slot)
            for number in sorted(slot.leases):
                lease = self._leases[number]
                del lease.slots[record]
                self._drop(lease)
                self._commands.append(Refuse(number, record, reason))
            slot.leases.clear()
        slab.empty(slot)
        return self._settle()

    def publish(self) -> list[Command]:
        """Publish what is complete. The owner chooses the moment: its step boundary, where its readers need one."""
        for slot in self._copied:
            slot.turn(SlotState.RESIDENT)
            self._residents[slot.owner.layer] += 1
            if not slot.hot:
                self._slabs[slot.slab].ring.add(slot.owner, slot.ahead)
            self._commands.append(Publish(slot.owner, slot.place))
        self._copied = []
        return self._settle()

    def foresee(self, worker: int, records: Iterable[Record]) -> list[Command]:
        """Copy ahead of need what a step of a worker will probably miss; nothing is given up for it that is wanted.

        As far as there are free slots, and half of a reserve, and no part waits. What the step uses of it, it missed.
        """
        taken = [copy.slab for copy in self._copying.values() if copy.ahead and copy.reserve]
        for record in () if self._waiting else records:
            slab = self._slab(record)
            if self._holder(record) is not None or record in slab.leftovers or record in slab.hot_wants:
                continue
            if slab.free:
                slab.ring_wants.pop(record, None)
                slot = slab.free.popleft()
            elif slab.reserve and taken.count(slab.number) < slab.size.reserve // 2:
                slot = slab.take_reserve()
                taken.append(slab.number)
            else:
                continue
            self._begin(slab, slot, record, ahead=True)
            self._missed.setdefault((worker, Use.DECODE), set()).add(record)
        return self._settle()

    # ---- leases ----

    def stage(self, worker: int, records: Sequence[Record], use: Use) -> tuple[int, list[Command]]:
        """Lease records for a part of a step: the lease's number; Grant or Refuse comes now or later.

        ValueError when the part names more records than `part_limit`.
        """
        self._last_lease += 1
        lease = Lease(self._last_lease, worker, use, tuple(records))
        distinct = dict.fromkeys(records)
        for slab, count in self._per_slab(distinct).items():
            if not slab.full and count > slab.size.reserve:
                raise ValueError(f"a part names {count} records, the reserve has {slab.size.reserve} slots")
        missed = {record for record in distinct if self.place_of(record) is None}
        if missed:
            self._missed.setdefault((worker, use), set()).update(missed)
        self._leases[lease.number] = lease
        behind = bool(self._waiting) and not all(record in self._homes for record in missed)
        if behind or not self._serve(lease):
            self._waiting[lease.number] = lease
        return lease.number, self._settle()

    def release(self, number: int) -> list[Command]:
        """End a lease, granted or not. KeyError when there is none of this number."""
        self._drop(self._leases[number])
        return self._settle()

    # ---- workers ----

    def observe(self, counters: Sequence[Steps]) -> list[Command]:
        """Steps of all workers, read after every Retract so far was carried out: frees what no step can read now."""
        for slot in self._epochs.observe(counters):
            self._slabs[slot.slab].empty(slot)
        return self._settle()

    def attach(self, worker: int) -> list[Command]:
        """A worker is there, new or again, and holds no lease."""
        self._epochs.attach(worker)
        return self._forget(worker)

    def gone(self, worker: int) -> list[Command]:
        """The process of a worker has ended; its steps and leases with it."""
        self._epochs.gone(worker)
        return self._forget(worker)

    # ---- inside ----

    def _settle(self) -> list[Command]:
        """Give out what is free, in order, and have the ring give up what is wanted; all commands of this call."""
        for slab in self._slabs:
            self._fill(slab)
        while self._waiting and self._serve(next(iter(self._waiting.values()))):
            self._waiting.popitem(last=False)
        for slab in self._slabs:
            self._evict(slab)
        commands, self._commands = self._commands, []
        return commands

    def _fill(self, slab: Slab) -> None:
        while len(slab.ring_wants) > slab.ring_room:
            slab.ring_wants.popitem(last=False)
        for wants, hot in ((slab.hot_wants, True), (slab.ring_wants, False)):
            while slab.free:
                # What is on its way to the reserve is copied from there once it has arrived.
                record = next((record for record in wants if not self._arriving(record)), None)
                if record is None:
                    break
                del wants[record]
                self._begin(slab, slab.free.popleft(), record).hot = hot

    def _evict(self, slab: Slab) -> None:
        for _ in range(slab.shortage):
            record = slab.ring.coldest(self._leased)
            if record is None:
                return
            slab.ring.remove(record)
            self._retract(slab, self._homes[record])

    def _retract(self, slab: Slab, slot: Slot) -> None:
        """Part a resident slot, which is in the ring no more, from its record."""
        record = slot.owner
        del self._homes[record]
        self._residents[record.layer] -= 1
        self._commands.append(Retract(record, slot.place))
        self._epochs.retire(slot)
        slab.part(slot, SlotState.DRAINING)

    def _begin(self, slab: Slab, slot: Slot, record: Record, ahead: bool = False) -> Slot:
        slab.fill(slot, record)
        slot.ahead = ahead
        (self._staged if slot.reserve else self._homes)[record] = slot
        source = None if slot.reserve else self._staged.get(record) or self._revive(slab, record)
        if source is not None:
            source.sources += 1
            self._sources[slot] = source
        copy = Copy(record, slot.slab, slot.place, slot.reserve, None if source is None else source.place, ahead)
        self._copying[slot] = copy
        self._commands.append(copy)
        return slot

    def _revive(self, slab: Slab, record: Record) -> Slot | None:
        if record not in slab.leftovers:
            return None
        slot = self._staged[record] = slab.revive(record)
        return slot

    def _arriving(self, record: Record) -> bool:
        slot = self._staged.get(record)
        return slot is not None and slot.state is SlotState.COPYING

    def _holder(self, record: Record) -> Slot | None:
        """The slot that has a record's bytes, else the one that gets them."""
        home, staged = self._homes.get(record), self._staged.get(record)
        if home is None or (home.state is SlotState.COPYING and staged is not None):
            return staged
        return home

    def _serve(self, lease: Lease) -> bool:
        """Give a lease slots for all its records, or none: false."""
        slots = {}
        absent = []
        left = []
        for record in dict.fromkeys(lease.records):
            slot = self._holder(record)
            if slot is not None and slot.state is not SlotState.COPYING:
                slots[record] = slot
            elif record in self._slab(record).leftovers:
                left.append(record)
            elif slot is not None:
                slots[record] = slot
            else:
                absent.append(record)
        decode = lease.use is Use.DECODE
        revived = self._per_slab(left)
        for slab, count in self._per_slab([*left, *absent]).items():
            ordinary = min(len(slab.free), count - revived.get(slab, 0)) if decode or slab.full else 0
            if count - ordinary > len(slab.reserve):
                return False
        for record in left:
            slab = self._slab(record)
            slots[record] = self._staged[record] = slab.revive(record)
            if decode:
                self._want(slab, record)
        for record in absent:
            slab = self._slab(record)
            if slab.free and (decode or slab.full):
                slots[record] = self._begin(slab, slab.free.popleft(), record)
            else:
                slots[record] = self._begin(slab, slab.take_reserve(), record)
                if decode:
                    self._want(slab, record)
        for slot in slots.values():
            if slot.state is SlotState.COPYING:
                lease.copying += 1
                if not slot.leases and (slot.ahead or not slot.reserve):
                    self._commands.append(Hurry(self._copying[slot]))
            slot.leases.add(lease.number)
            slot.ahead = False
        lease.slots = slots
        if lease.copying:
            self._commands.append(Lend(lease.number, lease.places))
        else:
            self._grant(lease)
        return True

    def _grant(self, lease: Lease) -> None:
        self._commands.append(Grant(lease.number, lease.places))

    def _drop(self, lease: Lease) -> None:
        """End a lease; its slots of the reserve are free unless others lease them or a copy is under way.

        A copy to the reserve goes on: what was read may be there already, and only be told later.
        """
        del self._leases[lease.number]
        self._waiting.pop(lease.number, None)
        for slot in lease.slots.values():
            slot.leases.remove(lease.number)
            if slot.reserve:
                self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        """A copied slot of the reserve is free once it is neither leased nor copied from."""
        if slot.state is SlotState.COPIED and not slot.leases and not slot.sources:
            del self._staged[slot.owner]
            self._slabs[slot.slab].empty(slot)

    def _forget(self, worker: int) -> list[Command]:
        for lease in [lease for lease in self._leases.values() if lease.worker == worker]:
            self._drop(lease)
        for use in Use:
            self._missed.pop((worker, use), None)
        return self._settle()

    def _abandon(self, slot: Slot) -> None:
        """Cancel a copy; the slot is free when the copy has ended."""
        slab = self._slabs[slot.slab]
        self._commands.append(Cancel(self._copying[slot]))
        del self._homes[slot.owner]
        slab.cool(slot)
        slab.part(slot, SlotState.CANCELLING)

    def _want(self, slab: Slab, record: Record) -> None:
        if record not in self._homes and record not in slab.hot_wants:
            slab.ring_wants.setdefault(record)

    def _adopt(self, adopted: Adopted) -> None:
        for slab in self._slabs:
            slab.doubt(adopted.generation)
        for record, place in adopted.residents.items():
            self._homes[record] = self._slab(record).adopt(record, place)
            self._residents[record.layer] += 1
        draining = [slot for slab in self._slabs for slot in slab.slots if slot.state is SlotState.DRAINING]
        ordinary = [slot for slot in draining if not slot.reserve]
        self._epochs.adopt(ordinary, [slot for slot in draining if slot.reserve], adopted.counters)

    def _leased(self, record: Record) -> bool:
        return bool(self._homes[record].leases)

    def _slab(self, record: Record) -> Slab:
        layer = self._layers[record.layer]
        if record.layer < 0 or not 0 <= record.expert < layer.experts:
            raise IndexError(f"no {record}")
        return self._slabs[layer.slab]

    def _per_slab(self, records: Iterable[Record]) -> dict[Slab, int]:
        counts: dict[Slab, int] = {}
        for record in records:
            slab = self._slab(record)
            counts[slab] = counts.get(slab, 0) + 1
        return counts

    def _ended(self, copy: Copy) -> Slot:
        """The target of a copy that is under way no more; its source is let go."""
        slot = self._slabs[copy.slab].slots[copy.place.slot]
        if self._copying.get(slot) != copy:
            raise RuntimeError(f"{copy} is not under way: the slot is {slot.state.name}, {slot.place}")
        del self._copying[slot]
        source = self._sources.pop(slot, None)
        if source is not None:
            source.sources -= 1
            self._let_go(source)
        return slot
