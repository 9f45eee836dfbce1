"""The supervisor's end of control.sock, for tests of one child alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from sparkd.config import ModelSettings, Settings
from sparkd.ipc.internal import Heartbeat, StatusAnswer, StatusQuery
from sparkd.ipc.memory import Region
from sparkd.ipc.messages import Message
from sparkd.ipc.sockets import Channel, Router, RunDirectory

#: Seconds after which a test gives up; nothing waits this long on a machine that works.
PATIENCE_S = 60.0


@dataclass
class Control:
    """Starts children and talks to them; keeps what they said, heartbeats apart."""

    run_dir: RunDirectory
    context: zmq.Context
    router: Router
    children: list[subprocess.Popen] = field(default_factory=list)
    heard: dict[bytes, list[Message]] = field(default_factory=dict)
    beats: dict[bytes, int] = field(default_factory=dict)

    def start(
        self, role: str, settings: Settings, region: Region | None = None, *, routing: Region | None = None
    ) -> subprocess.Popen:
        command = [sys.executable, "-m", f"sparkd.{role}.main", "--run-dir", str(self.run_dir.path)]
        command += ["--settings", settings.to_json(), "--parent", str(os.getpid())]
        regions = {name: given.fd for name, given in (("arena", region), ("routing", routing)) if given is not None}
        for name, fd in regions.items():
            command += [f"--{name}-fd", str(fd)]
        child = subprocess.Popen(command, pass_fds=regions.values(), stderr=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def name(self, role: str, child: subprocess.Popen) -> bytes:
        return f"{role}/{child.pid}".encode()

    def wait(self, peer: bytes, kind: type) -> Message:
        """The first message of this type from this child, which stays in `heard`."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = next((m for m in self.heard.get(peer, []) if isinstance(m, kind)), None)
            if found is not None:
                return found
            self.hear(0.2)
        raise AssertionError(f"{peer!r} sent no {kind.__name__}, but {self.heard.get(peer)}")

    def hear(self, seconds: float) -> None:
        self.router.socket.poll(int(seconds * 1000))
        while (received := self.router.receive()) is not None:
            peer, message = received
            if isinstance(message, Heartbeat):
                assert peer.endswith(b"/beat")
                self.beats[peer] = self.beats.get(peer, 0) + 1
            else:
                self.heard.setdefault(peer, []).append(message)

    def send(self, peer: bytes, message: Message) -> None:
        self.router.send(peer, message)

    def status(self, peer: bytes) -> dict:
        self.heard[peer] = [m for m in self.heard.get(peer, []) if not isinstance(m, StatusAnswer)]
        self.send(peer, StatusQuery(1))
        return self.wait(peer, StatusAnswer).status

    def ended(self, child: subprocess.Popen) -> tuple[int, str]:
        """Exit status and standard error of a child that should be ending."""
        _, said = child.communicate(timeout=PATIENCE_S)
        self.hear(0)
        return child.returncode, said

    def channel(self, path: Path, identity: bytes = b"worker/1") -> Channel:
        return Channel.dealer(self.context, path, identity)


@contextmanager
def control(run_dir: Path) -> Iterator[Control]:
    context = zmq.Context()
    directory = RunDirectory(run_dir)
    one = Control(directory, context, Router(context, directory.control))
    try:
        yield one
    finally:
        for child in one.children:
            if child.poll() is None:
                child.kill()
            child.communicate()
        context.destroy(linger=0)


def settings_for(path: Path | str) -> Settings:
    return Settings(model=ModelSettings(path=str(path)))
