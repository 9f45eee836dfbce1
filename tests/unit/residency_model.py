"""A tier with its owner and workers, played by hand: carries out the engine's commands and checks each against memory.

The model knows what a slot's bytes are, which word leads where, what running steps and leases may read. It never looks
into the engine, except for the hot set and for how far a lease is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparkd.residency.commands import Cancel, Command, Copy, Grant, Hurry, Lend, Publish, Refuse, Retract
from sparkd.residency.epochs import Adopted, Steps
from sparkd.residency.leases import LeaseState, Use
from sparkd.residency.placement import Placement
from sparkd.residency.ring import HALF_LIFE
from sparkd.residency.slabs import LayerSize, SlabSize
from sparkd.residency.slots import Place, Record
from sparkd.residency.transfers import Residency

Key = tuple[int, int]


@dataclass
class Step:
    """A running step of a worker, and all it may read without a lease."""

    number: int
    readable: set[tuple[Record, Place]]


@dataclass
class Worker:
    #: `missed` is set where the owner of now was not told that the worker is gone: it was another owner then.
    alive: bool = True
    missed: bool = False
    begun: int = 0
    ended: int = 0
    running: list[Step] = field(default_factory=list)
    #: Places leased by an owner that is gone, and the last step that may read them.
    orphaned: list[tuple[int, Record, Place]] = field(default_factory=list)


@dataclass
class Asked:
    worker: int
    use: Use
    records: tuple[Record, ...]
    places: tuple[Place, ...] | None = None
    lent: tuple[Place, ...] | None = None


class Tier:
    def __init__(self, layers: Sequence[LayerSize], slabs: Sequence[SlabSize], workers: int = 2) -> None:
        self.layers = layers
        self.slabs = slabs
        self.records = [Record(n, expert) for n, layer in enumerate(layers) for expert in range(layer.experts)]
        self.engine = Residency(layers, slabs)
        self.workers = [Worker() for _ in range(workers)]
        #: What each slot holds: whose bytes of which filling; None: a copy is, or was, under way.
        self.content: dict[Key, tuple[Record, int] | None] = {}
        self.generation: dict[Key, int] = {}
        self.words: dict[Record, Place] = {}
        #: Records that slots of the reserve hold as a whole, leased or not.
        self.whole: dict[Key, Record] = {}
        self.copies: list[Copy] = []
        #: Fillings ahead of need that nobody has leased since.
        self.ahead: set[tuple[int, Place]] = set()
        self.cancelled: set[Copy] = set()
        #: Admitted records whose copy has begun, and that are neither published nor given back.
        self.open: set[Record] = set()
        self.asked: dict[int, Asked] = {}
        self.granted = 0
        #: Decayed uses of each record, and the one use a ring member counts as having had when it came in, decayed too.
        self.heat: dict[Record, float] = {}
        self.welcome: dict[Record, float] = {}
        self.half_life = HALF_LIFE
        #: Slots that are to be given up, whoever is in them; and those of them that are.
        self.closing: set[Key] = set()
        self.closed: set[Key] = set()

    # ---- what happens ----

    def stage(self, worker: int, records: Iterable[Record], use: Use) -> int:
        asked = Asked(worker, use, tuple(records))
        number, commands = self.engine.stage(worker, asked.records, use)
        assert number not in self.asked
        self.asked[number] = asked
        self.run(commands)
        return number

    def foresee(self, worker: int, records: Iterable[Record]) -> None:
        commands = self.engine.foresee(worker, records)
        ahead = [command for command in commands if isinstance(command, Copy) and command.ahead]
        self.run(commands)
        for slab, size in enumerate(self.slabs):
            mine = [copy for copy in self.copies if copy.ahead and copy.reserve and copy.slab == slab]
            assert len(mine) <= size.reserve // 2
        assert not ahead or not any(state is LeaseState.WAITING for state in self.engine.leases().values())

    def part(self, layer: int, experts: Iterable[int]) -> list[Record]:
        limit = self.engine.part_limit(layer)
        return [Record(layer, expert) for expert in experts][:limit]

    def release(self, number: int) -> None:
        del self.asked[number]
        self.run(self.engine.release(number))

    def admit(self, records: Iterable[Record]) -> None:
        self.run(self.engine.admit(records))

    def used(self, worker: int, records: Sequence[Record], use: Use) -> list[Record]:
        missed = self.engine.used(worker, records, use)
        assert {record for record in records if record not in self.words} <= set(missed)
        if use is Use.DECODE:
            for heat in (self.heat, self.welcome):
                heat.update({record: value * 0.5 ** (1 / self.half_life) for record, value in heat.items()})
            self.heat.update({record: self.heat.get(record, 0.0) + 1.0 for record in records})
        return missed

    def place(self, hot: Sequence[Sequence[int]], ring: float, half_life: float = HALF_LIFE) -> None:
        self.engine.place(Placement(1, hot, ring, half_life))
        self.half_life = half_life

    def swap(self, limit: int) -> int:
        """Returns how many records entered or left the hot set."""
        before = self.engine.hot()
        commands = self.engine.swap(limit)
        after = self.engine.hot()
        swaps = max(len(before - after), len(after - before))
        assert swaps <= limit
        self.welcome.update(dict.fromkeys(before - after, 1.0))
        self.run(commands)
        return swaps

    def cancel(self, record: Record) -> None:
        self.run(self.engine.cancel(record))

    def close(self, slab: int, slots: Iterable[int]) -> bool:
        keys = {(slab, slot) for slot in slots}
        self.closing |= keys
        closed, commands = self.engine.close(slab, slots)
        self.run(commands)
        if closed:
            assert not keys & self.in_use()
            self.closed |= keys
        return closed

    def reopen(self, slab: int, slots: Iterable[int]) -> None:
        keys = {(slab, slot) for slot in slots}
        assert keys <= self.closed
        self.closing -= keys
        self.closed -= keys
        self.run(self.engine.open(slab, slots))

    def copied(self, copy: Copy) -> None:
        self.copies.remove(copy)
        self.content[copy.slab, copy.place.slot] = (copy.record, copy.place.generation)
        if copy.reserve and copy not in self.cancelled:
            self.whole[copy.slab, copy.place.slot] = copy.record
        self.cancelled.discard(copy)
        self.run(self.engine.copied(copy))

    def failed(self, copy: Copy) -> None:
        self.copies.remove(copy)
        if copy not in self.cancelled and not copy.reserve:
            self.open.remove(copy.record)
        self.cancelled.discard(copy)
        self.run(self.engine.failed(copy, "disk on fire"))

    def publish(self) -> None:
        self.run(self.engine.publish())

    def begin(self, worker: int) -> None:
        one = self.workers[worker]
        one.begun += 1
        one.running.append(Step(one.begun, set(self.words.items())))

    def end(self, worker: int) -> None:
        one = self.workers[worker]
        self.read()
        one.ended = one.running.pop(0).number
        one.orphaned = [orphan for orphan in one.orphaned if orphan[0] > one.ended]

    def counters(self) -> list[Steps]:
        return [Steps(worker.begun, worker.ended) for worker in self.workers]

    def observe(self) -> None:
        self.run(self.engine.observe(self.counters()))

    def attach(self, worker: int) -> None:
        one = self.workers[worker]
        if not one.alive:
            one.alive, one.missed, one.ended = True, False, one.begun
        one.orphaned = []
        self._forget(worker)
        self.run(self.engine.attach(worker))

    def gone(self, worker: int) -> None:
        one = self.workers[worker]
        one.alive, one.missed, one.running, one.orphaned = False, False, [], []
        self._forget(worker)
        self.run(self.engine.gone(worker))

    def _forget(self, worker: int) -> None:
        self.asked = {number: asked for number, asked in self.asked.items() if asked.worker != worker}

    def restart_owner(self) -> None:
        """The owner dies with its copies half done; another adopts what the words and counters in shared memory say."""
        for asked in self.asked.values():
            one = self.workers[asked.worker]
            if one.running:
                last = one.running[-1].number
                one.orphaned += [(last, *pair) for pair in self.held(asked)]
        self.asked, self.copies, self.cancelled, self.open, self.whole = {}, [], set(), set(), {}
        self.closing, self.closed = set(), set()
        for one in self.workers:
            one.missed = not one.alive
        highest = max(self.generation.values(), default=0)
        self.engine = Residency(self.layers, self.slabs, Adopted(dict(self.words), highest, self.counters()))
        self.heat, self.welcome, self.half_life = {}, dict.fromkeys(self.words, 1.0), HALF_LIFE

    # ---- the owner, carrying out commands ----

    def run(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Copy():
                    self._copy(command)
                case Hurry(copy):
                    self.ahead.discard((copy.slab, copy.place))
                    assert copy in self.copies
                    assert copy not in self.cancelled
                case Cancel(copy):
                    assert copy in self.copies
                    assert copy not in self.cancelled
                    self.cancelled.add(copy)
                    if not copy.reserve:
                        self.open.remove(copy.record)
                case Publish(record, place):
                    self._publish(record, place)
                case Retract(record, place):
                    self._retract(record, place)
                case Lend(number, places):
                    asked = self.asked[number]
                    assert (asked.lent, asked.places) == (None, None)
                    assert len(places) == len(asked.records)
                    asked.lent = places
                    self._leased(asked, places)
                case Grant(number, places):
                    self._grant(number, places)
                case Refuse(number, record, reason):
                    assert reason == "disk on fire"
                    asked = self.asked.pop(number)
                    assert asked.places is None
                    assert record in asked.records

    def _leased(self, asked: Asked, places: tuple[Place, ...]) -> None:
        self.ahead -= {(self.slab(record), place) for record, place in zip(asked.records, places, strict=True)}

    def _copy(self, copy: Copy) -> None:
        slab, size = copy.slab, self.slabs[copy.slab]
        key = (slab, copy.place.slot)
        assert slab == self.slab(copy.record)
        assert 0 <= copy.place.slot < size.slots
        assert copy.reserve == (copy.place.slot >= size.ordinary)
        assert all((other.slab, other.place.slot) != key for other in self.copies), "two copies into one slot"
        assert key not in self.in_use(), "a copy into a slot that somebody reads"
        assert key not in self.closed, "a copy into a slot that was given up"
        assert copy.place.generation > self.generation.get(key, 0), "a filling that cannot be told from an older one"
        if not copy.reserve:
            assert copy.record not in self.words, "admitted twice"
            assert copy.record not in self.open, "admitted twice"
            self.open.add(copy.record)
        if copy.source is None:
            assert (slab, copy.record) not in {(where[0], r) for where, r in self.whole.items()}, "held, yet read again"
            reads = [c for c in self.copies if c not in self.cancelled and c.source is None]
            assert copy.record not in {c.record for c in reads}, "read twice at once"
        else:
            assert copy.source.slot >= size.ordinary
            assert self.content[slab, copy.source.slot] == (copy.record, copy.source.generation), "copied from nothing"
        self.generation[key] = copy.place.generation
        if copy.ahead:
            assert copy.source is None
            self.ahead.add((slab, copy.place))
        self.content[key] = None
        self.whole.pop(key, None)
        self.copies.append(copy)

    def _publish(self, record: Record, place: Place) -> None:
        key = (self.slab(record), place.slot)
        assert self.content[key] == (record, place.generation), "published before it is complete"
        assert place.slot < self.slabs[key[0]].ordinary, "a reserve slot is published"
        assert all((self.slab(r), p.slot) != key for r, p in self.words.items()), "a slot with two owners"
        assert record not in self.words
        self.words[record] = place
        self.open.remove(record)
        self.welcome[record] = 0.0 if (key[0], place) in self.ahead else 1.0
        for worker in self.workers:
            for step in worker.running:
                step.readable.add((record, place))

    def _retract(self, record: Record, place: Place) -> None:
        assert self.words.pop(record) == place
        assert record not in self.engine.hot(), "a hot record is evicted"
        states = self.engine.leases()
        leased = {
            pair
            for asked in self.asked.values()
            if asked.places is not None
            for pair in zip(asked.records, asked.places, strict=True)
        }
        maybe = {r for n, a in self.asked.items() if states.get(n) is LeaseState.COPYING for r in a.records}
        assert (record, place) not in leased, "a leased record is evicted"
        slab, hot = self.slab(record), self.engine.hot()
        if (slab, place.slot) in self.closing:
            return
        for other, where in self.words.items():
            if self.slab(other) == slab and other not in hot and other not in maybe and (other, where) not in leased:
                assert self.warmth(record) <= self.warmth(other) * (1 + 1e-9), "evicted before a colder one"

    def _grant(self, number: int, places: tuple[Place, ...]) -> None:
        asked = self.asked[number]
        assert asked.places is None
        assert len(places) == len(asked.records)
        assert asked.lent in (None, places), "granted elsewhere than it was lent"
        self._leased(asked, places)
        self.granted += 1
        asked.places = places
        reserve: dict[int, set[int]] = {}
        for record, place in zip(asked.records, places, strict=True):
            slab = self.slab(record)
            assert self.content[slab, place.slot] == (record, place.generation), "granted before it is complete"
            if place.slot >= self.slabs[slab].ordinary:
                reserve.setdefault(slab, set()).add(place.slot)
        for slab, slots in reserve.items():
            assert len(slots) <= self.slabs[slab].reserve

    # ---- what must always hold ----

    def readable(self) -> Iterable[tuple[Record, Place]]:
        """All that a running step, the holder of a lease or a copy may read now."""
        for worker in self.workers:
            for step in worker.running:
                yield from step.readable
            for _, record, place in worker.orphaned:
                yield record, place
        for asked in self.asked.values():
            yield from self.held(asked)
        yield from self.words.items()
        yield from ((copy.record, copy.source) for copy in self.copies if copy.source is not None)

    def held(self, asked: Asked) -> Iterable[tuple[Record, Place]]:
        """What a lease may read: all of it once granted, before that what is complete of what was lent."""
        for record, place in zip(asked.records, asked.places or asked.lent or (), strict=False):
            complete = self.content[self.slab(record), place.slot] == (record, place.generation)
            if complete or asked.places is not None:
                yield record, place

    def in_use(self) -> set[Key]:
        return {(self.slab(record), place.slot) for record, place in self.readable()}

    def read(self) -> None:
        """Read all that may be read: it is exactly the record that the reader was promised."""
        for record, place in self.readable():
            assert self.content[self.slab(record), place.slot] == (record, place.generation)

    def check(self) -> None:
        self.read()
        assert {record: self.engine.place_of(record) for record in self.words} == self.words
        residents = [0] * len(self.layers)
        for record in self.words:
            residents[record.layer] += 1
        assert self.engine.residents() == residents
        assert set(self.engine.leases()) == set(self.asked)
        states = self.engine.leases()
        assert all((states[n] is LeaseState.GRANTED) == (a.places is not None) for n, a in self.asked.items())
        for slab, (size, use) in enumerate(zip(self.slabs, self.engine.slab_use(), strict=True)):
            assert use.hot + use.ring + use.moving + use.free == use.slots
            gone = size.slots - use.slots
            assert sum(key[0] == slab for key in self.closed) <= gone <= sum(key[0] == slab for key in self.closing)
            assert use.hot + use.ring == sum(self.slab(record) == slab for record in self.words) <= size.ordinary

    def settle(self) -> None:
        """Everything under way comes to its good end; what was admitted is resident, and nothing is left behind."""
        for worker, one in enumerate(self.workers):
            if one.missed:
                self.attach(worker)
        for _ in range(len(self.records) + len(self.asked) + 10):
            for copy in list(self.copies):
                self.copied(copy)
            self.publish()
            for number in [number for number, asked in self.asked.items() if asked.places is not None]:
                self.release(number)
            for worker, one in enumerate(self.workers):
                while one.running:
                    self.end(worker)
            self.observe()
            if not self.copies and not self.asked:
                break
        self.check()
        assert not self.copies
        assert not self.asked, "a lease that is never granted"
        assert not self.open, "an admitted record that is neither published nor given back"
        assert all(record in self.words for record in self.engine.hot())
        for size, use in zip(self.slabs, self.engine.slab_use(), strict=True):
            assert use.moving == 0
            assert use.free >= size.reserve + min(size.spare, use.ring + use.free - size.reserve)

    def slab(self, record: Record) -> int:
        return self.layers[record.layer].slab

    def warmth(self, record: Record) -> float:
        return max(self.heat.get(record, 0.0), self.welcome[record])


IDLE = [Steps(0, 0)]


def kinds(commands):
    return [type(command) for command in commands]


def one_layer(slots: int, reserve: int, experts: int = 20, spare: int = 0, workers: int = 2) -> Tier:
    return Tier([LayerSize(0, experts)], [SlabSize(slots, reserve, spare)], workers)


def resident(tier: Tier, *experts: int) -> list[Record]:
    """Admit experts of layer 0, in that order, and publish them."""
    records = [Record(0, expert) for expert in experts]
    tier.admit(records)
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.publish()
    assert all(record in tier.words for record in records)
    return records


class Stepper:
    """A worker's step: expert layer after expert layer, the absent records staged part by part."""

    def __init__(self, tier: Tier, worker: int, wanted: list[list[Record]], use: Use) -> None:
        self.tier, self.worker, self.use = tier, worker, use
        self.left = [list(records) for records in wanted]
        self.lease: int | None = None
        self.computed = 0
        tier.begin(worker)

    def advance(self) -> bool:
        """Do what can be done now; false once the step has ended."""
        tier = self.tier
        if self.lease is not None:
            if tier.asked[self.lease].places is not None:
                self.computed += len(tier.asked[self.lease].records)
                tier.release(self.lease)
                self.lease = None
            return True
        while self.left and not self.left[0]:
            self.left.pop(0)
        if not self.left:
            tier.end(self.worker)
            return False
        here = [record for record in self.left[0] if record in tier.words]
        self.computed += len(here)
        absent = [record for record in self.left[0] if record not in tier.words]
        part = tier.part(absent[0].layer, [record.expert for record in absent]) if absent else []
        self.left[0] = absent[len(part) :]
        if part:
            self.lease = tier.stage(self.worker, part, self.use)
        return True
