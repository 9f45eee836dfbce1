"""A service manager for tests, as far as sparkd sees one: a notify socket, kept descriptors, restarts.

It does what systemd does for Type=notify with NotifyAccess=main and FileDescriptorStoreMax: hears the main process
alone, keeps one copy of each descriptor under its name, and hands all of them to the next process of the service.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from daemon import Daemon, until

WATCHDOG_S = 3.0
_CREDENTIALS = struct.Struct("iII")
#: Between fork and exec: descriptors move to their places, variables name the process.
_LAUNCH = """
import fcntl, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in fds]
for place, fd in enumerate(high, start=3):
    os.dup2(fd, place)
os.environ["WATCHDOG_PID"] = str(os.getpid())
if fds:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)))
os.closerange(3 + len(fds), 1024)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Managed(Daemon):
    """A daemon under the manager: `said` in assignments, in order; `kept` descriptors by name."""

    def __init__(self, model: Path | str, run_dir: Path, **settings: dict[str, Any]) -> None:
        self._address = str(run_dir.with_suffix(".notify"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self._address)
        self._lock = threading.Lock()
        self.assignments: list[tuple[str, str]] = []
        self.strangers = 0
        self.kept: dict[str, int] = {}
        self._main = 0
        threading.Thread(target=self._hear, daemon=True).start()
        super().__init__(model, run_dir, **settings)

    def launch(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        """As systemd starts a service: descriptors from 3 on, and variables naming the process they are meant for."""
        with self._lock:
            kept = dict(self.kept)
        environment = self.environment | {
            "NOTIFY_SOCKET": self._address,
            "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
            "LISTEN_FDNAMES": ":".join(kept),
        }
        passed = ",".join(map(str, kept.values()))
        self._main = 0
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, passed, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=list(kept.values()),
        )
        self._main = process.pid
        return process

    def heard(self, name: str) -> list[str]:
        """The values assigned to a name since the last start was waited for."""
        return [value for key, value in list(self.assignments) if key == name]

    def ready_again(self) -> None:
        """Kill the daemon as hard as can be, start it again, wait until it says that it serves."""
        self.process.kill()
        self.process.wait()
        self.assignments.clear()
        self.start()
        until(lambda: self.heard("READY") == ["1"], self.said)

    def close(self) -> None:
        """End the daemon and give up what was kept."""
        self.process.kill()
        self.process.wait()
        # Closing does not end a receive that another thread waits in.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()

    def _hear(self) -> None:
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(64) + socket.CMSG_SPACE(12))
            if not data and not ancillary:
                self._socket.close()
                return
            fds, sender = [], 0
            for _, kind, content in ancillary:
                if kind == socket.SCM_RIGHTS:
                    fds = list(memoryview(content[: len(content) // 4 * 4]).cast("i"))
                elif kind == socket.SCM_CREDENTIALS:
                    sender = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0]
            until(lambda: self._main != 0)
            if sender != self._main:
                self.strangers += 1
                fds = self._refuse(fds)
                continue
            assigned = [tuple(line.split("=", 1)) for line in data.decode().splitlines()]
            self._store(dict(assigned), fds)
            self.assignments += assigned

    def _store(self, assigned: dict[str, str], fds: list[int]) -> None:
        name = assigned.get("FDNAME", "stored")
        with self._lock:
            if "FDSTOREREMOVE" in assigned and name in self.kept:
                os.close(self.kept.pop(name))
            if "FDSTORE" not in assigned:
                self._refuse(fds)
                return
            for fd in fds:
                same = [n for n, kept in self.kept.items() if os.path.sameopenfile(kept, fd)]
                if same or name in self.kept:
                    os.close(fd)
                else:
                    self.kept[name] = fd

    def _refuse(self, fds: list[int]) -> list[int]:
        for fd in fds:
            os.close(fd)
        return []
