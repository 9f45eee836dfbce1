"""What the store answers: attach, stage, release, and its part of the status document."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import numpy as np

from sparkd.ipc import internal
from sparkd.ipc.directory import WORKERS
from sparkd.ipc.internal import Attach, Attached, Foreseen, Release, Stage, Staged, Used
from sparkd.ipc.messages import Json, Message, MessageError
from sparkd.residency.commands import Grant, Lend, Refuse
from sparkd.residency.leases import Use
from sparkd.residency.placement import Placement, PlacementError
from sparkd.residency.slots import Record
from sparkd.store.copier import Copier
from sparkd.store.layout import VERSION
from sparkd.store.loader import Loader
from sparkd.store.residents import Residents

#: The name of this tier in placements.
TIER = "host"
_USES = {use.value: use for use in Use}
#: Leases one worker may hold.
MAX_LEASES = 4096
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    peer: bytes
    batch: int
    told: bool = False


class StoreService:
    """Answers workers; `model` is the name that stands in their messages.

    What is staged is leased: by the residency engine, until it is released or its worker is gone.
    """

    def __init__(self, residents: Residents, loader: Loader, copier: Copier, model: str) -> None:
        self._residents = residents
        self._arena = residents.arena
        self._loader = loader
        self._copier = copier
        self._refused = ""
        self.model = model
        self._records = sum(layer.experts for layer in self._arena.layout.layers)
        self._workers: dict[int, bytes] = {}
        self._leases: dict[int, _Asked] = {}
        self._staged = 0

    def answer(self, peer: bytes, msg: Message) -> Message | None:
        """The reply to a worker's message, None where none is due yet. MessageError: the store takes no such message.

        What is staged is answered by `granted`, at once or when it is there.
        """
        match msg:
            case Attach():
                return self._attach(peer, msg)
            case Stage():
                return self._stage(peer, msg)
            case Release():
                asked = self._leases.get(msg.lease)
                if asked is None or asked.peer != peer:
                    raise MessageError(f"release of lease {msg.lease}, which is not held by this worker")
                self._release(msg.lease)
                return None
            case Foreseen():
                self._foreseen(peer, msg)
                return None
            case Used():
                self._used(peer, msg)
                return None
        raise MessageError(f"the store takes no {type(msg).__name__}")

    def granted(self) -> list[tuple[bytes, Staged]]:
        """Answers to what was staged that are due now, and for whom. Of what is refused after it was lent, another."""
        due = []
        for answer in self._residents.answers():
            asked = self._leases.get(answer.lease)
            if asked is None:
                continue  # over before it could be told: released by another answer, or its worker attached again
            match answer:
                case Lend(lease, places) | Grant(lease, places):
                    if asked.told:
                        continue
                    asked.told = True
                    slots, generations = [p.slot for p in places], [p.generation for p in places]
                    staged = Staged(asked.batch, lease, slots, generations)
                    self._staged += len(places)
                case Refuse(lease, record, reason):
                    del self._leases[lease]
                    where = f"expert {record.expert} of expert layer {record.layer}"
                    error = f"{where} cannot be had: {reason}"[:500]
                    staged = Staged(asked.batch, 0, [], [], error, [record.layer, record.expert])
            due.append((asked.peer, staged))
        return due

    def place(self, msg: internal.Placement) -> None:
        """Take a placement as the goal of swaps; one that cannot be is refused, with a reason in log and status."""
        error = self._wrong_model(msg.model)
        if msg.tier != TIER:
            error = f"a placement for tier {msg.tier!r}, this is {TIER!r}"[:500]
        try:
            if error is None:
                self._residents.place(Placement(msg.version, msg.hot, msg.ring, msg.half_life))
        except PlacementError as problem:
            error = str(problem)
        self._refused = "" if error is None else f"placement {msg.version}: {error}"
        if self._refused:
            _log.warning("refused %s", self._refused)

    def unsent(self, msg: Message) -> None:
        """A reply did not reach its worker, which lives: it will not release what it does not know of."""
        if isinstance(msg, Staged) and msg.lease in self._leases:
            self._release(msg.lease)

    def drop(self, peer: bytes) -> None:
        """A worker is gone, and its leases with it."""
        for worker in [worker for worker, known in self._workers.items() if known == peer]:
            self._forget(worker)
            self._residents.gone(worker)

    def status(self) -> dict[str, Json]:
        """Sizes in bytes; residents per expert layer."""
        layout = self._arena.layout
        residents = self._residents.residents()
        return {
            "model": self.model,
            "fingerprint": self._arena.model.fingerprint,
            "arena_bytes": layout.total_bytes,
            "core_bytes": layout.core_bytes,
            "records_bytes": layout.records_bytes,
            "core_loaded": self._arena.core_loaded,
            "records": self._records,
            "resident": sum(residents),
            "layers": [
                {"records": layer.experts, "resident": resident, "experts": tiers}
                for layer, resident, tiers in zip(layout.layers, residents, self._residents.tiers(), strict=True)
            ],
            "slabs": [
                {"record_bytes": slab.record_bytes, "spare": slab.size.spare, **dataclasses.asdict(use)}
                for slab, use in zip(layout.slabs, self._residents.slabs(), strict=True)
            ],
            "bytes_loaded": self._loader.done,
            "bytes_total": self._loader.total,
            "bytes_read": self._copier.read,
            "reading": list(self._copier.reading),
            "read_bytes": max(self._copier.read - self._loader.missing, 0),
            "moved_bytes": self._copier.moved,
            "uses": {use.value: dataclasses.asdict(counts) for use, counts in self._residents.counts().items()},
            "placement": {**dataclasses.asdict(self._residents.placement()), "refused": self._refused},
            "leases": len(self._leases),
            "staged": self._staged,
        }

    def _attach(self, peer: bytes, msg: Attach) -> Attached:
        arena = self._arena
        error = self._wrong_model(msg.model)
        if not 0 <= msg.worker < WORKERS:
            error = f"no worker {msg.worker}: their numbers go to {WORKERS - 1}"
        if error is None:
            before = self._workers.get(msg.worker)
            if before is not None and before != peer:
                self.drop(before)
            self._forget(msg.worker)
            self._workers[msg.worker] = peer
            self._residents.attach(msg.worker)
        return Attached(
            model=self.model,
            fingerprint=arena.model.fingerprint,
            layout_version=VERSION,
            arena_bytes=arena.layout.total_bytes,
            resident=sum(self._residents.residents()),
            records=self._records,
            partial=arena.layout.partial,
            error=error,
        )

    def _stage(self, peer: bytes, msg: Stage) -> Staged | None:
        error = self._wrong_model(msg.model) or self._wrong_records(msg.records)
        worker = self._worker(peer)
        use = _USES.get(msg.use)
        if error is None and use is None:
            error = f"records are staged for {' or '.join(_USES)}, not for {msg.use!r}"[:500]
        if error is None and worker is None:
            error = "a worker attaches before it stages"
        if error is None and sum(asked.peer == peer for asked in self._leases.values()) >= MAX_LEASES:
            error = f"this worker holds {MAX_LEASES} leases already"
        if error is not None or worker is None or use is None:
            return Staged(msg.batch, 0, [], [], error)
        try:
            lease = self._residents.stage(worker, [Record(*record) for record in msg.records], use)
        except ValueError as problem:
            return Staged(msg.batch, 0, [], [], str(problem))
        self._leases[lease] = _Asked(peer, msg.batch)
        return None

    def _foreseen(self, peer: bytes, msg: Foreseen) -> None:
        worker = self._worker(peer)
        if worker is None:
            raise MessageError("a worker attaches before it tells what it foresees")
        if error := self._wrong_records(msg.records):
            raise MessageError(error)
        self._residents.foresee(worker, [Record(*record) for record in msg.records])

    def _used(self, peer: bytes, msg: Used) -> None:
        worker = self._worker(peer)
        if worker is None:
            raise MessageError("a worker attaches before it tells what it used")
        named = [(self._named(bits, use), use) for bits, use in ((msg.decode, Use.DECODE), (msg.prefill, Use.PREFILL))]
        for records, use in named:
            if records:
                self._residents.used(worker, records, use)

    def _named(self, bits: bytes, use: Use) -> list[Record]:
        """The records that a bitset over the directory's words names. MessageError: it names what is not there."""
        directory, layers = self._arena.directory, self._arena.layout.layers
        if len(bits) > -(-directory.layers * directory.experts // 8):
            raise MessageError(f"used.{use.value}: {len(bits)} bytes, more than the directory has words for")
        words = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
        records = [Record(*divmod(word, directory.experts)) for word in words.tolist()]
        for record in records:
            if record.layer >= len(layers) or record.expert >= layers[record.layer].experts:
                raise MessageError(f"used.{use.value}: no expert {record.expert} in expert layer {record.layer}")
        return records

    def _release(self, lease: int) -> None:
        del self._leases[lease]
        self._residents.release(lease)

    def _worker(self, peer: bytes) -> int | None:
        return next((worker for worker, known in self._workers.items() if known == peer), None)

    def _forget(self, worker: int) -> None:
        """Before the engine is told that a worker's leases are over."""
        peer = self._workers.pop(worker, None)
        self._leases = {number: asked for number, asked in self._leases.items() if asked.peer != peer}

    def _wrong_model(self, name: str) -> str | None:
        return None if name in ("", self.model) else f"model {name!r} is not served here, {self.model!r} is"[:500]

    def _wrong_records(self, records: list[list[int]]) -> str | None:
        layers = self._arena.layout.layers
        for record in records:
            if len(record) != 2:
                return f"a record is [expert layer, expert], found {len(record)} numbers"
            layer, expert = record
            if not 0 <= layer < len(layers):
                return f"no expert layer {layer}: the model has {len(layers)}"
            if not 0 <= expert < layers[layer].experts:
                return f"no expert {expert} in expert layer {layer}: it has {layers[layer].experts}"
        return None
