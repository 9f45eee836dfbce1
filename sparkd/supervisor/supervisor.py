"""The supervisor at work: one loop over the client socket, the children's socket, child exits and signals.

    starting ──first child says hello──► loading ──all ready──► ready ◄──► degraded
        └──────────────┴──── signal, or a child that cannot begin ──┴─────────┴────► stopping ──► end

Everything that decides is elsewhere and without I/O (`FrontDoor`, `Children`, `Rounds`); here messages are carried
between them. The loop never waits for a child.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from sparkd.config import Settings
from sparkd.errors import SparkError
from sparkd.ipc import messages as m
from sparkd.ipc.memory import Region
from sparkd.ipc.messages import Message
from sparkd.ipc.sockets import CLIENT_MODE, Malformed, PeerGone, PeerSlow, Router, RunDirectory
from sparkd.store.planned import Plan
from sparkd.supervisor import status
from sparkd.supervisor.admission import Served
from sparkd.supervisor.children import ChildProcess, Children, Condition
from sparkd.supervisor.front_door import FrontDoor
from sparkd.supervisor.memlock import MemoryLock
from sparkd.supervisor.notify import Notifier

#: Longest wait for something to happen, and messages taken from one socket before the others are looked at.
_TICK_S = 0.25
_BURST = 256
#: Seconds in which the last messages of a child that ended still arrive.
_LAST_WORDS_S = 0.05
#: Messages that may wait for one app, or one child.
_HIGH_WATER = 16384
_log = logging.getLogger("sparkd")


@dataclass(frozen=True, slots=True)
class ClientSocket:
    """Where apps connect, and the id of the group that may (-1: the daemon's own)."""

    path: Path
    group: int


class StartFailed(SparkError):
    """A child cannot begin its work; the words are its own."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


class Supervisor:
    """One daemon, from its sockets to its end."""

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDirectory,
        plan: Plan,
        arena: Region,
        context: zmq.Context[zmq.Socket[bytes]],
        client: ClientSocket,
    ) -> None:
        """Bind the sockets. ConfigError when that is not possible."""
        self._settings = settings
        self._plan = plan
        self._arena = arena
        self._notify = Notifier()
        self._started = time.monotonic()
        self._control = Router(context, run_dir.control, high_water=_HIGH_WATER)
        self._client = Router(context, client.path, CLIENT_MODE, client.group, _HIGH_WATER, m.MAX_BYTES)
        served = Served(plan.model, plan.context, plan.vocab)
        self._door = FrontDoor(settings.limits, served, os.getpid())
        self._children = Children(run_dir, settings.to_json(), arena.fd, settings.calibration.enabled)
        self._rounds = status.Rounds()
        self._lock: MemoryLock | None = None
        self._locking = False
        self._loading = (0, 0)
        self._was_ready = False
        self._failure: StartFailed | None = None
        self._asked_to_stop = ""
        self._stopping = False
        self._signals, self._signalled = socket.socketpair()

    # ---- the loop ----

    def run(self, ready: Callable[[], None] | None) -> None:
        """Serve until a signal says stop; `ready` is called once when all serve. StartFailed: a child cannot begin."""
        with self._signal_handlers():
            for child in self._children.all():
                self._children.start(child, time.monotonic())
            while not self._stopping or self._children.running:
                self._wait()
                now = time.monotonic()
                if self._asked_to_stop and not self._stopping:
                    _log.info("stopping: %s", self._asked_to_stop)
                    self._stop("the daemon is being stopped", now)
                self._hear_children(now)
                self._hear_apps(now)
                self._reap(now)
                self._children.tick(now)
                self._door.tick(now)
                self._lock_more()
                self._answer_status(now)
                self._deliver(now)
                if not self._was_ready and self._state() == "ready":
                    self._became_ready(ready)
                self._notify.status(self._line())
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End what still runs, close the sockets."""
        self._children.kill()
        self._control.close()
        self._client.close()
        self._signals.close()
        self._signalled.close()

    def _wait(self) -> None:
        poller = zmq.Poller()
        for source in (self._control.socket, self._client.socket, self._signalled):
            poller.register(source, zmq.POLLIN)
        for child in self._children.running:
            poller.register(child.pidfd, zmq.POLLIN)
        poller.poll(0 if self._locking else int(_TICK_S * 1000))
        with contextlib.suppress(BlockingIOError):
            self._signalled.recv(4096)

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP stop the daemon; each wakes the loop."""
        for end in (self._signals, self._signalled):
            end.setblocking(False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        waker = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_stop = signal.Signals(number).name

    def _stop(self, reason: str, now: float) -> None:
        self._stopping = True
        self._notify.stopping()
        self._door.close(reason, now)
        self._deliver(now)
        self._children.stop(now)

    # ---- children ----

    def _hear_children(self, now: float) -> None:
        for _ in range(_BURST):
            try:
                received = self._control.receive()
            except Malformed as error:
                _log.error("dropped a message of %r: %s", error.peer, error)
                continue
            if received is None:
                return
            self._from_child(*received, now)

    def _from_child(self, peer: bytes, msg: Message, now: float) -> None:
        role = peer.split(b"/")[0].decode(errors="replace")
        child = self._children.by_role.get(role)
        if child is None or not peer.startswith(child.address):
            return
        match msg:
            case m.ChildHello():
                pass
            case m.Heartbeat():
                child.beat = now
            case m.ChildProgress():
                self._progress(msg)
            case m.Ready():
                self._child_ready(child, msg, now)
            case m.ChildFailed():
                child.last_words = msg.message
                if not self._was_ready:
                    self._failure = StartFailed(msg.code, msg.message)
            case m.StatusAnswer():
                child.status = msg.status
                self._rounds.answered(msg.job, role)
            case _:
                self._door.from_worker(msg, now)

    def _progress(self, msg: m.ChildProgress) -> None:
        before = self._loading
        self._loading = (msg.done, msg.total)
        tenth = msg.total // 10 or 1
        if msg.done // tenth > before[0] // tenth:
            _log.info("loading: %.0f %% of %d bytes", 100 * msg.done / msg.total, msg.total)

    def _child_ready(self, child: ChildProcess, msg: m.Ready, now: float) -> None:
        child.condition = Condition.READY
        child.reason = ""
        child.status = msg.detail
        _log.info("%s is ready (process %d)", child.role, child.pid)
        if child.role == "store" and self._settings.memory.lock == "auto" and self._lock is None:
            self._lock = MemoryLock(self._arena)
            self._locking = True
        if child.role == "worker" and not self._stopping:
            self._door.worker_ready(now)

    def _reap(self, now: float) -> None:
        for child in self._children.running:
            assert child.process is not None
            if child.process.poll() is None:
                continue
            self._hear_last_words(now)
            self._children.reap(child, now)
            if not self._stopping:
                self._ended(child, now)

    def _hear_last_words(self, now: float) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0:
            if self._control.socket.poll(int(left * 1000) + 1):
                self._hear_children(now)

    def _ended(self, child: ChildProcess, now: float) -> None:
        _log.warning("%s", child.reason)
        if self._failure is not None:
            self._stop(child.reason, now)
            return
        lost_for_good = child.condition is Condition.FAILED
        if child.role == "worker":
            self._door.worker_lost(f"{child.reason}; it is being restarted", now)
        needed = child.role == "worker" or (child.role == "store" and not self._was_ready)
        if lost_for_good and needed:
            self._door.close(child.reason, now)

    # ---- apps ----

    def _hear_apps(self, now: float) -> None:
        for _ in range(_BURST):
            try:
                received = self._client.receive()
            except Malformed as error:
                self._door.malformed(error.peer, str(error), error.tag)
                continue
            if received is None:
                return
            self._door.receive(*received, now)

    def _deliver(self, now: float) -> None:
        """Carry what the front door has for apps and for the worker."""
        while self._door.to_clients:
            peer, msg = self._door.to_clients.popleft()
            try:
                self._client.send(peer, msg)
            except (PeerGone, PeerSlow):
                self._door.gone(peer, now)
            except m.MessageError as error:
                _log.error("cannot be sent: %s", error)
                self._door.gone(peer, now)
        worker = self._children["worker"]
        while self._door.to_worker and worker.process is not None:
            try:
                self._control.send(worker.address, self._door.to_worker[0])
            except (PeerGone, PeerSlow):
                return
            self._door.to_worker.popleft()

    def _answer_status(self, now: float) -> None:
        while self._door.status_asked:
            reached = [child for child in self._children.running if child.condition is Condition.READY]
            job = self._rounds.ask(self._door.status_asked.popleft(), [child.role for child in reached], now)
            if job is None:
                continue
            for child in reached:
                with contextlib.suppress(PeerGone, PeerSlow):
                    self._control.send(child.address, m.StatusQuery(job))
        finished = self._rounds.finished(now)
        if finished:
            made = self._document(now)
            for peer, tag in finished:
                self._door.to_clients.append((peer, m.StatusReply(tag, made)))

    # ---- how it is ----

    def _state(self) -> str:
        children = self._children.all()
        if self._stopping:
            return "stopping"
        if all(child.condition is Condition.READY for child in children):
            return "ready"
        if self._was_ready or any(child.reason for child in children):
            return "degraded"
        return "loading" if self._loading[1] else "starting"

    def _reason(self) -> str:
        return "; ".join(child.reason for child in self._children.all() if child.reason)

    def _line(self) -> str:
        state, reason = self._state(), self._reason()
        if state == "loading":
            return f"loading {self._plan.model}: {100 * self._loading[0] // self._loading[1]} %"
        return f"{state}: {reason}" if reason else state

    def _document(self, now: float) -> dict[str, Any]:
        return status.document(
            self._state(),
            self._reason(),
            self._started,
            now,
            self._settings,
            self._plan,
            self._door,
            self._children,
            self._lock,
            self._loading,
        )

    def _became_ready(self, ready: Callable[[], None] | None) -> None:
        self._was_ready = True
        _log.info("%s is served", self._plan.model)
        self._notify.ready()
        if ready is not None:
            ready()

    def _lock_more(self) -> None:
        if self._locking and self._lock is not None:
            self._locking = self._lock.advance()
            if not self._locking and self._lock.note:
                _log.warning("%s", self._lock.note)
