"""Page-locks the arena, piece by piece, as far as the limits allow.

A lock dies with the process that made it, so the supervisor makes it: it lives as long as the arena.
"""

from __future__ import annotations

import ctypes
import errno
import resource
from typing import Any

from sparkd.ipc.memory import Region

_PIECE = 256 << 20
_SMALLEST = 64 << 10


class MemoryLock:
    """`locked` bytes of a region are locked; `advance` locks the next piece; `note` says why it is not all."""

    def __init__(self, region: Region) -> None:
        self.locked = 0
        self.note = ""
        self._region = region
        self._piece = _PIECE
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))

    def advance(self) -> bool:
        """Lock one more piece; false when there is nothing left to do."""
        size = min(self._piece, self._region.size - self.locked)
        if size == 0:
            return False
        first = ctypes.c_char.from_buffer(self._region.view(self.locked, size))
        if self._libc.mlock(ctypes.byref(first), ctypes.c_size_t(size)) == 0:
            self.locked += size
            return True
        problem = ctypes.get_errno()
        if problem not in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
            raise OSError(problem, "mlock")
        self._piece = size // 2 // _SMALLEST * _SMALLEST
        if self._piece:
            return True
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        self.note = (
            f"{self.locked} of {self._region.size} bytes are locked, the rest may be swapped out: the limit on locked"
            f' memory is {limit} bytes; raise it (ulimit -l, LimitMEMLOCK=) or set memory.lock = "off"'
        )
        return False
