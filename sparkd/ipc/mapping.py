"""A descriptor mapped where huge pages can be: the part of shared memory that Python's own mmap cannot do.

The processor uses a huge page only where address and offset agree modulo its size, which the kernel looks after in few
configurations; so the address is chosen here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Any

#: Bytes of a huge page, of the pool as well as transparent.
HUGE_PAGE = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value
_HUGE_IN_SMAPS = re.compile(r"^(?:ShmemPmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB", re.MULTILINE)


def _kernel() -> Any:
    """The C library's calls, with the types of what they take."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    place = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [*place, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [*place, ctypes.c_int]
    libc.munmap.argtypes = libc.mlock.argtypes = place
    return libc


_libc = _kernel()


class Mapping:
    """`size` bytes of a shared descriptor at `address`. `bytes`, and every view of it, keeps the mapping alive."""

    def __init__(self, fd: int, size: int, writable: bool) -> None:
        """OSError when the kernel refuses."""
        self.size = size
        self.address = _map(fd, size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        block = (ctypes.c_char * size).from_address(self.address)
        weakref.finalize(block, _libc.munmap, self.address, size).atexit = False
        whole = memoryview(block).cast("B")
        self.bytes = whole if writable else whole.toreadonly()

    def lock(self, offset: int, size: int) -> None:
        """Page-lock bytes; places that hold nothing yet are filled with zeros. OSError when the kernel refuses."""
        _check(_libc.mlock(self.address + offset, size), "mlock")

    def make_huge(self, page: int) -> None:
        """Move what huge page number `page` of the mapping holds into one piece of memory. OSError when that fails.

        Nothing changes for whoever reads or writes there meanwhile. Where nothing is yet, zeros are.
        """
        self.bytes[page * HUGE_PAGE]
        _check(_libc.madvise(self.address + page * HUGE_PAGE, HUGE_PAGE, _MADV_COLLAPSE), "madvise")

    def huge_bytes(self) -> int:
        """How many bytes lie in huge pages, by the kernel's account, which knows only what this process has used."""
        for offset in range(0, self.size, HUGE_PAGE):
            self.bytes[offset]
        smaps = Path("/proc/self/smaps").read_text()
        own = re.search(rf"^{self.address:08x}-.*\n(?:\w+:.*\n)+", smaps, re.MULTILINE)
        return sum(int(size) * 1024 for size in _HUGE_IN_SMAPS.findall(own[0])) if own is not None else 0


def _map(fd: int, size: int, protection: int) -> int:
    """Map at a multiple of a huge page: take more addresses than needed, and give back those on both sides."""
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    taken = _checked_address(_libc.mmap(None, length + HUGE_PAGE, 0, flags, -1, 0))
    start = -(-taken // HUGE_PAGE) * HUGE_PAGE
    try:
        _checked_address(_libc.mmap(start, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except OSError:
        _libc.munmap(taken, length + HUGE_PAGE)
        raise
    if start > taken:
        _libc.munmap(taken, start - taken)
    _libc.munmap(start + length, taken + HUGE_PAGE - start)
    return start


def _checked_address(address: int | None) -> int:
    _check(-1 if address == _FAILED else 0, "mmap")
    assert address is not None
    return address


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} ({call})")
