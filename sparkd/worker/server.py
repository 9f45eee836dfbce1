"""The worker at work: messages in, one step at a time, results out.

    waiting for the store ──Attached──► building ──► waiting for weights ──all that must be there──► serving

Text work has a thread of its own (`Desk`), heartbeats have theirs (`Child`); everything else happens here, between two
steps: a cancelled request costs one more step at most.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from sparkd.config import Settings
from sparkd.errors import UnavailableError
from sparkd.executors.device import Device
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.ipc.child import Child, ChildArguments
from sparkd.ipc.internal import (
    Abort,
    Attach,
    Attached,
    Decode,
    Done,
    Encode,
    Placement,
    Ready,
    Reconfigure,
    Run,
    StatusAnswer,
    StatusQuery,
)
from sparkd.ipc.memory import Region
from sparkd.ipc.messages import Json, Message, Timings
from sparkd.ipc.routing import Routed, RoutingRing
from sparkd.ipc.sockets import Channel
from sparkd.models import build_program
from sparkd.store.arena import Arena
from sparkd.worker.backend import Backend, NativeBackend
from sparkd.worker.desk import Desk, Prepare, Texts
from sparkd.worker.engine import Engine, Routing
from sparkd.worker.limits import Room
from sparkd.worker.scheduler import Scheduler
from sparkd.worker.sequences import Sequence
from sparkd.worker.state import PoolSize, StatePool

_log = logging.getLogger(__name__)

#: This worker's place among the step counters of the directory.
_WORKER = 0
_IDLE_S = 5.0
_POLL_S = 0.05
#: The wait where something goes on beside steps.
_SOON_S = 0.005
#: Seconds without anything to do after which this worker makes itself ready for texts.
_QUIET_S = 0.5


@dataclass(frozen=True, slots=True)
class Parts:
    """What exists once the model is known."""

    model: str
    arena: Arena
    texts: Texts
    size: PoolSize
    pool: StatePool
    scheduler: Scheduler
    engine: Engine
    backend: Backend


class WorkerServer:
    """One worker: waits for weights, then serves until told to stop."""

    def __init__(self, child: Child, given: ChildArguments) -> None:
        """Map the arena and the routing ring, link to the store."""
        self._child = child
        self._settings = Settings.from_json(given.settings)
        self._region = Region.map(given.arena_fd)
        self._store = Channel.dealer(child.context, given.run_dir.store, watched=True)
        #: The way to the calibrator; None where there is none.
        self._ring = None if given.routing_fd == -1 else RoutingRing(Region.map(given.routing_fd))
        self._desk: Desk | None = None
        self._parts: Parts | None = None
        #: Requests that were aborted while the desk still has them.
        self._dropped: set[int] = set()
        self._at_desk: set[int] = set()

    def run(self) -> None:
        """Attach, build, wait for the weights, serve. SparkError when the model cannot be run."""
        attached = self._attach()
        if attached is None:
            return
        arena = Arena.attach(self._region, self._build_program)
        texts = Texts(arena.model.metadata, self._room(arena.program), arena.program.vocab)
        self._desk = Desk(self._child.context, texts)
        if not self._wait_for_weights(arena):
            return
        self._parts = self._build(attached.model, arena, texts)
        _log.info("computes: %s", self._parts.backend.line())
        self._child.send(Ready(self._child.role, self._status()))
        self._serve(self._desk, self._parts)

    def close(self) -> None:
        """End the threads and the links."""
        if self._parts is not None:
            self._parts.backend.close()
        if self._desk is not None:
            self._desk.close()
        self._store.close()

    # ---- until ready ----

    def _attach(self) -> Attached | None:
        """The store's answer; None when told to stop before it came."""
        self._store.send(Attach(_WORKER, ""))
        while self._child.running:
            self._answer_queries(_IDLE_S, self._store)
            answer = self._store.receive()
            if isinstance(answer, Attached):
                if answer.error is not None:
                    raise UnavailableError(answer.error)
                return answer
        return None

    def _wait_for_weights(self, arena: Arena) -> bool:
        """True once all is there that no step can wait for: core, and every record unless some have no slot.

        False when told to stop before.
        """
        records = sum(layer.experts for layer in arena.program.expert_layers)
        while self._child.running:
            if arena.core_loaded and (arena.layout.partial or sum(arena.directory.residents()) == records):
                return True
            self._answer_queries(_POLL_S)
        return False

    def _answer_queries(self, seconds: float, *channels: Channel) -> None:
        for msg in self._child.wait(seconds, *(c.socket for c in channels)):
            if isinstance(msg, StatusQuery):
                self._child.send(StatusAnswer(msg.job, self._child.role, self._status()))
            else:
                raise RuntimeError(f"{type(msg).__name__} came before this worker was ready")

    def _build_program(self, model: ModelFile) -> Program:
        return build_program(model, self._settings.numerics.yarn)

    def _room(self, program: Program) -> Room:
        return Room(min(self._settings.limits.context, program.context), program.context)

    def _build(self, model: str, arena: Arena, texts: Texts) -> Parts:
        settings, program = self._settings, arena.program
        layout = StateLayout.of(program, 2 if settings.kv.type == "f16" else 4)
        sequences, positions = settings.limits.sequences, self._room(program).positions
        size_for = functools.partial(PoolSize.worst_case, layout, sequences, positions)
        backend = self._open_backend(model, arena, layout, size_for)
        pool = StatePool(layout, backend.size, backend.rows)
        scheduler = Scheduler(
            backend.rows,
            settings.scheduler.max_step_ms / 1000,
            least_rows=backend.least_rows,
            alone_whole=arena.layout.partial or settings.worker.device == "cuda",
        )
        engine = Engine(
            backend.executor,
            pool,
            scheduler,
            texts.tokenizer.end_of_generation_ids,
            settings.limits.sequences,
            vocab=texts.vocab,
            steps=arena.directory.step_counter(_WORKER),
            routed=self._report_routing,
        )
        return Parts(model, arena, texts, backend.size, pool, scheduler, engine, backend)

    def _open_backend(
        self, model: str, arena: Arena, layout: StateLayout, size_for: Callable[[int], PoolSize]
    ) -> Backend:
        settings, child = self._settings, self._child
        if settings.worker.device == "cuda":
            from sparkd.worker.device_backend import DeviceBackend

            context = self._room(arena.program).positions
            return DeviceBackend(open_device(), model, settings, arena, layout, size_for, context, child.wake)
        return NativeBackend(settings, arena, layout, size_for, self._store, _WORKER, child.went_on)

    # ---- serving ----

    def _serve(self, desk: Desk, parts: Parts) -> None:
        child, engine, backend, patience = self._child, parts.engine, parts.backend, _QUIET_S
        soon = backend.advance()
        while child.running:
            for tier in backend.tiers():
                child.send(tier)
            msgs = child.wait(0.0 if engine.busy else _SOON_S if soon else patience, desk.woken)
            results = desk.take()
            if patience == _QUIET_S and not (engine.busy or msgs or results or soon):
                desk.put(Prepare())
                patience = _IDLE_S
            for msg in msgs:
                self._take(msg, desk, parts)
            for result in results:
                self._take_result(result, engine)
            if engine.busy:
                self._send(engine.step())
            soon = backend.advance()

    def _take(self, msg: Message, desk: Desk, parts: Parts) -> None:
        match msg:
            case Run():
                self._at_desk.add(msg.request)
                desk.put(msg)
            case Encode() | Decode():
                desk.put(msg)
            case Abort() if msg.request in self._at_desk:
                self._at_desk.discard(msg.request)
                self._dropped.add(msg.request)
                nothing = Timings(0.0, 0.0, 0.0)
                self._child.send(Done(msg.request, "cancelled", None, "", 0, 0, 0, nothing))
            case Abort():
                self._send(parts.engine.abort(msg.request))
            case Placement():
                parts.backend.place(msg)
            case Reconfigure():
                parts.scheduler.max_step_s = Settings.from_json(msg.settings).scheduler.max_step_ms / 1000
            case StatusQuery():
                self._child.send(StatusAnswer(msg.job, self._child.role, self._status()))
            case _:
                raise RuntimeError(f"a worker takes no {type(msg).__name__}")

    def _take_result(self, result: Message | Sequence, engine: Engine) -> None:
        request = getattr(result, "request", None)
        if request in self._dropped:
            self._dropped.discard(request)
            return
        self._at_desk.discard(request)
        if isinstance(result, Sequence):
            engine.submit(result)
        else:
            self._child.send(result)

    def _send(self, msgs: list[Message]) -> None:
        for msg in msgs:
            self._child.send(msg)

    def _report_routing(self, routing: Routing) -> None:
        """Hand a step's routing to the calibrator, or drop it whole and count that: decoding never waits for it.

        Whoever brings records is told as well.
        """
        assert self._parts is not None
        self._parts.backend.used(routing)
        if self._ring is not None:
            _, rows, top_k = routing.ids.shape
            ids = np.ascontiguousarray(routing.ids, "<i2").tobytes()
            kinds = bytes(map(self._ring.kind, routing.decode.tolist(), routing.tags))
            self._ring.push(Routed(routing.step, rows, top_k, kinds, ids))

    # ---- status ----

    def _status(self) -> dict[str, Json]:
        """This worker's part of the status document (docs/status.md)."""
        parts = self._parts
        if parts is None:
            return {}
        engine, layout = parts.engine, parts.pool.layout
        return {
            "state_bytes": parts.size.bytes(layout),
            "state_used_bytes": parts.pool.used_bytes(),
            "running": engine.running,
            "speed": {
                "prefill_tokens_s": engine.prefill.per_second,
                "decode_tokens_s": engine.decode.per_second,
                "steps": engine.counts.steps,
                "chunk_rows": engine.chunk_rows,
            },
            "chat": parts.texts.chat,
            **parts.backend.status(),
        }


def open_device() -> Device:
    """The GPU. DeviceError where there is none."""
    from sparkd.executors.cuda_device import CudaDevice

    # Its streams and events are its own kind, and nobody gives it others.
    return cast(Device, CudaDevice())
