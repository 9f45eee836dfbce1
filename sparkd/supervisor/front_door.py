"""The apps' side of the supervisor, without sockets or clocks: messages and times in, messages out.

A request:

              seat free            Done, Refused           chunks delivered
    queued ──────────────► running ─────────────► draining ────────────────► over
      │  ▲                    │ cancel, app gone,    │ cancel, app gone,
      │  └── worker lost ─────┤ too slow, too late   │ too slow
      │                       ▼                      ▼
      └── cancel ... ──►   aborting ──Done──►       over

The worker is given as many requests as it runs at once (`seats`); all others wait here. Those that a worker left behind
are resumed before new ones, in the order that `probation` allows; of the new ones, apps take turns (`FairQueue`), and
each connection that waits for nothing keeps a place in a queue that fills up. What open requests hold in memory is
bounded by `HELD_BYTES`, half of it for one app. Output is sent against the app's credit alone; without credit it
gathers in one chunk, which the request's length bounds. An app that has output waiting for longer than `STALL_S` loses
the request, one that is silent for `LEASE_S` loses all of its requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sparkd import __version__
from sparkd.config import LimitSettings
from sparkd.errors import BusyError, RequestError, SparkError, UnavailableError
from sparkd.ipc import internal
from sparkd.ipc import messages as m
from sparkd.ipc.messages import Json, Message
from sparkd.supervisor import probation
from sparkd.supervisor.admission import Served, check, check_tokenize, fitted
from sparkd.supervisor.fair_queue import FairQueue
from sparkd.supervisor.journal import Entry, Standing
from sparkd.supervisor.overview import list_clients, list_requests
from sparkd.supervisor.questions import Questions
from sparkd.supervisor.requests import MAX_CREDIT, PROGRESS_S, Client, Request, Stage, refused

#: Seconds of silence after which an app counts as gone; apps ping about every quarter of it.
LEASE_S = 20.0
#: Seconds that output may wait for an app's credit.
STALL_S = 60.0
MAX_CLIENTS = 256
#: Memory of all open requests together: texts that wait to be tokenized, ids.
HELD_BYTES = 128 << 20


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    accepted: int = 0
    finished: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    output_tokens: int = 0


class FrontDoor:
    """All connections and requests. `to_clients`, `to_worker`, `status_asked`, `ended` are for the caller to take."""

    def __init__(self, limits: LimitSettings, served: Served, pid: int) -> None:
        self._limits = limits
        self._served = served
        self._pid = pid
        self._clients: dict[bytes, Client] = {}
        self._requests: dict[int, Request] = {}
        self._queue: FairQueue[Request] = FairQueue()
        #: Requests that a lost worker ran; they wait before the queue.
        self._left: deque[Request] = deque()
        self._last = 0
        self._told = 0.0
        self._worker = False
        #: Why no request is taken on now, and why none ever will be.
        self._refusal: str | None = None
        self._closed: str | None = None
        self.totals = Totals()
        self.to_clients: deque[tuple[bytes, Message]] = deque()
        self.to_worker: deque[Message] = deque()
        self._questions = Questions()
        #: (peer, tag) of questions for the status document.
        self.status_asked: deque[tuple[bytes, int]] = deque()
        #: (peer, question) of apps that record what is routed.
        self.traces_asked: deque[tuple[bytes, m.TraceRequest]] = deque()
        #: Requests that are over, for the log.
        self.ended: deque[Request] = deque()

    # ---- what the caller wants to know ----

    @property
    def clients(self) -> int:
        """Connections with a lease."""
        return len(self._clients)

    @property
    def queued(self) -> int:
        """Requests that wait for a seat."""
        return len(self._queue) + len(self._left)

    @property
    def running(self) -> int:
        """Requests the worker has."""
        return len(self._at_worker())

    @property
    def idle(self) -> bool:
        """No request is open."""
        return not self._requests

    @property
    def waiting_peers(self) -> list[bytes]:
        """Connections with open requests."""
        return [client.peer for client in self._clients.values() if client.requests]

    def overview(self, now: float) -> dict[str, Json]:
        """Connections and open requests, for the status document."""
        return {
            "clients": list_clients(self._clients.values(), self._requests.values(), now),
            "open_requests": list_requests(self._requests.values(), now),
        }

    # ---- apps ----

    def receive(self, peer: bytes, msg: Message, now: float) -> None:
        """Take a message of an app."""
        client = self._clients.get(peer)
        if isinstance(msg, m.Hello):
            return self._hello(peer, msg, now)
        if client is None:
            tag = getattr(msg, "tag", None)
            return self._send(peer, m.Failed(tag, None, "protocol", "say hello first (the lease may have lapsed)"))
        client.seen = now
        match msg:
            case m.Generate():
                self._generate(client, msg, now)
            case m.Credit():
                self._credit(client, msg, now)
            case m.Cancel():
                self._cancel(client, msg, now)
            case m.Tokenize() | m.Detokenize():
                self._ask_worker(client, msg, now)
            case m.StatusRequest():
                self.status_asked.append((peer, msg.tag))
            case m.TraceRequest():
                self.traces_asked.append((peer, msg))
            case m.Ping():
                self._send(peer, m.Pong(msg.tag))
            case m.Bye():
                self.gone(peer, now)
            case _:
                self._send(peer, m.Failed(None, None, "protocol", f"apps do not send {type(msg).__name__}"))

    def malformed(self, peer: bytes, reason: str, tag: int | None = None) -> None:
        """Answer what was no message, under the tag it had if that could be read."""
        self._send(peer, m.Failed(tag, None, "protocol", reason))

    def gone(self, peer: bytes, now: float) -> None:
        """A connection is lost or takes nothing any more: its requests end, nothing more is sent to it."""
        client = self._clients.pop(peer, None)
        if client is not None:
            for number in list(client.requests):
                self._abandon(self._requests[number], None, now)
        self.to_clients = deque((p, msg) for p, msg in self.to_clients if p != peer)
        self.status_asked = deque((p, tag) for p, tag in self.status_asked if p != peer)
        self.traces_asked = deque((p, msg) for p, msg in self.traces_asked if p != peer)
        self._questions.gone(peer)

    def tick(self, now: float) -> None:
        """Let time pass: leases lapse, slow streams and late requests end."""
        for client in list(self._clients.values()):
            if now - client.seen > LEASE_S:
                self.gone(client.peer, now)
        for request in list(self._requests.values()):
            if request.stalled is not None and now - request.stalled > STALL_S:
                reason = f"the app took no output for {STALL_S:.0f} s"
                self._abandon(request, self._failed(request, "slow", reason), now)
            elif request.stage in (Stage.QUEUED, Stage.RUNNING):
                seconds, limit = request.timeout(self._limits.timeout_s)
                if now - request.arrived > seconds:
                    reason = f"not finished within {limit} = {seconds:g} s; {request.doing()}"
                    self._abandon(request, self._failed(request, "timeout", reason), now)
        self._fill_seats(now)
        self._tell_positions(now)

    # ---- the worker ----

    def worker_ready(self, now: float) -> None:
        """A worker takes requests from now on."""
        self._worker = True
        self._refusal = None
        self._fill_seats(now)

    def worker_silent(self, reason: str) -> None:
        """The worker shows no life: it gets nothing new until it does, or is lost; new requests are refused."""
        self._refusal = reason

    def worker_back(self, now: float) -> None:
        """The worker lives after all."""
        if self._worker:
            self.worker_ready(now)

    def worker_lost(self, reason: str, now: float) -> None:
        """The worker is gone and another will come: what it ran waits to be resumed, new requests are refused."""
        self._worker = False
        self._refusal = reason
        self.to_worker.clear()
        lost, asked = self._at_worker(), self._questions.asked
        cause = probation.crashed(self._tried(lost))
        self.to_clients.extend(self._questions.lost(reason, guilty=asked is not None and asked is cause))
        for request in lost:
            if request.stage is Stage.ABORTING:
                self._over(request)
            elif request.entry is cause:
                what = f"{request.entry.crashes} workers ended while they ran this request; last: {reason}"
                self._conclude(request, self._failed(request, "crashed", what), now)
            else:
                request.stage = Stage.QUEUED
                self._left.append(request)
        self._left = deque(sorted(self._left, key=lambda r: (*r.entry.turn, r.number)))

    def drain(self, reason: str, now: float) -> None:
        """Take on nothing more: what has begun may finish, all else ends or is refused with `reason`."""
        self._closed = reason
        for request in list(self._queue):
            self._abandon(request, self._failed(request, "unavailable", reason, retry=True), now)

    def close(self, reason: str, now: float) -> None:
        """Nothing can be served any more: open requests end with `reason`, new ones are refused with it."""
        self._closed = reason
        self.to_clients.extend(self._questions.fail(reason))
        for request in list(self._requests.values()):
            if request.stage is not Stage.ABORTING:
                self._abandon(request, self._failed(request, "unavailable", reason, retry=True), now)

    def reopen(self, reason: str) -> None:
        """What was closed may be served again, once a worker is ready; until then new requests are refused."""
        self._closed = None
        if not self._worker:
            self._refusal = reason

    def end(self) -> None:
        """The worker is gone and none will come: what it was still to abort is over."""
        for request in list(self._requests.values()):
            self._over(request)

    def set_limits(self, limits: LimitSettings) -> None:
        """Go on with other limits; what they do not allow any more ends by itself."""
        self._limits = limits

    def from_worker(self, msg: Message, now: float) -> None:
        """Take a message of the worker. Those about requests that are over already are late, not wrong."""
        if isinstance(msg, internal.Encoded | internal.Decoded):
            self._encoded(msg)
            return self._fill_seats(now)
        request = self._requests.get(msg.request)
        if request is None or request.stage not in (Stage.RUNNING, Stage.ABORTING):
            return None
        match msg:
            case internal.Done() | internal.Refused() if request.stage is Stage.ABORTING:
                self._over(request)
            case internal.Admitted():
                request.entry.admitted(msg)
            case internal.Prefilled() if request.stage is Stage.RUNNING:
                self._report(request, request.progress("prefill", now, msg.done, msg.total))
            case internal.Produced() if request.stage is Stage.RUNNING:
                self._produced(request, msg, now)
            case internal.Done():
                self._conclude(request, request.finished(msg, now), now)
            case internal.Refused():
                self._conclude(request, self._failed(request, msg.code, msg.message), now)
        self._fill_seats(now)

    # ---- inside ----

    def _hello(self, peer: bytes, msg: m.Hello, now: float) -> None:
        if m.VERSION not in msg.versions:
            what = f"this daemon speaks version {m.VERSION} of the protocol, the app {msg.versions[:8]}"
            return self._send(peer, m.Failed(None, None, "version", what))
        if peer not in self._clients:
            if len(self._clients) >= MAX_CLIENTS:
                what = f"{MAX_CLIENTS} apps are connected already"
                return self._send(peer, m.Failed(None, None, BusyError.code, what, retry=True))
            self._clients[peer] = Client(peer, msg.client[:100], now)
        self._clients[peer].seen = now
        self._send(peer, m.Welcome(m.VERSION, f"sparkd {__version__}", self._pid, self._served.model, LEASE_S))

    def _generate(self, client: Client, ask: m.Generate, now: float) -> None:
        ask = fitted(ask, self._served)
        entry = Entry(ask)
        try:
            self._check_open(client)
            check(ask, self._served, self._limits)
            self._check_memory(client, entry)
        except SparkError as error:
            retry = isinstance(error, UnavailableError)
            return self._send(client.peer, m.Failed(ask.tag, None, error.code, str(error), retry))
        self._last += 1
        request = Request(self._last, client, entry, min(ask.credit, MAX_CREDIT), now)
        self._requests[request.number] = request
        client.requests.add(request.number)
        self.totals.accepted += 1
        self._queue.push(client.peer, request)
        request.position = [*self._left, *self._queue].index(request)
        self._send(client.peer, m.Accepted(ask.tag, request.number, request.position))
        self._fill_seats(now)

    def _check_open(self, client: Client) -> None:
        """UnavailableError unless one more request of this app may come in."""
        refusal = self._closed or self._refusal
        if refusal is not None:
            raise UnavailableError(refusal, fix="try again later")
        free = max(0, self._limits.sequences - self.running) if self._worker else 0
        queue, wait = self._limits.queue, len(self._queue)
        idle = len(self._clients) - self._queue.owners
        kept = min(idle, queue // 2) if self._queue.waiting(client.peer) else 0
        if wait + kept >= queue + free:
            others = f", {kept} of it kept for other apps" if kept else ""
            what = f"{self.running} requests run and {wait} wait, limits.queue is {queue}{others}"
            raise BusyError(what, fix="try again later")

    def _check_memory(self, client: Client, entry: Entry) -> None:
        """RequestError for a request that alone takes too much, UnavailableError for one that does beside others."""
        need, most = entry.held_bytes, HELD_BYTES // 2
        if need > most:
            raise RequestError(f"the request takes {need} bytes of memory, one may take {most}", fix="make it smaller")
        held = sum(request.entry.held_bytes for request in self._requests.values())
        mine = sum(self._requests[number].entry.held_bytes for number in client.requests)
        if mine + need > most or held + need > HELD_BYTES:
            raise BusyError(
                f"the request takes {need} bytes of memory, this app's open requests hold {mine} of {most},"
                f" those of all apps {held} of {HELD_BYTES}",
                fix="try again later",
            )

    def _credit(self, client: Client, msg: m.Credit, now: float) -> None:
        if msg.request not in client.requests:
            return
        request = self._requests[msg.request]
        if msg.chunks < 1:
            return self._send(client.peer, m.Failed(None, None, "protocol", f"credit of {msg.chunks} chunks"))
        request.grant(msg.chunks)
        self._deliver(request, now)

    def _cancel(self, client: Client, msg: m.Cancel, now: float) -> None:
        if msg.request not in client.requests:
            if msg.request not in client.ended:
                what = f"this connection has no request {msg.request}"
                self._send(client.peer, m.Failed(None, msg.request, "request", what))
            return
        request = self._requests[msg.request]
        self._abandon(request, request.cancelled(now), now)
        self._fill_seats(now)

    def _ask_worker(self, client: Client, msg: m.Tokenize | m.Detokenize, now: float) -> None:
        try:
            if isinstance(msg, m.Tokenize):
                check_tokenize(msg)
            reason = self._closed or self._refusal or (None if self._worker else "the worker is not ready yet")
            if reason is not None:
                raise UnavailableError(reason)
            self._last += 1
            self._questions.ask(client.peer, msg, self._last)
            self._fill_seats(now)
        except SparkError as error:
            retry = isinstance(error, UnavailableError)
            self._send(client.peer, m.Failed(msg.tag, None, error.code, str(error), retry))

    def _encoded(self, msg: internal.Encoded | internal.Decoded) -> None:
        answer = self._questions.answered(msg)
        if answer is not None:
            self.to_clients.append(answer)

    def _at_worker(self) -> list[Request]:
        return [r for r in self._requests.values() if r.stage in (Stage.RUNNING, Stage.ABORTING)]

    def _tried(self, running: list[Request]) -> list[probation.Tried]:
        """What may be the cause if a worker ends that has these requests: they, and the text it tokenizes."""
        asked = self._questions.asked
        return [*(request.entry for request in running), *([] if asked is None else [asked])]

    def _fill_seats(self, now: float) -> None:
        """Give the worker what it may have. A text on trial comes before all else: it takes a moment."""
        while self._worker and self._refusal is None:
            request, running = self._left[0] if self._left else self._queue.first(), self._at_worker()
            question, tried = self._questions.first, self._tried(running)
            waits = bool(self._left) and self._left[0].entry.standing is Standing.ACCUSED
            on_trial = question is not None and question.standing is not Standing.CLEAR
            if question is not None and (on_trial or not waits) and probation.may_start(question, tried):
                self.to_worker.append(self._questions.start())
                continue
            if on_trial:
                return
            if request is None or len(running) >= self._limits.sequences:
                return
            if not probation.may_start(request.entry, tried):
                return
            if self._left:
                self._left.popleft()
            else:
                self._queue.pop()
            self.to_worker.append(request.start(now))

    def _tell_positions(self, now: float) -> None:
        """Let those that wait know when others went before them or came between."""
        if now - self._told < PROGRESS_S:
            return
        self._told = now
        for position, request in enumerate([*self._left, *self._queue]):
            if position != request.position:
                self._report(request, request.progress("queued", now, position=position))

    def _report(self, request: Request, progress: m.Progress | None) -> None:
        if progress is not None:
            self._send(request.client.peer, progress)

    def _produced(self, request: Request, msg: internal.Produced, now: float) -> None:
        request.produced(msg, now)
        probation.produced(request.entry)
        self.totals.output_tokens += 1
        self._deliver(request, now)

    def _conclude(self, request: Request, end: Message, now: float) -> None:
        """The worker is done with a request; `end` follows what is still to be delivered."""
        request.stage = Stage.DRAINING
        request.end = end
        self._deliver(request, now)

    def _deliver(self, request: Request, now: float) -> None:
        for msg in request.deliver(now):
            self._send(request.client.peer, msg)
            if msg is request.end:
                self._over(request)

    def _abandon(self, request: Request, end: Message | None, now: float) -> None:
        """End a request at once, whatever it was doing; its app hears `end` unless it is gone."""
        if end is not None:
            self._send(request.client.peer, end)
        request.end = end
        if request.stage is Stage.QUEUED:
            if request in self._left:
                self._left.remove(request)
            else:
                self._queue.remove(request.client.peer, request)
        if request.stage is Stage.RUNNING:
            self.to_worker.append(internal.Abort(request.number))
            request.stage = Stage.ABORTING
            request.stalled = None
            request.client.requests.discard(request.number)
            request.client.ended.append(request.number)
        elif request.stage is not Stage.ABORTING:
            self._over(request)

    def _over(self, request: Request) -> None:
        del self._requests[request.number]
        request.client.requests.discard(request.number)
        request.client.ended.append(request.number)
        self.ended.append(request)
        if refused(request.end):
            self.totals.refused += 1
        elif isinstance(request.end, m.Failed):
            self.totals.failed += 1
        elif isinstance(request.end, m.Finished) and request.end.reason != "cancelled":
            self.totals.finished += 1
        else:
            self.totals.cancelled += 1

    def _failed(self, request: Request, code: str, reason: str, retry: bool = False) -> m.Failed:
        return m.Failed(request.entry.ask.tag, request.number, code, reason, retry)

    def _send(self, peer: bytes, msg: Message) -> None:
        self.to_clients.append((peer, msg))
