"""The socket of an asynchronous client: a task receives and pings, calls send from where they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import zmq
import zmq.asyncio

from spark_client import messages as m
from spark_client.address import probe
from spark_client.errors import ConnectionFailed, SparkClientError
from spark_client.lease import Lease
from spark_client.protocol import CONNECTION, LOST, Protocol

Mail = asyncio.Queue["m.Message | SparkClientError"]


class AsyncLink:
    """A connection to the daemon, within one event loop. Each call has a queue for its messages; a lost connection
    fails all of them. Nothing but `open` and `close` waits.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._protocol = Protocol()
        self._mail: dict[int, Mail] = {}
        self._error: SparkClientError | None = None
        self._lease = Lease(monotonic())
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone, and this connection with it."""
        return isinstance(self._error, ConnectionFailed)

    async def open(self) -> None:
        """Connect. ConnectionFailed when nobody listens."""
        await asyncio.to_thread(probe, self._path)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        sock = self._context.socket(zmq.DEALER)
        sock.linger = 500
        # Credit bounds what is on its way; a high-water mark would only drop or block.
        sock.sndhwm = sock.rcvhwm = 0
        sock.maxmsgsize = m.MAX_BYTES
        # A new daemon at the same path knows nothing of this connection: never reconnect silently.
        sock.reconnect_ivl = -1
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        sock.connect(f"ipc://{self._path}")
        self._socket = sock
        self._task = asyncio.create_task(self._run(sock, monitor), name="spark-client")

    def call(self, start: Callable[[Protocol], int]) -> tuple[int, Mail]:
        """Start a call; returns its tag and the queue of its messages."""
        if self._error is not None:
            raise self._error
        mail: Mail = asyncio.Queue()
        tag = start(self._protocol)
        self._mail[tag] = mail
        self._send()
        return tag, mail

    def hello(self, client: str) -> Mail:
        """Send the first message; the answer arrives in the queue."""

        def start(protocol: Protocol) -> int:
            protocol.hello(client)
            return CONNECTION

        return self.call(start)[1]

    def consumed(self, tag: int) -> None:
        """The app took a chunk."""
        self._protocol.consumed(tag)
        self._send()

    def cancel(self, tag: int, *, forget: bool) -> None:
        """Cancel a request; `forget`: nobody will read the rest of its messages."""
        self._protocol.cancel(tag)
        if forget:
            self.forget(tag)
        self._send()

    def forget(self, tag: int) -> None:
        """Nobody waits for this call any more."""
        self._mail.pop(tag, None)

    def abandon(self, tag: int) -> None:
        """As `cancel`, for finalizers: those run in any thread, and when the loop is gone the link is as well."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self.cancel(tag, forget=True))

    async def close(self) -> None:
        """Say goodbye, which ends what is open. May be called twice."""
        if self._task is None or self._context is None:
            return
        if self._error is None:
            self._protocol.bye()
            self._send()
        self._task.cancel()
        await asyncio.wait([self._task])
        # Waits for the goodbye to leave, at most as long as the socket lingers.
        await asyncio.to_thread(self._context.term)
        self._task = None

    # ---- inside ----

    def _send(self) -> None:
        if self._error is not None or self._socket is None:
            self._protocol.outgoing.clear()
            return
        # Without a high-water mark a message is queued at once: its future is done. Only a lost connection takes none,
        # and the task is about to find out about that.
        with suppress(zmq.Again):
            while self._protocol.outgoing:
                asyncio.ensure_future(self._socket.send(self._protocol.outgoing.popleft(), zmq.NOBLOCK)).result()

    async def _run(self, sock: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        try:
            await self._serve(sock, monitor)
        except ConnectionFailed as error:
            self._fail(error)
        except (zmq.ZMQError, m.MessageError) as error:
            self._fail(ConnectionFailed(f"{self._path}: {error}"))
        finally:
            self._fail(SparkClientError("the client is closed"))
            sock.disable_monitor()
            monitor.close()
            sock.close()

    async def _serve(self, sock: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        poller = zmq.asyncio.Poller()
        for source in (sock, monitor):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll(round(self._lease.tick_s * 1000)))
            heard = await self._receive(sock)
            now = monotonic()
            if heard:
                self._lease.heard()
            elif monitor in ready:
                raise ConnectionFailed(f"{self._path}: {LOST}")
            elif self._lease.over(now):
                raise ConnectionFailed(f"{self._path}: the daemon has not answered for {self._lease.seconds:.0f} s")
            if self._lease.ping_due(now):
                self._protocol.ping()
            # An acceptance may have called for a Cancel.
            self._send()

    async def _receive(self, sock: zmq.asyncio.Socket) -> bool:
        """Hand out what has arrived; True if anything has."""
        heard = False
        while await sock.poll(0):
            data = await sock.recv()
            heard = True
            tag, msg = self._protocol.receive(data)
            if isinstance(msg, m.Welcome):
                self._lease.granted(msg.lease_s)
            mail = self._mail.get(tag) if tag is not None else None
            if mail is not None:
                mail.put_nowait(msg)
            elif tag == CONNECTION and isinstance(msg, m.Failed):
                raise ConnectionFailed(f"{self._path}: {msg.message}")
        return heard

    def _fail(self, error: SparkClientError) -> None:
        self._error = self._error or error
        waiting = list(self._mail.values())
        self._mail.clear()
        for mail in waiting:
            mail.put_nowait(self._error)
