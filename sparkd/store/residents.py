"""The host tier: what the residency engine decides, carried out on the arena's directory.

The threads that load and the one that answers workers share it: while the engine decides and its commands are carried
out, each waits for the other. A record that is complete is published at once: a word is replaced as a whole, and its
readers may look at it at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from sparkd.ipc.directory import Entry, State
from sparkd.residency.commands import Cancel, Command, Copy, Grant, Publish, Refuse, Retract
from sparkd.residency.leases import LeaseState, Use
from sparkd.residency.slabs import LayerSize, SlabUse
from sparkd.residency.slots import Place, Record
from sparkd.residency.transfers import Adopted, Residency
from sparkd.store.arena import Arena


class Residents:
    """The records of one arena. Every slab has a slot for each of its records, so nothing is ever evicted."""

    def __init__(self, arena: Arena) -> None:
        """Adopt what is resident already; records that were being loaded count as absent."""
        self.arena = arena
        self._lock = threading.Lock()
        self._copies: list[Copy] = []
        self._answers: list[Grant | Refuse] = []
        layers = [LayerSize(layer.slab, layer.experts) for layer in arena.layout.layers]
        slabs = [slab.size for slab in arena.layout.slabs]
        self._records = [Record(layer, e) for layer, size in enumerate(layers) for e in range(size.experts)]
        self._engine = Residency(layers, slabs, self._left())

    # ---- for those who load ----

    def fill(self) -> list[Copy]:
        """What has to be copied so that every record is resident, layer by layer."""
        with self._lock:
            absent = [record for record in self._records if self._engine.place_of(record) is None]
            self._carry_out(self._engine.admit(absent))
            self._observe()
            copies, self._copies = self._copies, []
        if len(copies) != len(absent):
            raise RuntimeError(f"{len(copies)} of {len(absent)} absent records found a slot")
        return sorted(copies, key=lambda copy: copy.record)

    def copied(self, copy: Copy) -> None:
        """The record is in its slot: publish it."""
        with self._lock:
            self._carry_out(self._engine.copied(copy))
            self._carry_out(self._engine.publish())

    def failed(self, copy: Copy, reason: str) -> None:
        """The record could not be copied: its slot is free again."""
        with self._lock:
            self._set(copy.record, State.ABSENT, copy.place)
            self._carry_out(self._engine.failed(copy, reason))

    # ---- for workers ----

    def stage(self, worker: int, records: Sequence[Record], use: Use) -> int:
        """Lease records for a part of a step; the answer comes with `answers`. ValueError: more than the reserve."""
        with self._lock:
            number, commands = self._engine.stage(worker, records, use)
            self._carry_out(commands)
            self._observe()
        return number

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
            self._carry_out(self._engine.attach(worker))
            self._observe()

    def gone(self, worker: int) -> None:
        """The process of a worker has ended."""
        with self._lock:
            self._carry_out(self._engine.gone(worker))
            self._observe()

    def answers(self) -> list[Grant | Refuse]:
        """What became of leases since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    # ---- for the status document ----

    def residents(self) -> list[int]:
        """Resident records of each expert layer."""
        with self._lock:
            return self._engine.residents()

    def slabs(self) -> list[SlabUse]:
        """How the slots of each slab are used."""
        with self._lock:
            return self._engine.slab_use()

    def leases(self) -> dict[int, LeaseState]:
        """How far each lease is."""
        with self._lock:
            return self._engine.leases()

    # ---- inside ----

    def _left(self) -> Adopted:
        directory = self.arena.directory
        words = directory.snapshot()
        entries = {record: Entry.of(int(words[record])) for record in self._records}
        residents = {r: Place(e.slot, e.generation) for r, e in entries.items() if e.state is State.RESIDENT}
        generation = max((entry.generation for entry in entries.values()), default=0)
        return Adopted(residents, generation, directory.steps())

    def _observe(self) -> None:
        self._carry_out(self._engine.observe(self.arena.directory.steps()))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Copy(record, _, place, reserve):
                    if not reserve:
                        self._set(record, State.LOADING, place)
                    self._copies.append(command)
                case Publish(record, place):
                    self._set(record, State.RESIDENT, place)
                case Retract(record, place):
                    self._set(record, State.ABSENT, place)
                case Grant() | Refuse():
                    self._answers.append(command)
                case Cancel():
                    raise RuntimeError(f"{command}: nothing that is loaded is ever given up")

    def _set(self, record: Record, state: State, place: Place) -> None:
        self.arena.directory.publish(record.layer, record.expert, Entry(state, place.generation, place.slot))
