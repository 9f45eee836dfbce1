"""What every child of the supervisor does besides its work: say hello, stay alive audibly, stop when told.

    child = Child("store", run_dir, parent)      ChildHello goes out, heartbeats start
    while child.running:
        for message in child.wait(0.5, other_socket): ...
    child.close()

Heartbeats say whether the child gets on with its work. Between two calls of `wait` it is busy with one piece of it, so
a child that never comes back to `wait` is seen, and one that takes long is not mistaken for a dead one. Work that goes
on in other threads is watched by a counter of its own (`watch`).

`run_child` does this around an object with `run` and `close`; a `SparkError` out of it becomes ChildFailed.

A child ends in three ways: the supervisor says Stop, somebody sends SIGTERM (both clear `running`), or the supervisor
dies (the kernel kills the child at once, so that nobody holds memory for a daemon that is gone; it watches the thread
that started the child, which must be one that lives as long as the supervisor). SIGINT is left to the supervisor: a
terminal sends it to every process of the group.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import zmq

from sparkd import log
from sparkd.errors import SparkError
from sparkd.ipc import internal
from sparkd.ipc.messages import Message
from sparkd.ipc.sockets import Channel, PeerSlow, RunDirectory

#: Seconds between heartbeats.
HEARTBEAT_S = 0.5
_PR_SET_PDEATHSIG = 1
#: What the last messages of a child (ChildFailed, Done ...) get to leave the process.
_FLUSH_S = 2.0


@dataclass(frozen=True, slots=True)
class ChildArguments:
    """The command line every child takes; the descriptor of a region that a child has no use for is -1.

    `fingerprint` is that of the model that was planned for; empty: nothing was planned.
    """

    run_dir: RunDirectory
    settings: str
    fingerprint: str
    arena_fd: int
    routing_fd: int
    parent: int


def parse_arguments(role: str, argv: Sequence[str] | None = None) -> ChildArguments:
    """Parse what `python -m sparkd.<role>.main` is given:

    --run-dir DIR --settings JSON [--fingerprint HEX] [--arena-fd N] [--routing-fd N] [--parent PID]
    """
    parser = argparse.ArgumentParser(
        prog=f"sparkd-{role}", description=f"The {role} of sparkd; the supervisor starts it."
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the daemon's sockets")
    parser.add_argument("--settings", required=True, help="all settings, as JSON")
    parser.add_argument("--fingerprint", default="", help="of the model that was planned for")
    parser.add_argument("--arena-fd", type=int, default=-1, help="inherited descriptor of the arena")
    parser.add_argument("--routing-fd", type=int, default=-1, help="inherited descriptor of the routing ring")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process id of the supervisor")
    given = parser.parse_args(argv)
    run_dir = RunDirectory(given.run_dir)
    return ChildArguments(run_dir, given.settings, given.fingerprint, given.arena_fd, given.routing_fd, given.parent)


class Child:
    """The link to the supervisor, for one thread, and the thread that sends heartbeats.

    `control` carries everything but heartbeats, under the routing id `role/pid`; heartbeats come from `role/pid/beat`.
    """

    def __init__(self, role: str, run_dir: RunDirectory, parent: int) -> None:
        """Link to the supervisor with process id `parent`. Must be called in the main thread (it handles signals)."""
        self.role = role
        self.running = True
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._work = 0
        self._busy = True
        self._counter: Callable[[], int] | None = None
        _die_with(parent)
        #: For each set of sockets that was waited for.
        self._pollers: dict[tuple[zmq.Socket[bytes], ...], zmq.Poller] = {}
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        name = f"{role}/{os.getpid()}"
        self.control = Channel.dealer(self.context, run_dir.control, name.encode())
        self.send(internal.ChildHello(role, os.getpid()))
        self._end = threading.Event()
        self._beat = threading.Thread(target=self._heartbeats, args=(run_dir, f"{name}/beat"), daemon=True)
        self._beat.start()

    def send(self, msg: Message) -> None:
        """Tell the supervisor; waits while its queue is full (a supervisor that is gone takes this process along)."""
        while True:
            try:
                return self.control.send(msg, wait_s=1.0)
            except PeerSlow:
                continue

    def went_on(self) -> None:
        """Count a piece of long work: it is not stuck."""
        self._work += 1

    def wake(self) -> None:
        """Have `wait` return soon; for any thread."""
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"\0")

    def watch(self, counter: Callable[[], int] | None) -> None:
        """While set, `counter` alone tells whether work goes on: it rises with each piece that is done elsewhere."""
        self._counter = counter

    def wait(self, seconds: float, *others: zmq.Socket[bytes]) -> list[Message]:
        """Wait until the supervisor, one of `others`, a signal or `wake` has something; the supervisor's messages.

        Stop is handled here, and the log's level of a Reconfigure. The caller reads `others` itself, without waiting.
        Malformed messages are the supervisor's bug and end the child.
        """
        poller = self._pollers.get(others) or self._poller(others)
        self._work += 1
        self._busy = False
        poller.poll(int(seconds * 1000))
        self._busy = True
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        return list(self._received())

    def _poller(self, others: tuple[zmq.Socket[bytes], ...]) -> zmq.Poller:
        poller = self._pollers[others] = zmq.Poller()
        for waited in (self.control.socket, *others):
            poller.register(waited, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        return poller

    def _received(self) -> Iterator[Message]:
        while (msg := self.control.receive()) is not None:
            if isinstance(msg, internal.Stop):
                self.running = False
                continue
            if isinstance(msg, internal.Reconfigure):
                log.set_level(json.loads(msg.settings)["log"]["level"])
            yield msg

    def fail(self, error: SparkError) -> None:
        """Tell the supervisor why this child cannot go on, and stop."""
        self.send(internal.ChildFailed(self.role, error.code, str(error)))
        self.running = False

    def close(self) -> None:
        """End the heartbeats and the link; what was said last still goes out."""
        self._end.set()
        self._beat.join()
        signal.set_wakeup_fd(-1)
        self._wake.close()
        self._woken.close()
        self.control.close(flush_s=_FLUSH_S)
        self.context.destroy()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.running = False

    def _heartbeats(self, run_dir: RunDirectory, name: str) -> None:
        channel = Channel.dealer(self.context, run_dir.control, name.encode())
        while True:
            counter = self._counter
            progress, busy = (self._work, self._busy) if counter is None else (counter(), True)
            with contextlib.suppress(PeerSlow):
                channel.send(internal.Heartbeat(self.role, progress, busy))
            if self._end.wait(HEARTBEAT_S):
                break
        channel.close()


class Serving(Protocol):
    """What a child does between hello and exit."""

    def run(self) -> None:
        """Work until `child.running` is false."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


def run_child(role: str, given: ChildArguments, build: Callable[[Child], Serving]) -> int:
    """Be the child `role` from hello to exit. Returns the exit status: 1 after a failure the supervisor was told of."""
    child = Child(role, given.run_dir, given.parent)
    try:
        serving = build(child)
        try:
            serving.run()
        finally:
            serving.close()
    except SparkError as error:
        child.fail(error)
        return 1
    finally:
        child.close()
    return 0


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent ends, also when it ended before this line."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
