"""The thread that owns the socket. ZeroMQ sockets must not be shared between threads, and the daemon wants pings while
the app is busy with its own work; so one thread sends, receives and pings, and apps talk to it through queues.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from spark_client import messages as m
from spark_client.address import probe
from spark_client.errors import ConnectionFailed, SparkClientError
from spark_client.lease import Lease
from spark_client.protocol import CONNECTION, LOST, Protocol

Mail = queue.SimpleQueue["m.Message | SparkClientError"]


class Link:
    """A connection to the daemon. Each call has a queue for its messages; a lost connection fails all of them."""

    def __init__(self, path: Path) -> None:
        probe(path)
        self._path = path
        self._lock = threading.Lock()
        self._protocol = Protocol()
        self._mail: dict[int, Mail] = {}
        self._abandoned: deque[int] = deque()
        self._error: SparkClientError | None = None
        self._closing = False
        self._lease = Lease(time.monotonic())
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="spark-client", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone, and this connection with it."""
        with self._lock:
            return isinstance(self._error, ConnectionFailed)

    def call(self, start: Callable[[Protocol], int]) -> tuple[int, Mail]:
        """Start a call; returns its tag and the queue of its messages."""
        mail: Mail = queue.SimpleQueue()
        with self._locked():
            if self._error:
                raise self._error
            tag = start(self._protocol)
            self._mail[tag] = mail
        return tag, mail

    def hello(self, client: str) -> Mail:
        """Send the first message; the answer arrives in the queue."""

        def start(protocol: Protocol) -> int:
            protocol.hello(client)
            return CONNECTION

        return self.call(start)[1]

    def consumed(self, tag: int) -> None:
        """The app took a chunk."""
        with self._locked():
            self._protocol.consumed(tag)

    def cancel(self, tag: int, *, forget: bool) -> None:
        """Cancel a request; `forget`: nobody will read the rest of its messages."""
        with self._locked():
            self._protocol.cancel(tag)
            if forget:
                self._mail.pop(tag, None)

    def forget(self, tag: int) -> None:
        """Nobody waits for this call any more."""
        with self._lock:
            self._mail.pop(tag, None)

    def abandon(self, tag: int) -> None:
        """As `cancel`, for finalizers: those run anywhere, also where the lock is held, and so must not take it."""
        self._abandoned.append(tag)
        self._wake()

    def close(self) -> None:
        """Say goodbye, which ends what is open, and end the thread. May be called twice."""
        with self._locked():
            if not self._closing:
                self._protocol.bye()
            self._closing = True
        self._thread.join()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            yield
        self._wake()

    def _wake(self) -> None:
        # A full pipe has woken the thread already; a closed one needs no waking.
        with suppress(OSError):
            self._wake_in.send(b"\0")

    # ---- the thread ----

    def _run(self) -> None:
        context = zmq.Context()
        try:
            with context.socket(zmq.DEALER) as sock:
                self._serve(sock)
        except ConnectionFailed as error:
            self._fail(error)
        except (zmq.ZMQError, m.MessageError) as error:
            self._fail(ConnectionFailed(f"{self._path}: {error}"))
        finally:
            self._fail(SparkClientError("the client is closed"))
            self._wake_in.close()
            self._wake_out.close()
            context.term()

    def _serve(self, sock: zmq.Socket[bytes]) -> None:
        sock.linger = 500
        # Credit bounds what is on its way; a high-water mark would only drop or block.
        sock.sndhwm = sock.rcvhwm = 0
        sock.maxmsgsize = m.MAX_BYTES
        # A new daemon at the same path knows nothing of this connection: never reconnect silently.
        sock.reconnect_ivl = -1
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        poller = zmq.Poller()
        for source in (sock, monitor, self._wake_out):
            poller.register(source, zmq.POLLIN)
        sock.connect(f"ipc://{self._path}")
        try:
            while True:
                ready = dict(poller.poll(round(self._lease.tick_s * 1000)))
                if self._wake_out.fileno() in ready:
                    with suppress(BlockingIOError):
                        self._wake_out.recv(4096)
                heard = self._receive(sock)
                now = time.monotonic()
                if heard:
                    self._lease.heard()
                elif monitor in ready:
                    raise ConnectionFailed(f"{self._path}: {LOST}")
                elif self._lease.over(now):
                    raise ConnectionFailed(f"{self._path}: the daemon has not answered for {self._lease.seconds:.0f} s")
                if self._lease.ping_due(now):
                    with self._lock:
                        self._protocol.ping()
                if not self._send(sock):
                    return
        finally:
            sock.disable_monitor()
            monitor.close()

    def _receive(self, sock: zmq.Socket[bytes]) -> bool:
        """Hand out what has arrived; True if anything has."""
        heard = False
        while sock.poll(0):
            data = sock.recv(zmq.NOBLOCK)
            heard = True
            with self._lock:
                tag, msg = self._protocol.receive(data)
                if isinstance(msg, m.Welcome):
                    self._lease.granted(msg.lease_s)
                mail = self._mail.get(tag) if tag is not None else None
            if mail is not None:
                mail.put(msg)
            elif tag == CONNECTION and isinstance(msg, m.Failed):
                raise ConnectionFailed(f"{self._path}: {msg.message}")
        return heard

    def _send(self, sock: zmq.Socket[bytes]) -> bool:
        """Send what waits; False when the link is closing and all is sent."""
        with self._lock:
            while self._abandoned:
                tag = self._abandoned.popleft()
                self._protocol.cancel(tag)
                self._mail.pop(tag, None)
            closing = self._closing
            outgoing = list(self._protocol.outgoing)
            self._protocol.outgoing.clear()
        try:
            for data in outgoing:
                sock.send(data, zmq.NOBLOCK)
        except zmq.Again:
            # There is no high-water mark: nobody is connected any more.
            raise ConnectionFailed(f"{self._path}: {LOST}") from None
        return not closing

    def _fail(self, error: SparkClientError) -> None:
        with self._lock:
            self._error = self._error or error
            waiting = list(self._mail.values())
            self._mail.clear()
        for mail in waiting:
            mail.put(self._error)
