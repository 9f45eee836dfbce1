"""Joins the arena's ordinary pages into transparent huge ones, behind the load.

The processor looks an address up once per 2 MiB instead of once per 4 KiB, which a stream of weights notices. The
kernel finds memory in one piece at once where there is some, and moves other pages out of the way where there is not,
at up to a hundredth of a second per huge page. So this happens while the daemon serves already; whoever reads or writes
the arena meanwhile notices nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from sparkd.ipc.mapping import HUGE_PAGE
from sparkd.ipc.memory import Region


class HugePages:
    """What of a region lies in huge pages: `bytes`, of which `kind` ("hugetlb", "transparent", "none").

    `note` says why it is not all.
    """

    def __init__(self, region: Region, wanted: bool) -> None:
        self.bytes = region.size if region.pooled else 0
        self.note = ""
        self._region = region
        self._wanted = wanted and not region.pooled
        if not region.pooled:
            self.note = "joined once the weights are in place" if wanted else 'memory.huge_pages is "off"'

    @property
    def kind(self) -> str:
        """What the huge pages are, as far as there are any."""
        if self._region.pooled:
            return "hugetlb"
        return "transparent" if self.bytes else "none"

    def steps(self) -> Iterator[None]:
        """Make all pages huge that the kernel makes huge, one at a step, once the weights are in place."""
        if not self._wanted:
            return
        mapping = self._region.mapping
        failure: OSError | None = None
        for page in range(self._region.size // HUGE_PAGE):
            try:
                mapping.make_huge(page)
                self.bytes += HUGE_PAGE
            except OSError as error:
                failure = error
                if error.errno not in (errno.EAGAIN, errno.EBUSY):
                    break
            yield
        self.bytes = max(self.bytes, mapping.huge_bytes())
        self.note = "" if self.bytes == self._region.size else _explain(self.bytes, self._region.size, failure)


def _explain(size: int, whole: int, failure: OSError | None) -> str:
    reasons = {
        errno.ENOMEM: "memory has no more free pieces of 2 MiB",
        errno.EINVAL: "this kernel joins no pages of shared memory (Linux 6.1 does)",
        errno.EAGAIN: "some pages were in use",
        errno.EBUSY: "some pages were in use",
    }
    reason = "the rest is no whole one" if failure is None else reasons.get(failure.errno or 0, str(failure.strerror))
    return f"{size} of {whole} bytes lie in huge pages: {reason}; the others cost some speed, nothing else"
