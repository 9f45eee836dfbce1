"""Typed sockets over ZeroMQ in one run directory.

    control.sock     supervisor (Router) ◄─► children (Channel: dealer)
    store.sock       store (Router)      ◄─► workers (Channel: dealer)
    client.sock      supervisor (Router) ◄─► apps

Sending never blocks unless asked to and never drops: a peer that is gone or slow is an exception for the caller to
handle. What arrives is validated; a message that breaks the protocol is raised as `Malformed` with the peer that sent
it, and the socket goes on.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from sparkd.errors import ConfigError, UnavailableError
from sparkd.ipc import messages
from sparkd.ipc.messages import Message, MessageError

#: Characters of a path in struct sockaddr_un, without the final zero.
MAX_PATH = 107
#: Messages waiting on either side of one connection.
HIGH_WATER = 4096
INTERNAL_MODE = 0o700
CLIENT_MODE = 0o660


class Malformed(MessageError):
    """A message from `peer` (routing id; empty on sockets with one peer) breaks the protocol."""

    def __init__(self, peer: bytes, reason: str, tag: int | None = None) -> None:
        self.peer = peer
        self.tag = tag
        super().__init__(reason)


class PeerGone(UnavailableError):
    """Nobody is connected under this routing id (any more)."""


class PeerSlow(UnavailableError):
    """The peer does not read: its queue is at the high-water mark."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where the sockets of one daemon lie."""

    path: Path

    def __post_init__(self) -> None:
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise ConfigError("is not UTF-8", where=repr(str(self.path)), fix="choose another run directory") from None
        longest = max((self.control, self.store, self.client), key=lambda p: len(os.fsencode(p)))
        length = len(os.fsencode(longest))
        if length > MAX_PATH:
            raise ConfigError(
                f"socket path has {length} characters, a Unix socket allows {MAX_PATH}",
                where=str(longest),
                fix="choose a shorter run directory",
            )

    @staticmethod
    def default() -> RunDirectory:
        """$SPARKD_RUN_DIR, else $RUNTIME_DIRECTORY (systemd), else $XDG_RUNTIME_DIR/sparkd. ConfigError without any."""
        given = os.environ.get("SPARKD_RUN_DIR") or os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
        if given:
            return RunDirectory(Path(given))
        session = os.environ.get("XDG_RUNTIME_DIR")
        if session:
            return RunDirectory(Path(session) / "sparkd")
        raise ConfigError("no run directory: XDG_RUNTIME_DIR is not set", fix="set SPARKD_RUN_DIR to a folder")

    @property
    def control(self) -> Path:
        """Supervisor and children."""
        return self.path / "control.sock"

    @property
    def store(self) -> Path:
        """Store and workers."""
        return self.path / "store.sock"

    @property
    def client(self) -> Path:
        """Apps."""
        return self.path / "client.sock"


class Router:
    """A bound ROUTER socket: many peers, each known by its routing id."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: Path,
        mode: int = INTERNAL_MODE,
        group: int = -1,
        high_water: int = HIGH_WATER,
        max_bytes: int = messages.INTERNAL_MAX_BYTES,
        read_ahead: int | None = None,
    ) -> None:
        """Bind at `path` with file mode `mode`, owned by group id `group` (-1: as it comes).

        `read_ahead`: messages of one peer that may wait on this side until they are received; None: `high_water`.
        """
        self.socket = _socket(context, zmq.ROUTER, high_water, max_bytes)
        if read_ahead is not None:
            self.socket.setsockopt(zmq.RCVHWM, read_ahead)
        self._max_bytes = max_bytes
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _bind(self.socket, path, mode, group)

    def send(self, peer: bytes, msg: Message) -> None:
        """Queue `msg` for `peer`. PeerGone, PeerSlow; MessageError when it is too large."""
        try:
            self.socket.send_multipart([peer, messages.encode(msg, self._max_bytes)], zmq.NOBLOCK)
        except zmq.Again:
            raise PeerSlow(f"peer {peer!r} does not read") from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone(f"peer {peer!r} is not connected") from None
            raise

    def receive(self) -> tuple[bytes, Message] | None:
        """The next message and its sender, None when there is none. Malformed (with the peer) when it is no message."""
        if not _readable(self.socket):
            return None
        peer, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
        return peer, _decode(peer, parts, self._max_bytes)

    def close(self) -> None:
        """Close at once; what was not sent is dropped."""
        self.socket.close()


class Channel:
    """A connected socket with one other side."""

    def __init__(self, socket: zmq.Socket[bytes], where: Path, watched: bool = False) -> None:
        self.socket = socket
        self.where = where
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._events: zmq.Socket[bytes] | None = None
        if watched:
            self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._poller.register(self._events, zmq.POLLIN)

    @staticmethod
    def dealer(
        context: zmq.Context[zmq.Socket[bytes]], path: Path, identity: bytes = b"", watched: bool = False
    ) -> Channel:
        """Connect to a Router, and again to its successors; `identity` is the routing id they see (empty: drawn).

        `watched`: `interrupted` is going to be asked.
        """
        socket = _socket(context, zmq.DEALER, HIGH_WATER)
        if identity:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        channel = Channel(socket, path, watched)
        socket.connect(f"ipc://{path}")
        return channel

    def send(self, msg: Message, wait_s: float = 0.0) -> None:
        """Queue `msg`; when the queue is full wait up to `wait_s` seconds, then PeerSlow."""
        data = messages.encode(msg, messages.INTERNAL_MAX_BYTES)
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            if not self.socket.poll(int(wait_s * 1000), zmq.POLLOUT):
                raise PeerSlow("the other side does not read", where=str(self.where)) from None
            self.socket.send(data, zmq.NOBLOCK)

    def receive(self, wait_s: float = 0.0) -> Message | None:
        """The next message, None when there is none within `wait_s` seconds. Malformed when it is no message.

        Also None as soon as `interrupted` has something to tell.
        """
        if wait_s and not self._poller.poll(int(wait_s * 1000)):
            return None
        if not _readable(self.socket):
            return None
        return _decode(b"", self.socket.recv_multipart(zmq.NOBLOCK), messages.INTERNAL_MAX_BYTES)

    def interrupted(self) -> bool:
        """Whether the other side has gone away since the last call, and what was said to it may be lost.

        What its successor sends is never received before this is true.
        """
        assert self._events is not None, "the channel is not watched"
        gone = False
        while _readable(self._events):
            self._events.recv_multipart()
            gone = True
        return gone

    def close(self, flush_s: float = 0.0) -> None:
        """Close; up to `flush_s` seconds are given (when the context ends) to what was not sent yet."""
        if self._events is not None:
            self.socket.disable_monitor()
            self._events.close(linger=0)
        self.socket.close(linger=int(flush_s * 1000))


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, high_water: int, max_bytes: int = messages.INTERNAL_MAX_BYTES
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water)
    socket.setsockopt(zmq.RCVHWM, high_water)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    return socket


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there. Looking costs a fraction of the exception of a receive that finds none."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _bind(socket: zmq.Socket[bytes], path: Path, mode: int, group: int) -> None:
    """Bind, replacing a stale socket file; nobody but the owner can connect before mode and group are set."""
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError("is in the way of a socket", where=str(path), fix="remove it or choose another run directory")
    before = os.umask(0o077)
    try:
        socket.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot bind a socket here: {error.strerror}", where=str(path)) from None
    finally:
        os.umask(before)
    if group != -1:
        os.chown(path, -1, group)
    path.chmod(mode)


def _decode(peer: bytes, parts: list[bytes], max_bytes: int) -> Message:
    if len(parts) != 1:
        raise Malformed(peer, f"message has {len(parts)} frames, expected one")
    try:
        return messages.decode(parts[0], max_bytes)
    except MessageError as error:
        raise Malformed(peer, str(error), error.tag) from None
