"""Exclusive use of a run directory: one live daemon per directory, what a dead one left is reclaimed."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from sparkd.errors import ConfigError, UnavailableError
from sparkd.ipc.sockets import RunDirectory

_LOCK = "lock"


class RunLock:
    """A locked run directory. The kernel gives the lock back however the process ends; `close` also tidies up."""

    def __init__(self, run_dir: RunDirectory, client: Path, group: int = -1) -> None:
        """Make the directory if need be, lock it, remove stale sockets. `client` is where the client socket will lie.

        With a `group` (an id; -1: none) its members may pass through to the client socket. ConfigError when the
        directory cannot be used, UnavailableError naming the process id when a live daemon uses it.
        """
        self._sockets = (run_dir.control, run_dir.store, run_dir.calibrator, client)
        self._path = run_dir.path / _LOCK
        try:
            run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if group != -1:
                os.chown(run_dir.path, -1, group)
            run_dir.path.chmod(0o700 if group == -1 else 0o710)
            self._fd = self._lock()
        except OSError as error:
            raise ConfigError(
                f"cannot be the run directory: {error.strerror}",
                where=str(run_dir.path),
                fix="choose another: --run-dir",
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        self._remove_sockets()

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

    def _lock(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                raise UnavailableError(
                    f"another daemon (process {pid or 'unknown'}) uses this run directory",
                    where=str(self._path.parent),
                    fix="stop it, or choose another run directory: --run-dir",
                ) from None
            # A daemon that ended between our open and our lock has removed the file: lock the one that is there now.
            if self._path.exists() and os.fstat(fd).st_ino == self._path.stat().st_ino:
                return fd
            os.close(fd)

    def _remove_sockets(self) -> None:
        for path in self._sockets:
            if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
