"""What the store answers: attach, stage, release, and its part of the status document."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.ipc.directory import State
from sparkd.ipc.messages import Attach, Attached, Json, Message, MessageError, Release, Stage, Staged
from sparkd.store.arena import Arena
from sparkd.store.layout import VERSION
from sparkd.store.loader import Loader

#: Leases one worker may hold.
MAX_LEASES = 4096


@dataclass(frozen=True, slots=True)
class _Lease:
    peer: bytes
    records: int


class StoreService:
    """Answers workers; `model` is the name that stands in their messages.

    All records are resident once loaded, so a lease keeps nothing from being evicted yet: it is counted, and dropped
    with its worker.
    """

    def __init__(self, arena: Arena, loader: Loader, model: str) -> None:
        self._arena = arena
        self._loader = loader
        self._model = model
        self._records = sum(layer.experts for layer in arena.layout.layers)
        self._workers: dict[int, bytes] = {}
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0
        self._staged = 0

    def answer(self, peer: bytes, msg: Message) -> Message | None:
        """The reply to a worker's message, None where none is due. MessageError: the store takes no such message."""
        match msg:
            case Attach():
                return self._attach(peer, msg)
            case Stage():
                return self._stage(peer, msg)
            case Release():
                lease = self._leases.get(msg.lease)
                if lease is None or lease.peer != peer:
                    raise MessageError(f"release of lease {msg.lease}, which is not held by this worker")
                del self._leases[msg.lease]
                return None
        raise MessageError(f"the store takes no {type(msg).__name__}")

    def drop(self, peer: bytes) -> None:
        """Forget the leases of a worker that is gone."""
        self._leases = {number: lease for number, lease in self._leases.items() if lease.peer != peer}

    def status(self) -> dict[str, Json]:
        """Sizes in bytes; residents per expert layer."""
        layout = self._arena.layout
        residents = self._arena.directory.residents()
        return {
            "model": self._model,
            "fingerprint": self._arena.model.fingerprint,
            "arena_bytes": layout.total_bytes,
            "core_bytes": layout.core_bytes,
            "records_bytes": layout.records_bytes,
            "core_loaded": self._arena.core_loaded,
            "records": self._records,
            "resident": sum(residents),
            "layers": [
                {"records": layer.experts, "resident": resident}
                for layer, resident in zip(layout.layers, residents, strict=True)
            ],
            "slabs": [{"record_bytes": slab.record_bytes, "slots": slab.slots} for slab in layout.slabs],
            "bytes_loaded": self._loader.done,
            "bytes_total": self._loader.total,
            "bytes_read": self._loader.read,
            "leases": len(self._leases),
            "staged": self._staged,
        }

    def _attach(self, peer: bytes, msg: Attach) -> Attached:
        before = self._workers.get(msg.worker)
        if before is not None:
            self.drop(before)
        self._workers[msg.worker] = peer
        arena = self._arena
        return Attached(
            model=self._model,
            fingerprint=arena.model.fingerprint,
            layout_version=VERSION,
            arena_bytes=arena.layout.total_bytes,
            resident=sum(arena.directory.residents()),
            records=self._records,
            error=self._wrong_model(msg.model),
        )

    def _stage(self, peer: bytes, msg: Stage) -> Staged:
        error = self._wrong_model(msg.model) or self._wrong_records(msg.records)
        if error is None and sum(lease.peer == peer for lease in self._leases.values()) >= MAX_LEASES:
            error = f"this worker holds {MAX_LEASES} leases already"
        if error is None:
            entries = [self._arena.directory.entry(layer, expert) for layer, expert in msg.records]
            absent = sum(entry.state is not State.RESIDENT for entry in entries)
            error = f"{absent} of {len(entries)} records are still being loaded" if absent else None
        if error is not None:
            return Staged(msg.batch, 0, [], [], error)
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(peer, len(entries))
        self._staged += len(entries)
        return Staged(msg.batch, self._last_lease, [e.slot for e in entries], [e.generation for e in entries])

    def _wrong_model(self, name: str) -> str | None:
        return None if name in ("", self._model) else f"model {name!r} is not served here, {self._model!r} is"[:500]

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
