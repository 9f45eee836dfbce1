"""Tells systemd how the service is doing, and has it keep descriptors (sd_notify); does nothing where nobody listens.

READY=1, STATUS=, STOPPING=1        the state of the service
RELOADING=1, MONOTONIC_USEC=        settings are read again; READY=1 ends it
EXTEND_TIMEOUT_USEC=                the start takes longer, and goes on
WATCHDOG=1                          the main loop turns; without it for WatchdogSec= the service is killed
FDSTORE=1, FDNAME=                  keep this descriptor; the next start finds it among $LISTEN_FDS
FDSTOREREMOVE=1, FDNAME=            keep it no longer
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping

#: First descriptor a service manager passes on.
_FIRST_FD = 3
#: Signs of life per watchdog period.
_SIGNS = 3


class Notifier:
    """Sends assignments to the socket that $NOTIFY_SOCKET names."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        """`address` is a path, or a name of the abstract namespace after an @; `watchdog_s` 0: no watchdog."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._alive_at = -watchdog_s
        self._said = ""

    @staticmethod
    def take(environment: MutableMapping[str, str]) -> Notifier:
        """What the environment names; the variables are removed, so that no other process speaks for this one."""
        address = environment.pop("NOTIFY_SOCKET", "")
        period = environment.pop("WATCHDOG_USEC", "")
        meant = environment.pop("WATCHDOG_PID", str(os.getpid()))
        mine = period.isdecimal() and meant == str(os.getpid())
        return Notifier(address, int(period) / 1e6 if mine else 0.0)

    def ready(self) -> None:
        """The service is up, or has read its settings again."""
        self._send("READY=1")

    def status(self, line: str) -> None:
        """One line for `systemctl status`; the same line twice is sent once."""
        line = line.replace("\n", " ")
        if line != self._said:
            self._said = line
            self._send(f"STATUS={line}")

    def starting(self, seconds: float) -> None:
        """The start goes on: let it take so much longer."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def reloading(self) -> None:
        """Settings are being read again, until `ready`."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def alive(self, now: float) -> None:
        """Feed the watchdog; may be called as often as one likes."""
        if self._watchdog_s and now - self._alive_at >= self._watchdog_s / _SIGNS:
            self._alive_at = now
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """The service is about to end."""
        self._send("STOPPING=1")

    def keep(self, name: str, fd: int) -> None:
        """Have a descriptor kept for the next process of this service."""
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def forget(self, name: str) -> None:
        """Have the descriptors of this name kept no longer."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, assignments: str, *fds: int) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out,
        ):
            out.setblocking(False)
            out.connect(self._address)
            socket.send_fds(out, [assignments.encode()], fds)


def take_kept(environment: MutableMapping[str, str]) -> list[tuple[str, int]]:
    """(name, descriptor) of each that an earlier process of this service had kept; the variables are removed.

    They count for the process that $LISTEN_PID names alone: a child that inherited them by mistake gets none.
    """
    meant, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if meant != str(os.getpid()) or not count.isdecimal():
        return []
    fds = range(_FIRST_FD, _FIRST_FD + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    return [(name, fd) for name, fd in zip([*names, *[""] * len(fds)], fds, strict=False)]
