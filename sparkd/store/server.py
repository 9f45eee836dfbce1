"""The store at work: threads fill the arena and fetch what steps miss, one answers supervisor and workers."""

from __future__ import annotations

import logging
import threading

from sparkd.config import Settings
from sparkd.errors import ModelFileError
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.ipc.child import Child, ChildArguments
from sparkd.ipc.internal import ChildProgress, Placement, Ready, StatusAnswer, StatusQuery
from sparkd.ipc.memory import Region
from sparkd.ipc.messages import Message, MessageError
from sparkd.ipc.sockets import PeerGone, PeerSlow, Router
from sparkd.models import build_program
from sparkd.store.arena import Arena
from sparkd.store.copier import Copier
from sparkd.store.layout import ArenaLayout, told_tier
from sparkd.store.loader import LoadCancelled, Loader
from sparkd.store.plan import model_name, open_model
from sparkd.store.residents import Residents
from sparkd.store.service import TIER, StoreService

#: Seconds between progress messages while loading, and the longest wait after that.
_PROGRESS_S = 0.1
_IDLE_S = 5.0
#: The wait where slots become free as steps end, or a placement is not reached.
_SOON_S = 0.02
_log = logging.getLogger(__name__)


class StoreServer:
    """The parts of one store and the loop that drives them."""

    def __init__(self, child: Child, given: ChildArguments) -> None:
        """Lay out or adopt the arena and bind the socket. SparkError when the model is not what was planned."""
        self._child = child
        self._region = Region.map(given.arena_fd)
        arena = open_arena(self._region, Settings.from_json(given.settings), given.fingerprint)
        self._arena = arena
        self._copier = Copier(arena)
        self._residents = Residents(arena, self._copier, child.wake)
        self._loader = Loader(self._residents, self._copier)
        self._service = StoreService(self._residents, self._loader, self._copier, model_name(arena.model))
        self._router = Router(child.context, given.run_dir.store)
        self._failure: BaseException | None = None
        self._loading = threading.Thread(target=self._load, name="load")

    def run(self) -> None:
        """Serve until told to stop, or until loading fails (SparkError)."""
        self._loading.start()
        self._child.watch(lambda: self._loader.done)
        if self._arena.layout.partial:
            # Told before the load: a placement that comes in time is loaded first.
            self._child.send(told_tier(TIER, self._service.model, self._arena.layout))
        ready = False
        patience = _PROGRESS_S
        while self._child.running:
            for msg in self._child.wait(patience, self._router.socket):
                self._heed(msg)
            self._answer_workers()
            self._grant()
            soon = self._residents.advance()
            patience = _SOON_S if soon else _IDLE_S
            self._grant()
            if not ready:
                ready = self._report_loading()
                patience = min(patience, _PROGRESS_S)
            if self._copier.failure is not None:
                raise self._copier.failure

    def close(self) -> None:
        """Stop loading, close the socket."""
        self._loader.cancel()
        if self._loading.ident is not None:
            self._loading.join()
        self._copier.close()
        self._router.close()

    def _heed(self, msg: Message) -> None:
        match msg:
            case StatusQuery():
                self._child.send(StatusAnswer(msg.job, self._child.role, self._service.status()))
            case Placement():
                self._service.place(msg)

    def _load(self) -> None:
        try:
            self._loader.load()
        except LoadCancelled:
            pass
        except BaseException as error:
            self._failure = error

    def _report_loading(self) -> bool:
        """Tell the supervisor how far loading is; true once everything is in place."""
        loading = self._loading.is_alive()
        if self._failure is not None:
            raise self._failure
        child, loader = self._child, self._loader
        child.send(ChildProgress(child.role, "load", loader.done, loader.total, "bytes"))
        if not loading:
            child.watch(None)
            child.send(Ready(child.role, self._service.status()))
        return not loading

    def _answer_workers(self) -> None:
        while True:
            try:
                received = self._router.receive()
                if received is None:
                    return
                self._answer(*received)
            except MessageError as error:
                _log.warning("dropped a message of a worker: %s", error)

    def _grant(self) -> None:
        for peer, reply in self._service.granted():
            self._send(peer, reply)

    def _answer(self, peer: bytes, msg: Message) -> None:
        reply = self._service.answer(peer, msg)
        if reply is not None:
            self._send(peer, reply)

    def _send(self, peer: bytes, reply: Message) -> None:
        try:
            self._router.send(peer, reply)
        except PeerGone as error:
            _log.warning("%s", error)
            self._service.drop(peer)
        except PeerSlow as error:
            _log.warning("%s", error)
            self._service.unsent(reply)


def open_arena(region: Region, settings: Settings, fingerprint: str = "") -> Arena:
    """Adopt the arena in the region, or lay one out. SparkError when the model is not what the region was made for.

    `fingerprint` is that of the model it was made for, if that is known.
    """

    def build(model: ModelFile) -> Program:
        return build_program(model, settings.numerics.yarn)

    if Arena.present(region):
        arena = Arena.attach(region, build)
        _check_planned(arena.model, fingerprint)
        return arena
    model, program = open_model(settings)
    _check_planned(model, fingerprint)
    layout = ArenaLayout.within(program, model, region.size)
    if layout.total_bytes != region.size:
        raise ModelFileError(
            f"changed since the start: needs an arena of {layout.total_bytes} bytes now, {region.size} were planned",
            where=model.where,
            fix="restart the daemon",
        )
    return Arena.create(region, model, program, layout)


def _check_planned(model: ModelFile, fingerprint: str) -> None:
    if fingerprint not in ("", model.fingerprint):
        what = f"changed since the start: its headers have the fingerprint {model.fingerprint} now, not {fingerprint}"
        raise ModelFileError(what, where=model.where, fix="restart the daemon")
