"""The daemon as a process of this machine: which one it is, what it may be told, where its log goes."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from spark_client import SparkClientError
from spark_client.address import probe


@dataclass(frozen=True, slots=True)
class DaemonProcess:
    """The process that listens at a client socket. `pidfd` means it and no later one of the same number."""

    pid: int
    pidfd: int

    @staticmethod
    def at(socket: Path) -> DaemonProcess:
        """SparkClientError when nobody listens there, or something that is no sparkd."""
        pid = probe(socket)
        if pid == 0:
            raise SparkClientError(f"{socket}: the daemon runs in another container; run this command in there")
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise SparkClientError(f"{socket}: the daemon has just ended") from None
        if not any("sparkd" in word for word in _command(pid)):
            os.close(pidfd)
            raise SparkClientError(f"{socket}: process {pid} listens there, and is no sparkd: left alone")
        return DaemonProcess(pid, pidfd)

    def send(self, number: signal.Signals) -> None:
        """Signal it. SparkClientError when this user may not."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except PermissionError:
            raise SparkClientError(
                f"process {self.pid} belongs to {self.user}: run this as that user or as root"
                + (f", or use systemctl for {self.unit}" if self.unit else "")
            ) from None
        except ProcessLookupError:
            pass

    def ended(self, seconds: float) -> bool:
        """Wait up to so many seconds for its end."""
        return bool(select.select([self.pidfd], [], [], seconds)[0])

    @property
    def user(self) -> str:
        """Who it belongs to."""
        try:
            uid = Path(f"/proc/{self.pid}").stat().st_uid
        except OSError:
            return "nobody"
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return f"user {uid}"

    @property
    def unit(self) -> str:
        """The systemd service it runs as; empty when it is none."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/cgroup").read_text().splitlines():
                if found := re.search(r"/([^/]+\.service)$", line):
                    # A terminal of the desktop is a service as well (user@1000.service, gnome-terminal-server.service).
                    return found[1] if "sparkd" in found[1] else ""
        return ""

    @property
    def user_unit(self) -> bool:
        """Whether its service belongs to a user's own manager."""
        with contextlib.suppress(OSError):
            return "/user@" in Path(f"/proc/{self.pid}/cgroup").read_text()
        return False

    @property
    def log(self) -> str:
        """What its standard error is: a path, or the kernel's name of a pipe or socket; empty when that is not told."""
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/{self.pid}/fd/2").readlink())
        return ""

    @property
    def on_terminal(self) -> bool:
        """Whether its log goes to a terminal, whose hang-up ends it."""
        return self.log.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))

    def close(self) -> None:
        """Forget it."""
        os.close(self.pidfd)


def _command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []
