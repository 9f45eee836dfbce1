"""Page-locks the arena, piece by piece, as far as the limits allow, once it is filled.

A lock dies with the process that made it, so the supervisor makes it: it lives as long as the arena. Before the load it
would fill the arena with zeros ahead of the weights. Huge pages of the pool need no lock: they are never swapped out.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from sparkd.ipc.memory import Region

_PIECE = 256 << 20
_SMALLEST = 64 << 10


class MemoryLock:
    """`locked` bytes of a region are locked; `note` says why it is not all. /proc is looked up under `root`."""

    def __init__(self, region: Region, wanted: bool, root: Path = Path("/")) -> None:
        self.locked = region.size if region.pooled else 0
        self.note = ""
        self._region = region
        self._wanted = wanted and not region.pooled
        self._root = root
        if not region.pooled:
            self.note = "locked once the weights are in place" if wanted else 'memory.lock is "off"'

    def steps(self) -> Iterator[None]:
        """Lock what the limits allow, one piece at a step, once the weights are in place."""
        if not self._wanted:
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        piece = _PIECE
        while size := min(piece, self._region.size - self.locked):
            try:
                self._region.mapping.lock(self.locked, size)
                self.locked += size
            except OSError as error:
                piece = size // 2 // _SMALLEST * _SMALLEST
                if not piece:
                    self.note = self._explain(error)
                    return
            yield
        self.note = ""

    def _explain(self, error: OSError) -> str:
        """How much is locked, why no more, what that costs, and what to do."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        if limit != resource.RLIM_INFINITY and error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
            reason = f"the limit on locked memory is {limit} bytes"
        else:
            reason = f"the kernel refuses more: {error.strerror}"
        if self._swap_bytes():
            cost = "the rest may be swapped out when memory is short, and a token that needs it then waits for the disk"
        else:
            cost = "this machine has no swap, so the rest stays in memory as well until there is some"
        return (
            f"{self.locked} of {self._region.size} bytes are locked, {reason}; {cost}; "
            'raise the limit (ulimit -l, LimitMEMLOCK=) or set memory.lock = "off"'
        )

    def _swap_bytes(self) -> int:
        for line in (self._root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "SwapTotal":
                return int(value.split()[0]) * 1024
        return 0
