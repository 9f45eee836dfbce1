"""Joins the arena's ordinary pages into transparent huge ones, behind the load.

The processor looks an address up once per 2 MiB instead of once per 4 KiB, which a stream of weights notices. The
kernel finds memory in one piece at once where there is some, and moves other pages out of the way where there is not,
at up to a hundredth of a second per huge page. So this happens while the daemon serves already, in time that nobody
else wants; whoever reads or writes the arena meanwhile notices nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import threading

from sparkd.ipc.mapping import HUGE_PAGE
from sparkd.ipc.memory import Region

#: The least urgent there is.
_NICENESS = 19
_log = logging.getLogger(__name__)


class HugePages:
    """What of a region lies in huge pages: `bytes`, of which `kind` ("hugetlb", "transparent", "none").

    `note` says why it is not all; it is empty until that is known.
    """

    def __init__(self, region: Region, wanted: bool) -> None:
        self.bytes = region.size if region.pooled else 0
        self.note = "" if wanted or region.pooled else 'memory.huge_pages is "off"'
        self._region = region
        self._wanted = wanted
        self._cancelled = threading.Event()

    @property
    def kind(self) -> str:
        """What the huge pages are, as far as there are any."""
        if self._region.pooled:
            return "hugetlb"
        return "transparent" if self.bytes else "none"

    def join(self) -> None:
        """Make all pages huge that the kernel makes huge; for a thread of its own, after the load."""
        if self._region.pooled or not self._wanted:
            return
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        mapping = self._region.mapping
        failure: OSError | None = None
        try:
            mapping.advise_huge()
            for page in range(self._region.size // HUGE_PAGE):
                if self._cancelled.is_set():
                    return
                try:
                    mapping.make_huge(page)
                except OSError as error:
                    failure = error
                    if error.errno not in (errno.EAGAIN, errno.EBUSY):
                        break
                else:
                    self.bytes += HUGE_PAGE
        except OSError as error:
            failure = error
        self.bytes = max(self.bytes, mapping.huge_bytes())
        if self.bytes < self._region.size:
            self.note = _explain(self.bytes, self._region.size, failure)
            _log.warning("%s", self.note)

    def cancel(self) -> None:
        """Make `join` return soon; for another thread."""
        self._cancelled.set()


def _explain(size: int, whole: int, failure: OSError | None) -> str:
    reasons = {
        errno.ENOMEM: "memory has no more free pieces of 2 MiB",
        errno.EINVAL: "this kernel joins no pages of shared memory (Linux 6.1 does)",
        errno.EAGAIN: "some pages were in use",
        errno.EBUSY: "some pages were in use",
    }
    reason = "the region's end is none" if failure is None else reasons.get(failure.errno or 0, str(failure.strerror))
    return f"{size} of {whole} bytes lie in huge pages: {reason}; the others cost some speed, nothing else"
