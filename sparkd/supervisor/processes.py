"""Processes told apart for good: a number may be given again, the number and the moment of its start may not."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

#: Seconds a process that was killed may take to be gone (it gives its memory back meanwhile).
_GONE_S = 30.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process id and its start, in clock ticks since the machine started."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Process | None:
        """The process that has this id now; None when none has (or it has ended and waits to be noticed)."""
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            return None
        return None if state in "ZX" else Process(pid, int(fields[18]))

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return Process.of(self.pid) == self

    def end(self) -> bool:
        """Kill it and wait until it is gone; false when it will not go, or is not ours to kill."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            return bool(select.select([fd], [], [], _GONE_S)[0])
        except PermissionError:
            return False
        finally:
            os.close(fd)


def rss_bytes(pid: int) -> int:
    """Resident bytes of a process, the shared arena included; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0
