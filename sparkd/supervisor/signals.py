"""Signals as facts that a loop reads: handlers only note them, and a descriptor wakes the loop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from types import FrameType, TracebackType


class Signals:
    """SIGTERM and SIGINT ask to stop, each one more urgently; SIGHUP asks to read the settings again.

    On a terminal SIGHUP means that the terminal is gone, and asks to stop.
    """

    def __init__(self) -> None:
        self.stops: list[str] = []
        self.reload = False
        self._hangup_stops = os.isatty(2)
        self._wake, self.socket = socket.socketpair()
        for end in (self._wake, self.socket):
            end.setblocking(False)

    def clear(self) -> None:
        """Let `socket` be unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            self.socket.recv(4096)

    def __enter__(self) -> Signals:
        """Handle them from here on."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._before = [(number, signal.signal(number, self._note)) for number in numbers]
        self._waker = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._waker)
        for number, handler in self._before:
            signal.signal(number, handler)

    def close(self) -> None:
        """Give up the descriptors."""
        self._wake.close()
        self.socket.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and not self._hangup_stops:
            self.reload = True
        else:
            self.stops.append(signal.Signals(number).name)
