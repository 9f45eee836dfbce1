"""Exclusive use of a run directory: one live daemon per directory, what a dead one left is reclaimed.

The file `lock` is locked as long as the daemon lives, and names its processes, each by id and start (`processes`):

    4711 123456
    4713 123460 store
    4714 123461 worker

The next daemon ends those that are still there: children die with their supervisor, but a process in the middle of a
long system call may take a while, and must not touch an arena that the next daemon has taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shlex
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from sparkd.errors import ConfigError, UnavailableError
from sparkd.ipc.sockets import RunDirectory
from sparkd.supervisor.processes import Process

_LOCK = "lock"
_LONGEST = 4096
_log = logging.getLogger(__name__)


class RunLock:
    """A locked run directory. The kernel gives the lock back however the process ends; `close` also tidies up."""

    def __init__(self, run_dir: RunDirectory, client: Path, group: int = -1) -> None:
        """Make the directory if need be, lock it, remove stale sockets. `client` is where the client socket will lie.

        With a `group` (an id; -1: none) its members may pass through to the client socket. ConfigError when the
        directory cannot be used, UnavailableError naming the process id when a live daemon uses it, when one answers
        at the client socket, or when a process of a dead one cannot be ended.
        """
        self.run_dir = run_dir
        self.client = client
        self.group = group
        self._sockets = (run_dir.control, run_dir.store, client)
        self._path = run_dir.path / _LOCK
        try:
            _check_own(run_dir.path)
            run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open_to(group)
            self._fd = self._lock()
        except OSError as error:
            raise ConfigError(
                f"cannot be the run directory: {error.strerror}",
                where=str(run_dir.path),
                fix="choose another: --run-dir",
            ) from None
        self._end_orphans()
        self._refuse_live_client()
        self.record([])
        self._remove_sockets()

    def record(self, children: Sequence[tuple[str, int]]) -> None:
        """Note role and process id of all children that exist."""
        lines = []
        for role, pid in [("", os.getpid()), *children]:
            process = Process.of(pid)
            if process is not None:
                lines.append(f"{pid} {process.started} {role}".rstrip() + "\n")
        data = "".join(lines).encode()
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def change_group(self, group: int) -> None:
        """Let another group connect from now on. OSError when this process may not give files to it."""
        own = os.getegid() if group == -1 else group
        os.chown(self.client, -1, own)
        self._open_to(own if group == -1 else group)
        self.run_dir.path.chmod(0o700 if group == -1 else 0o710)
        self.group = group

    def close(self) -> None:
        """Remove sockets and lock file, give up the lock."""
        self._remove_sockets()
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_to(self, group: int) -> None:
        if group != -1:
            os.chown(self.run_dir.path, -1, group)
        self.run_dir.path.chmod(0o700 if group == -1 else 0o710)

    def _lock(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, _LONGEST, 0).decode(errors="replace").split()
                os.close(fd)
                raise UnavailableError(
                    f"another daemon (process {owner[0] if owner else 'unknown'}) uses this run directory",
                    where=str(self._path.parent),
                    fix="stop it, or choose another run directory: --run-dir",
                ) from None
            # A daemon that ended between our open and our lock has removed the file: lock the one that is there now.
            if self._path.exists() and os.fstat(fd).st_ino == self._path.stat().st_ino:
                return fd
            os.close(fd)

    def _end_orphans(self) -> None:
        for line in os.pread(self._fd, _LONGEST, 0).decode(errors="replace").splitlines():
            orphan = None
            with contextlib.suppress(ValueError, IndexError):
                pid, started, *role = line.split()
                orphan = Process(int(pid), int(started))
            if orphan is None or not orphan.alive:
                continue
            _log.warning("ending process %d, the %s of a daemon that is gone", orphan.pid, " ".join(role) or "rest")
            if not orphan.end():
                os.close(self._fd)
                raise UnavailableError(
                    f"process {orphan.pid} of a daemon that is gone does not end",
                    where=str(self.run_dir.path),
                    fix="end it, or choose another run directory: --run-dir",
                )

    def _refuse_live_client(self) -> None:
        """The client socket may lie outside of the run directory, where the lock does not guard it."""
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.client)) != 0:
                return
        self._path.unlink()
        os.close(self._fd)
        raise UnavailableError(
            "another daemon answers at this socket",
            where=str(self.client),
            fix="stop it, or choose another socket.path",
        )

    def _remove_sockets(self) -> None:
        for path in self._sockets:
            if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()


def _check_own(folder: Path) -> None:
    """ConfigError for a folder that others use, /tmp or /run: as a run directory it would be closed to them."""
    mode = folder.stat().st_mode if folder.is_dir() else 0
    if not mode & 0o077:
        return
    others = next((path.name for path in folder.iterdir() if path.name != _LOCK and not path.is_socket()), None)
    if others is not None or mode & (stat.S_ISVTX | stat.S_IWOTH):
        what = f"holds other things ({others})" if others is not None else "is open to everybody"
        fix = f"choose one of its own: --run-dir {shlex.quote(str(folder / 'sparkd'))}"
        raise ConfigError(f"{what}, a run directory is closed to others", where=str(folder), fix=fix)
