"""The supervisor at work: one loop over the client socket, the children's socket, child exits and signals.

    starting ──weights are read──► loading ──all serve, one token made──► ready ◄──► degraded
        │                             │                                     └──signal──┤
        │                             │                                                ▼
        └─────────────────────────────┴── signal, or a child that cannot begin ──► stopping ──► end

Asked to stop, it drains first: what runs may finish within `DRAIN_S`, unless it is asked again. Everything that decides
is elsewhere and without I/O (`FrontDoor`, `Children`, `Rounds`, `change`); here messages are carried between them. The
loop never waits for a child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

import zmq

from sparkd import log
from sparkd.config import Settings
from sparkd.errors import DeviceError, SparkError, UnavailableError
from sparkd.ipc import internal
from sparkd.ipc import messages as m
from sparkd.ipc.memory import Region
from sparkd.ipc.messages import Message
from sparkd.ipc.routing import REGION_BYTES, RoutingRing
from sparkd.ipc.sockets import CLIENT_MODE, Malformed, PeerGone, PeerSlow, Router
from sparkd.store.planned import Plan
from sparkd.supervisor import overview, status
from sparkd.supervisor.admission import Served
from sparkd.supervisor.advice import Advice
from sparkd.supervisor.children import ChildProcess, Children, Condition
from sparkd.supervisor.front_door import FrontDoor
from sparkd.supervisor.gateway import Gateway
from sparkd.supervisor.holding import Holding
from sparkd.supervisor.journal import Entry
from sparkd.supervisor.notify import Notifier
from sparkd.supervisor.reload import Reloader
from sparkd.supervisor.run_lock import RunLock
from sparkd.supervisor.signals import Signals
from sparkd.supervisor.traces import Traces
from sparkd.worker.limits import Room

#: Longest wait for something to happen, and messages taken from one socket before the others are looked at.
_TICK_S = 0.25
_BURST = 256
#: Seconds that running requests may take to finish when the daemon is asked to stop.
DRAIN_S = 30.0
#: Seconds between two words to apps that wait: sending is how a lost connection shows.
_PROBE_S = 1.0
#: Seconds by which each step forward extends the time the service manager grants for the start.
_STARTING_S = 120.0
#: Number of the request that is made before the daemon counts as ready; those of apps begin at 1.
_FIRST_TOKEN = 0
#: Seconds in which the last messages of a child that ended still arrive.
_LAST_WORDS_S = 0.05
#: Messages that may wait for one app, or one child, and messages of one app that wait to be read: those may be large.
_HIGH_WATER = 16384
_READ_AHEAD = 4
_log = logging.getLogger("sparkd")


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
        plan: Plan,
        arena: Region,
        context: zmq.Context[zmq.Socket[bytes]],
        lock: RunLock,
        notify: Notifier,
        read: Callable[[], Settings] | None,
    ) -> None:
        """Bind the sockets; ConfigError when that cannot be. `read` gives the settings as they are written now."""
        self._settings = settings
        self._plan = plan
        self._place = lock
        self._notify = notify
        self._reloader = Reloader(read)
        self._started = time.monotonic()
        self._control = Router(context, lock.run_dir.control, high_water=_HIGH_WATER)
        self._client = Router(
            context, lock.client, CLIENT_MODE, lock.group, _HIGH_WATER, max_bytes=m.MAX_BYTES, read_ahead=_READ_AHEAD
        )
        served = Served(plan.model, Room(plan.context, plan.model_context), plan.vocab, plan.longest_token)
        self._door = FrontDoor(settings.limits, served, os.getpid())
        self._routing = _routing_ring(plan) if settings.calibration.enabled else None
        regions = {"arena": arena.fd} | ({"routing": self._routing.fd} if self._routing else {})
        self._children = Children(lock.run_dir, self._for_children(), plan.fingerprint, regions, lock.record)
        self._gateway = Gateway(settings.gateway, lock.client, settings.log.level)
        self._rounds = status.Rounds()
        self._advice = Advice()
        self._traces = Traces()
        self._holding = Holding(arena, settings.memory)
        self._loading = (0, 0)
        self._token_made = False
        self._was_ready = False
        self._finished = 0
        self._probed = self._started
        self._failure: StartFailed | None = None
        self._drain_until: float | None = None
        self._stopping = False
        self._signals = Signals()

    # ---- the loop ----

    def run(self, ready: Callable[[], None] | None) -> None:
        """Serve until a signal says stop; `ready` is called once when all serve. StartFailed: a child cannot begin."""
        with self._signals:
            for child in self._children.all():
                self._children.start(child, time.monotonic())
            while not self._stopping or self._children.running:
                self._wait()
                now = time.monotonic()
                self._heed_signals(now)
                self._hear_children(now)
                self._hear_apps(now)
                self._reap(now)
                self._listen(now)
                self._children.tick(now)
                if self._gateway.tick(now):
                    _log.warning("%s", self._gateway.reason)
                self._door.tick(now)
                self._probe_apps(now)
                self._answer_status(now)
                self._ask_traces()
                self._deliver(now)
                self._log_ended(now)
                self._judge(ready)
                self._notify.status(self._line())
                self._notify.alive(now)
        self._door.end()
        self._log_ended(time.monotonic())
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End what still runs, close the sockets."""
        self._gateway.kill()
        self._children.kill()
        self._holding.close()
        self._control.close()
        self._client.close()
        if self._routing is not None:
            self._routing.close()
        self._signals.close()

    def _wait(self) -> None:
        poller = zmq.Poller()
        for source in (self._control.socket, self._client.socket, self._signals.socket):
            poller.register(source, zmq.POLLIN)
        for child in self._children.running:
            poller.register(child.pidfd, zmq.POLLIN)
        seconds = min(_TICK_S, min(self._children.due(), self._rounds.due()) - time.monotonic())
        poller.poll(max(0, math.ceil(seconds * 1000)))
        self._signals.clear()

    def _heed_signals(self, now: float) -> None:
        if self._signals.reload:
            self._signals.reload = False
            self._reload(now)
        asked = self._signals.stops
        if not asked or self._stopping:
            return
        if self._drain_until is None:
            _log.info("stopping: %s; %d requests may finish within %.0f s", asked[0], self._door.running, DRAIN_S)
            self._drain_until = now + DRAIN_S
            self._notify.stopping()
            self._door.drain("the daemon is being stopped", now)
        if self._door.idle or len(asked) > 1 or now >= self._drain_until:
            self._stop("the daemon is being stopped", now)

    def _stop(self, reason: str, now: float) -> None:
        self._stopping = True
        self._notify.stopping()
        self._door.close(reason, now)
        self._deliver(now)
        self._gateway.stop()
        self._children.stop(now)

    def _reload(self, now: float) -> None:
        self._notify.reloading()
        settings = self._reloader.reload(self._settings, self._place)
        if settings != self._settings:
            self._settings = settings
            log.set_level(settings.log.level)
            self._door.set_limits(settings.limits)
            self._children.settings = self._for_children()
            for child in self._children.running:
                if child.condition is not Condition.STARTING:
                    self._tell(child, internal.Reconfigure(self._children.settings))
        if not self._stopping and self._drain_until is None:
            revived = self._children.revive(now)
            if revived:
                _log.info("started once more: %s", ", ".join(revived))
                self._door.reopen(f"the {revived[0]} is being started once more")
            self._reloader.outcome["revived"] = revived
        if self._was_ready:
            self._notify.ready()

    def _for_children(self) -> str:
        """The settings with what the plan has chosen to compute on, which no child chooses anew."""
        worker = dataclasses.replace(self._settings.worker, device=self._plan.device)
        return dataclasses.replace(self._settings, worker=worker).to_json()

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
            case internal.ChildHello():
                pass
            case internal.Heartbeat():
                if self._children.heartbeat(child, msg, now):
                    self._back(child, now)
            case internal.ChildProgress():
                self._progress(msg)
            case internal.Ready():
                self._child_ready(child, msg, now)
            case internal.Admitted() | internal.Produced() | internal.Done() | internal.Refused() if (
                msg.request == _FIRST_TOKEN
            ):
                self._first_token(child, msg, now)
            case internal.ChildFailed(code=DeviceError.code) if self._was_ready:
                # The next worker may find the GPU again; it never goes on without one by itself.
                child.verdict = f"has lost its GPU: {msg.message}"
            case internal.ChildFailed():
                child.last_words = msg.message
                if not self._was_ready:
                    self._failure = StartFailed(msg.code, msg.message)
            case internal.Tier() | internal.Placement():
                self._pass_on(msg)
            case internal.TraceAnswer():
                self._door.to_clients.extend(self._traces.answered(msg))
            case internal.StatusAnswer():
                child.status = msg.status
                self._rounds.answered(msg.job, role)
            case _:
                self._door.from_worker(msg, now)

    def _pass_on(self, msg: internal.Tier | internal.Placement) -> None:
        receiver = self._children.by_role.get(self._advice.take(msg))
        # A store heeds a placement while it loads; others hear what they missed once they are ready.
        if receiver is not None and (receiver.role == "store" or receiver.condition is Condition.READY):
            self._tell(receiver, msg)

    def _progress(self, msg: internal.ChildProgress) -> None:
        before = self._loading
        self._loading = (msg.done, msg.total)
        if msg.done > before[0] and not self._was_ready:
            self._notify.starting(_STARTING_S)
        tenth = msg.total // 10 or 1
        if msg.done // tenth > before[0] // tenth:
            _log.info("loading: %.0f %% of %d bytes", 100 * msg.done / msg.total, msg.total)

    def _child_ready(self, child: ChildProcess, msg: internal.Ready, now: float) -> None:
        child.status = msg.detail
        _log.info("%s is ready (process %d)", child.role, child.pid)
        if not self._was_ready:
            self._notify.starting(_STARTING_S)
        if child.role == "store":
            self._holding.begin()
        self._tell(child, internal.Reconfigure(self._children.settings))
        for known in self._advice.for_new(child.role):
            self._tell(child, known)
        if child.role == "worker" and not self._token_made:
            ask = m.Generate(tag=_FIRST_TOKEN, tokens=[0], max_tokens=1, ignore_eos=True)
            self._tell(child, Entry(ask).run(_FIRST_TOKEN))
        else:
            self._serves(child, now)

    def _first_token(self, child: ChildProcess, msg: Message, now: float) -> None:
        """The daemon is not ready before the worker has computed one."""
        if isinstance(msg, internal.Refused):
            self._failure = StartFailed(msg.code, f"the first token cannot be computed: {msg.message}")
            self._stop(str(self._failure), now)
        elif isinstance(msg, internal.Done):
            self._token_made = True
            self._serves(child, now)

    def _serves(self, child: ChildProcess, now: float) -> None:
        child.condition = Condition.READY
        child.reason = ""
        if child.role == "worker" and not self._stopping:
            self._door.worker_ready(now)

    def _listen(self, now: float) -> None:
        """Find children that show no life, or get no further."""
        if self._stopping:
            return
        for child in self._children.listen(now):
            _log.warning("%s", child.reason)
            self._rounds.lost(child.role)
            if child.role == "worker":
                self._door.worker_silent(child.reason)

    def _back(self, child: ChildProcess, now: float) -> None:
        _log.info("%s shows life again", child.role)
        if child.role == "worker":
            self._door.worker_back(now)

    def _tell(self, child: ChildProcess, msg: Message) -> None:
        """Send what a child may miss: one that cannot be reached is about to be replaced."""
        with contextlib.suppress(PeerGone, PeerSlow):
            self._control.send(child.address, msg)

    def _reap(self, now: float) -> None:
        for child in self._children.running:
            assert child.process is not None
            if child.process.poll() is None:
                continue
            self._hear_last_words(now)
            self._children.reap(child, now)
            self._rounds.lost(child.role)
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
        # Where records come and go, nothing can be computed for long without a store.
        store = child.role == "store" and (self._plan.partial or not self._was_ready)
        needed = child.role == "worker" or store
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
            peer, msg = received
            _log.debug("app %s: %s", peer.hex()[-8:], overview.outline(msg))
            self._door.receive(peer, msg, now)

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

    def _probe_apps(self, now: float) -> None:
        """Send a word to apps with open requests: to one that is gone that fails, long before its lease lapses."""
        if now - self._probed >= _PROBE_S:
            self._probed = now
            self._door.to_clients.extend((peer, m.Pong(0)) for peer in self._door.waiting_peers)

    def _log_ended(self, now: float) -> None:
        while self._door.ended:
            _log.info("request ended: %s", overview.line(self._door.ended.popleft(), now))

    def _answer_status(self, now: float) -> None:
        while self._door.status_asked:
            reached = [child for child in self._children.running if child.condition is Condition.READY]
            job = self._rounds.ask(self._door.status_asked.popleft(), [child.role for child in reached], now)
            if job is None:
                continue
            for child in reached:
                self._tell(child, internal.StatusQuery(job))
        finished = self._rounds.finished(now)
        if finished:
            made = self._document(now)
            for peer, tag in finished:
                self._door.to_clients.append((peer, m.StatusReply(tag, made)))

    def _ask_traces(self) -> None:
        calibrator = self._children.by_role.get("calibrator")
        reached = calibrator is not None and calibrator.condition is Condition.READY
        while self._door.traces_asked:
            peer, msg = self._door.traces_asked.popleft()
            try:
                if calibrator is None or not reached:
                    raise UnavailableError("no calibrator runs now", fix="see calibration.enabled and sparkctl status")
                self._tell(calibrator, self._traces.ask(peer, msg))
            except SparkError as error:
                self._door.to_clients.append((peer, m.Failed(msg.tag, None, error.code, str(error), True)))
        if not reached:
            self._door.to_clients.extend(self._traces.fail(UnavailableError.code, "the calibrator has ended"))

    # ---- how it is ----

    def _state(self) -> str:
        children = self._children.all()
        if self._stopping or self._drain_until is not None:
            return "stopping"
        if all(child.condition is Condition.READY for child in children):
            return "ready"
        if self._was_ready or any(child.reason for child in children):
            return "degraded"
        return "loading" if self._loading[1] else "starting"

    def _reason(self) -> str:
        reasons = [child.reason for child in self._children.all() if child.reason]
        if self._drain_until is not None:
            reasons.insert(0, f"{self._door.running + self._door.queued} requests may finish before the end")
        return "; ".join(reasons)

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
            self._gateway.status(),
            self._holding,
            self._loading,
            self._reloader.outcome,
        )

    def _judge(self, ready: Callable[[], None] | None) -> None:
        """Note what being ready proves."""
        if self._state() != "ready":
            return
        if not self._was_ready:
            self._was_ready = True
            _log.info("%s is served", self._plan.model)
            self._notify.ready()
            if ready is not None:
                ready()
        if self._door.totals.finished > self._finished:
            self._finished = self._door.totals.finished
            self._children.forgive()


def _routing_ring(plan: Plan) -> Region:
    """The way from the worker to the calibrator."""
    region = Region.create(REGION_BYTES, "sparkd-routing")
    RoutingRing.create(region, plan.fingerprint, plan.expert_layers, plan.experts)
    return region
