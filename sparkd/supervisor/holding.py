"""Holds the filled arena in memory the best way there is: in huge pages, and locked.

Both are asked of the kernel in the supervisor, whose mapping lives as long as the arena, and in this order: a page that
is joined with others leaves the mappings of all processes, and with the supervisor's its lock. A thread does it, since
single calls take long where memory is short; it gives way to threads that compute.
"""

from __future__ import annotations

import logging
import os
import threading
from itertools import chain

from sparkd.config import MemorySettings
from sparkd.ipc.memory import Region
from sparkd.supervisor.huge_pages import HugePages
from sparkd.supervisor.memlock import MemoryLock

_NICENESS = 10
_log = logging.getLogger(__name__)


class Holding:
    """`pages` and `lock` tell what has been reached so far."""

    def __init__(self, region: Region, settings: MemorySettings) -> None:
        self.pages = HugePages(region, settings.huge_pages == "auto")
        self.lock = MemoryLock(region, settings.lock == "auto")
        self._thread = threading.Thread(target=self._hold, name="holding")
        self._closed = threading.Event()

    def begin(self) -> None:
        """The weights are in place. Does nothing when called again."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop where it is."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _hold(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        for _ in chain(self.pages.steps(), self.lock.steps()):
            if self._closed.is_set():
                return
        for note in (self.pages.note, self.lock.note):
            if note:
                _log.warning("%s", note)
