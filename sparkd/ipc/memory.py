"""Shared memory without names: memfd regions that children inherit by descriptor.

The supervisor creates a region, maps it, and keeps the mapping for its whole life; children map the descriptor they
inherit. Nothing appears in a file system, so nothing is left behind when every process is gone.

A region is made of huge pages of the system's pool (hugetlb) where that is wanted and the pool has enough; otherwise of
ordinary pages, which the supervisor joins into transparent huge ones once they are filled.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkd.errors import BudgetError
from sparkd.ipc.mapping import HUGE_PAGE, Mapping

# The supervisor maps a region and computes nothing: it starts, and stays, without numpy.
if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


class Region:
    """A mapped memfd. Its size is sealed: a region that is mapped anywhere can neither shrink nor grow.

    `pooled`: it is made of huge pages of the system's pool, which are reserved for it and never swapped out.
    """

    def __init__(self, fd: int, size: int, writable: bool) -> None:
        self.fd = fd
        self.size = size
        self.writable = writable
        self.pooled = os.fstatvfs(fd).f_bsize == HUGE_PAGE
        self.mapping = Mapping(fd, size, writable)
        self._bytes = self.mapping.bytes

    @staticmethod
    def create(size: int, name: str = "sparkd-arena", pool: bool = False) -> Region:
        """Make a zeroed region of `size` bytes; `name` only shows in /proc. BudgetError when the kernel refuses.

        `pool`: of huge pages of the system's pool, if `size` is a multiple of those and the pool has so many.
        """
        if pool and size % HUGE_PAGE == 0:
            with contextlib.suppress(OSError):
                return _create(size, name, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        try:
            return _create(size, name, 0)
        except OSError as error:
            raise BudgetError(
                f"cannot make a shared memory region of {size} bytes: {error.strerror}",
                where=name,
                fix="check the limits on address space and memory (ulimit -v, vm.overcommit_memory)",
            ) from None

    @staticmethod
    def map(fd: int, writable: bool = True) -> Region:
        """Map a region whose descriptor was inherited. OSError when `fd` is no such descriptor."""
        return Region(fd, os.fstat(fd).st_size, writable)

    @property
    def address(self) -> int:
        """Where the region begins in this process, for native code."""
        return self.mapping.address

    @property
    def bytes(self) -> memoryview:
        """All of it, writable when the region is; begins at a page."""
        return self._bytes

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes `offset : offset + size`, writable when the region is. IndexError outside the region."""
        self._inside(offset, size)
        return self._bytes[offset : offset + size]

    def array(self, offset: int, shape: int | tuple[int, ...], dtype: DTypeLike = "u1") -> NDArray[Any]:
        """A numpy view of the region's own bytes. IndexError outside the region."""
        import numpy as np

        kind = np.dtype(dtype)
        count = int(np.prod(shape))
        self._inside(offset, count * kind.itemsize)
        return np.frombuffer(self._bytes, kind, count, offset).reshape(shape)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` to byte `offset`, without the GIL. BudgetError when there is no memory for it.

        By way of the descriptor: into pages that nobody used yet this costs half of what a write through the mapping
        does, for the kernel neither zeroes them nor takes a fault for each, and running out of memory is an error
        instead of a signal. Pages of the pool know no such writes, but take what is missing from it beforehand.
        """
        self._inside(offset, len(data))
        done = 0
        try:
            if self.pooled and len(data):
                os.posix_fallocate(self.fd, offset, len(data))
                self.array(offset, len(data))[:] = data
                return
            while done < len(data):
                done += os.pwrite(self.fd, data[done:], offset + done)
        except OSError as error:
            what = f"no memory for bytes {offset} to {offset + len(data)} of {self.size}: {error.strerror}"
            fix = 'the pool of huge pages gives less than it has: set memory.huge_pages = "off"' if self.pooled else ""
            raise BudgetError(what, where="shared memory", fix=fix) from None

    def allocate(self) -> None:
        """Take the memory that the region has not used yet. BudgetError when there is not so much."""
        try:
            os.posix_fallocate(self.fd, 0, self.size)
        except OSError as error:
            raise BudgetError(f"no memory for all {self.size} bytes: {error.strerror}", where="shared memory") from None

    def overwrite(self, offset: int, data: memoryview) -> None:
        """Copy `data` to byte `offset`, where memory is (`allocate`), without the GIL.

        Unlike `write` it does not wait for others that write to the region at the same time.
        """
        import numpy as np

        self.array(offset, len(data))[:] = np.frombuffer(data, np.uint8)

    def _inside(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise IndexError(f"bytes {offset} to {offset + size} are outside a region of {self.size}")

    def close(self) -> None:
        """Give up the descriptor and the mapping; the mapping itself goes with the last view of it."""
        os.close(self.fd)
        del self.mapping, self._bytes

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _create(size: int, name: str, kind: int) -> Region:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | kind)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        if kind & os.MFD_HUGETLB:
            # A cgroup may forbid what the pool has: its limit shows only when a page is taken.
            os.posix_fallocate(fd, 0, HUGE_PAGE)
        return Region(fd, size, writable=True)
    except OSError:
        os.close(fd)
        raise
