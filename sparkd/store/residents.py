"""The host tier: what the residency engine decides, carried out on the arena's directory and by the copier.

The threads that copy and the one that answers workers share it: while the engine decides and its commands are carried
out, each waits for the other. A record that is complete is published at once: a word is replaced as a whole, and its
readers may look at it at any time. The counters of steps are read after every word that was retracted.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sparkd.errors import SparkError
from sparkd.ipc.directory import Entry, State
from sparkd.residency.commands import Cancel, Command, Copy, Grant, Hurry, Lend, Publish, Refuse, Retract
from sparkd.residency.epochs import Adopted, Steps
from sparkd.residency.leases import Counts, LeaseState, Use
from sparkd.residency.placement import Placement
from sparkd.residency.slabs import LayerSize, SlabUse
from sparkd.residency.slots import Place, Record
from sparkd.residency.transfers import Residency
from sparkd.store.arena import Arena
from sparkd.store.copier import NOBODY, Ended, Need
from sparkd.store.layout import IN_ARENA, Extent, record_extents

if TYPE_CHECKING:
    from sparkd.store._readers import Told

#: Swaps towards a placement that are begun at a time, when nothing else is copied that nobody waits for.
SWAPS = 2
_log = logging.getLogger(__name__)


class Copying(Protocol):
    """Who copies: `sparkd.store.copier.Copier`, or a test."""

    def begin(
        self, key: Hashable, extents: Iterable[Extent], ended: Ended, need: Need = Need.NONE, told: Told = NOBODY
    ) -> None:
        """Copy extents; call `ended` at the end, from another thread or later. `told` may be before that."""
        ...

    def hurry(self, key: Hashable) -> None:
        """Somebody waits for it now."""
        ...

    def withdraw(self, key: Hashable) -> bool:
        """Give it up unless it has begun."""
        ...

    @property
    def backlog(self) -> int:
        """Copies that nobody waits for and that have not begun."""
        ...


@dataclass(frozen=True, slots=True)
class PlacementState:
    """The placement that was taken last: its number (None: none yet), and the steps that are left towards it."""

    version: int | None
    swaps_left: int


class Residents:
    """The records of one arena; `wake` is called, by any thread, when there is something for `answers` or `advance`."""

    def __init__(self, arena: Arena, copies: Copying, wake: Callable[[], None] = lambda: None) -> None:
        """Adopt what is resident already; records that were being loaded, and the reserve, count as absent."""
        self.arena = arena
        #: The first error of a copy.
        self.failure: SparkError | None = None
        self._copies = copies
        self._wake = wake
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._under_way = 0
        #: Copies ahead of need that are under way.
        self._ahead: dict[Record, Copy] = {}
        self._answers: list[Lend | Grant | Refuse] = []
        self._placed: int | None = None
        self._stalled = False
        #: What the workers had counted when it was looked at last; None: look again whatever they count.
        self._seen: Sequence[Steps] | None = None
        layers = [LayerSize(layer.slab, layer.experts) for layer in arena.layout.layers]
        slabs = [slab.size for slab in arena.layout.slabs]
        self._records = [Record(layer, e) for layer, size in enumerate(layers) for e in range(size.experts)]
        #: Of each expert layer: the extents of its first record, and how far those of the next one are in the file.
        self._firsts = [self._first_extents(layer) for layer in range(len(layers))]
        self._engine = Residency(layers, slabs, self._left())
        self._observe()

    # ---- for those who load ----

    def size(self, record: Record) -> int:
        """Bytes of a record in the files."""
        return sum(extent.size for extent, _ in self._firsts[record.layer])

    def absentees(self) -> list[Record]:
        """What has to be copied so that the arena is filled, in the order of the files.

        That is every record where each has a slot, else as many as there are slots for, the same of each layer.
        """
        with self._lock:
            return self._absentees()

    def fill(self) -> list[Record]:
        """Have the arena filled: first with what a placement wants, if there is one; what `absentees` has else."""
        with self._lock:
            self._observe()
            if not sum(self._engine.residents()):
                self._carry_out(self._engine.swap(len(self._records)))
            absent = self._absentees()
            self._carry_out(self._engine.admit(absent))
            self._observe()
        return absent

    def settle(self, stop: Callable[[], bool]) -> None:
        """Wait until no copy is under way, one has failed, or `stop` (looked at now and then, and after `notify`)."""
        with self._settled:
            while self._under_way and self.failure is None and not stop():
                self._settled.wait(1.0)

    def notify(self) -> None:
        """Have `settle` look at its `stop`."""
        with self._settled:
            self._settled.notify_all()

    # ---- for workers ----

    def stage(self, worker: int, records: Sequence[Record], use: Use) -> int:
        """Lease records for a part of a step; the answer comes with `answers`. ValueError: more than the reserve."""
        with self._lock:
            self._forget_foreseen(records)
            number, commands = self._engine.stage(worker, records, use)
            self._carry_out(commands)
            self._observe()
        return number

    def foresee(self, worker: int, records: Sequence[Record]) -> None:
        """A step will probably miss these next, the likeliest first: they are read while nothing else is.

        What was foreseen before and has not begun is forgotten, as it is when something is staged.
        """
        with self._lock:
            self._forget_foreseen(records)
            self._carry_out(self._engine.foresee(worker, records))
            self._observe()

    def used(self, worker: int, records: Sequence[Record], use: Use) -> None:
        """A step has ended that used these records, each named once."""
        with self._lock:
            self._engine.used(worker, records, use)
            self._observe()

    def release(self, lease: int) -> None:
        """End a lease. KeyError when there is none of this number."""
        with self._lock:
            self._carry_out(self._engine.release(lease))
            self._observe()

    def attach(self, worker: int) -> None:
        """A worker is there, and holds no lease."""
        with self._lock:
            self._seen = None
            self._carry_out(self._engine.attach(worker))
            self._observe()

    def gone(self, worker: int) -> None:
        """The process of a worker has ended."""
        with self._lock:
            self._seen = None
            self._carry_out(self._engine.gone(worker))
            self._observe()

    def answers(self) -> list[Lend | Grant | Refuse]:
        """What became of leases since the last call. When a copy of what is lent is complete, the directory says."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    # ---- as time goes by ----

    def place(self, placement: Placement) -> None:
        """Take a placement as the goal of `advance`. PlacementError when the tier cannot hold it."""
        with self._lock:
            self._engine.place(placement)
            self._placed = placement.version
            self._stalled = False

    def advance(self) -> bool:
        """Free slots that nobody can read any more, and take steps towards the placement; true: call again soon.

        A few steps at a time, and none while something else is copied that nobody waits for: what a step of a worker
        misses is read first, and hardly later than without a placement.
        """
        with self._lock:
            self._observe()
            left = 0 if self._stalled else self._engine.swaps_left()
            if left and not self._copies.backlog:
                self._carry_out(self._engine.swap(SWAPS))
                self._observe()
            return bool(left) or self._engine.draining

    # ---- for the status document ----

    def residents(self) -> list[int]:
        """Resident records of each expert layer."""
        with self._lock:
            return self._engine.residents()

    def tiers(self) -> list[str]:
        """For each expert layer a letter an expert: h (resident and hot), r (resident in the ring), or a dot."""
        with self._lock:
            hot = self._engine.hot()
            letters: list[list[str]] = [[] for _ in self.arena.layout.layers]
            for record in self._records:
                resident = self._engine.place_of(record) is not None
                letters[record.layer].append(("h" if record in hot else "r") if resident else ".")
        return ["".join(layer) for layer in letters]

    def slabs(self) -> list[SlabUse]:
        """How the slots of each slab are used."""
        with self._lock:
            return self._engine.slab_use()

    def leases(self) -> dict[int, LeaseState]:
        """How far each lease is."""
        with self._lock:
            return self._engine.leases()

    def counts(self) -> dict[Use, Counts]:
        """What steps used and missed since this store began, as far as workers told."""
        with self._lock:
            return {use: Counts(counts.uses, counts.misses) for use, counts in self._engine.counts.items()}

    def placement(self) -> PlacementState:
        """How far the placement is."""
        with self._lock:
            return PlacementState(self._placed, self._engine.swaps_left())

    # ---- inside ----

    def _left(self) -> Adopted:
        directory = self.arena.directory
        words = directory.snapshot()
        entries = {record: Entry.of(int(words[record])) for record in self._records}
        residents = {r: Place(e.slot, e.generation) for r, e in entries.items() if e.state is State.RESIDENT}
        # No filling of now may look like one of the owner before, which is complete.
        generation = max([directory.last_filling(), *(entry.generation for entry in entries.values())])
        return Adopted(residents, generation, directory.steps())

    def _absentees(self) -> list[Record]:
        layout = self.arena.layout
        rooms = self._engine.rooms()
        chosen = []
        for record in sorted(self._records, key=lambda record: (record.expert, record.layer)):
            slab = layout.layers[record.layer].slab
            if (layout.slabs[slab].full or rooms[slab] > 0) and self._engine.place_of(record) is None:
                rooms[slab] -= 1
                chosen.append(record)
        return sorted(chosen)

    def _observe(self) -> None:
        """Free what no step can read now; what is retracted for that may be free at once, if no step is running."""
        while self._engine.draining:
            steps = self.arena.directory.steps()
            if steps is self._seen and not self._engine.retiring:
                return
            self._seen = steps
            commands = self._engine.observe(steps)
            self._carry_out(commands)
            if not any(isinstance(command, Retract) for command in commands):
                return

    def _forget_foreseen(self, wanted: Iterable[Record]) -> None:
        for record in self._ahead.keys() - set(wanted):
            copy = self._ahead[record]
            if self._copies.withdraw(self._key(copy)):
                del self._ahead[record]
                self._under_way -= 1
                if not copy.reserve:
                    self._set(record, State.ABSENT, copy.place)
                self._carry_out(self._engine.failed(copy, "given up"))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        commands = list(commands)
        directory = self.arena.directory
        hurried = {command.copy for command in commands if isinstance(command, Hurry)}
        withdrawn = []
        for command in commands:
            match command:
                case Copy(record, _, place, reserve, _, ahead):
                    if not reserve:
                        self._set(record, State.LOADING, place)
                    self._under_way += 1
                    ended = functools.partial(self._ended, command)
                    need = Need.NOW if (reserve and not ahead) or command in hurried else Need.NONE
                    if ahead:
                        need = Need.SOON
                        self._ahead[record] = command
                    told = directory.told_at(self._number(command), place.generation)
                    self._copies.begin(self._key(command), self._work(command), ended, need, told)
                case Hurry(copy):
                    self._ahead.pop(copy.record, None)
                    self._copies.hurry(self._key(copy))
                case Cancel(copy):
                    if not copy.reserve:
                        self._set(copy.record, State.ABSENT, copy.place)
                    if self._copies.withdraw(self._key(copy)):
                        withdrawn.append(copy)
                case Publish(record, place):
                    self._set(record, State.RESIDENT, place)
                case Retract(record, place):
                    self._set(record, State.ABSENT, place)
                case Lend() | Grant() | Refuse():
                    self._answers.append(command)
        for copy in withdrawn:
            self._under_way -= 1
            self._carry_out(self._engine.failed(copy, "given up"))

    def _ended(self, copy: Copy, error: SparkError | None) -> None:
        """A copy has ended (in one of the copier's threads)."""
        with self._settled:
            self._under_way -= 1
            self._ahead.pop(copy.record, None)
            if error is None:
                # While the slot cannot be given to another.
                self.arena.directory.filled(self._number(copy), copy.place.generation)
                self._carry_out(self._engine.copied(copy))
                self._carry_out(self._engine.publish())
            else:
                self._failed(copy, error)
            self._observe()
            if not self._under_way or self.failure is not None:
                self._settled.notify_all()
            due = bool(self._answers) or self._engine.swaps_left() > 0
        if due:
            self._wake()

    def _failed(self, copy: Copy, error: SparkError) -> None:
        if self.failure is None:
            _log.warning("expert %d of expert layer %d: %s", copy.record.expert, copy.record.layer, error)
            self.failure = error
        self._stalled = True
        directory = self.arena.directory
        if not copy.reserve and directory.entry(*copy.record) == _entry(State.LOADING, copy.place):
            self._set(copy.record, State.ABSENT, copy.place)
        self._carry_out(self._engine.failed(copy, str(error)))

    def _work(self, copy: Copy) -> list[Extent]:
        layout, layer = self.arena.layout, copy.record.layer
        target = layout.record(layer, copy.place.slot)
        if copy.source is not None:
            source = layout.record(layer, copy.source.slot)
            return [Extent(IN_ARENA, source, target, layout.slabs[copy.slab].record_bytes)]
        expert = copy.record.expert
        return [
            Extent(first.shard, first.source + expert * stride, target + first.target, first.size)
            for first, stride in self._firsts[layer]
        ]

    def _first_extents(self, layer: int) -> list[tuple[Extent, int]]:
        arena = self.arena
        of = functools.partial(
            record_extents, arena.program.expert_layers[layer], arena.layout.layers[layer], arena.model
        )
        second = of(min(1, arena.layout.layers[layer].experts - 1))
        return [(first, after.source - first.source) for first, after in zip(of(0), second, strict=True)]

    def _number(self, copy: Copy) -> int:
        """Of the slot that is copied to, among those of all slabs."""
        return self.arena.layout.slot_number(copy.slab, copy.place.slot)

    @staticmethod
    def _key(copy: Copy) -> Hashable:
        return copy.slab, copy.place

    def _set(self, record: Record, state: State, place: Place) -> None:
        self.arena.directory.publish(record.layer, record.expert, _entry(state, place))


def _entry(state: State, place: Place) -> Entry:
    return Entry(state, place.generation, place.slot)
