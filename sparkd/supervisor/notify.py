"""Tells systemd how the service is doing (sd_notify); does nothing where nobody listens."""

from __future__ import annotations

import contextlib
import os
import socket


class Notifier:
    """Sends assignments to the socket that $NOTIFY_SOCKET names."""

    def __init__(self, address: str | None = None) -> None:
        """`address` is a path, or a name of the abstract namespace after an @; None: what the environment says."""
        given = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self._address = "\0" + given[1:] if given.startswith("@") else given
        self._said = ""

    def ready(self) -> None:
        """The service is up."""
        self._send("READY=1")

    def status(self, line: str) -> None:
        """One line for `systemctl status`; the same line twice is sent once."""
        if line != self._said:
            self._said = line
            self._send(f"STATUS={line}")

    def stopping(self) -> None:
        """The service is about to end."""
        self._send("STOPPING=1")

    def _send(self, assignment: str) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out,
        ):
            out.setblocking(False)
            out.sendto(assignment.replace("\n", " ").encode(), self._address)
