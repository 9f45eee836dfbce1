"""A whole daemon in a temporary run directory, for tests: started, asked, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from spark_client import Client, ConnectionFailed, RequestFailed
from sparkd.config import Settings

#: Seconds after which a test gives up; nothing waits this long on a machine that works.
PATIENCE_S = 60.0
#: Best minus second-best logit below which another order of summation may choose another token.
NARROW = 4e-3


class Daemon:
    """One daemon process and what it wrote. `settings`: section to {key: value}."""

    #: What Python runs; subclasses may put something in between.
    PROGRAM: Sequence[str] = ("-m", "sparkd.supervisor.main")
    ENVIRONMENT: Mapping[str, str] = {}

    def __init__(self, model: Path | str, run_dir: Path, **settings: dict[str, Any]) -> None:
        self.run_dir = run_dir
        self.socket = run_dir / "client.sock"
        self.log = run_dir.with_suffix(".log")
        given = {"model": {"path": str(model)}, "kv": {"type": "f32"}, "cpu": {"threads": 1}} | settings
        self.temporary = run_dir.with_suffix(".tmp")
        self.temporary.mkdir(exist_ok=True)
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), **self.ENVIRONMENT}
        self.command = [sys.executable, *self.PROGRAM, "--run-dir", str(run_dir)]
        self.command += ["--settings", Settings.of(given).to_json()]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.process = self.launch(log)
        return self.process

    def launch(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        """The daemon's process; subclasses may start it in other ways."""
        return subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment)

    def client(self) -> Client:
        """A connection, as soon as there is something to connect to."""
        made: list[Client] = []

        def connect() -> bool:
            assert self.process.poll() is None, self.said()
            try:
                made.append(Client(self.socket, timeout=PATIENCE_S))
            except (ConnectionFailed, RequestFailed):
                return False
            return True

        until(connect, self.said)
        return made[0]

    def ready(self) -> Daemon:
        with self.client() as client:
            until(lambda: client.status()["state"] == "ready", self.said)
        return self

    def prepare(self) -> None:
        """Have the worker build now what texts need, and what it would build when it has nothing to do."""
        with self.client() as client:
            client.chat([{"role": "user", "content": "Hello"}], max_tokens=1).read(PATIENCE_S)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def pid(self, role: str) -> int:
        return next(p["pid"] for p in self.status()["processes"] if p["role"] == role)

    def pids(self) -> list[int]:
        return [p["pid"] for p in self.status()["processes"] if p["pid"] is not None]

    def kill(self, role: str) -> None:
        os.kill(self.pid(role), signal.SIGKILL)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


_Daemon = TypeVar("_Daemon", bound=Daemon)


@contextmanager
def daemon(model: Path | str, run_dir: Path, **settings: dict[str, Any]) -> Iterator[Daemon]:
    """A daemon that serves `model`; killed at the end if it still runs."""
    with running(Daemon(model, run_dir, **settings)) as one:
        yield one.ready()


@contextmanager
def running(one: _Daemon) -> Iterator[_Daemon]:
    """Kills a daemon at the end, if it still runs."""
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def until(holds: Callable[[], bool], explain: Callable[[], str] = lambda: "") -> None:
    """Wait until `holds()`; fails the test when it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s in vain; {explain()}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def certain(vectors: np.lib.npyio.NpzFile, prompt: str) -> list[int]:
    """The golden greedy tokens before the first step whose two best logits nearly tie."""
    narrow = vectors[f"{prompt}_greedy_margin"] < NARROW
    count = int(np.argmax(narrow)) if narrow.any() else len(narrow)
    return vectors[f"{prompt}_greedy"][:count].tolist()
