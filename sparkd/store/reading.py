"""Reads a model's files past the page cache (O_DIRECT) where the file system allows, and says where it does not.

What is read goes to the arena, so a second copy of it in the page cache would only push other things out of memory.
Direct reads begin and end at multiples of a block, weights at multiples of 32 bytes. So whole blocks are read: straight
to their place, if there is room for them and they lie alike there, or into a buffer, of which the part that was asked
for is handed out. A file system without direct reads is read through the page cache, which is told at once to let go.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from typing import Any

from sparkd.errors import ModelFileError
from sparkd.gguf.model_file import Identity, Shard

#: Bytes of a reader's buffer, hence of one read. It stays in the processor's cache on its way to the arena.
BUFFER = 1 << 20
#: Blocks that are tried where the kernel tells none.
_USUAL_BLOCKS = (512, 4096)
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


@dataclass(slots=True)
class Way:
    """How a file is read: in blocks of `block` bytes past the page cache, or (0) through it, because of `note`."""

    block: int
    note: str = ""

    def describe(self) -> str:
        """One line for people."""
        if self.block:
            return f"read past the page cache, in blocks of {self.block} bytes"
        return f"read through the page cache: {self.note}"


class ShardFile:
    """One shard, open for reading, as long as it is the file that its header was read from. For several threads."""

    def __init__(self, shard: Shard) -> None:
        """ModelFileError when it cannot be opened or is another file by now (names both identities)."""
        self._shard = shard
        self.where = str(shard.path)
        try:
            self._cached = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelFileError(f"cannot be opened: {error.strerror}", where=self.where) from None
        self._direct = -1
        self.way = Way(0)
        try:
            self.check()
            self.way = self._find_way()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it; what went through the page cache leaves it."""
        if self.way.note:
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._cached)
        if self._direct >= 0:
            os.close(self._direct)

    @property
    def identity(self) -> Identity:
        """What the file is, unless it has changed."""
        return self._shard.identity

    @property
    def direct(self) -> int:
        """The descriptor of direct reads."""
        return self._direct

    def check(self) -> None:
        """ModelFileError when the file has changed since its header was read, even while it is open here."""
        found = Identity.of(os.fstat(self._cached))
        if found != self._shard.identity:
            raise ModelFileError(
                f"is not the file that was opened first: now {_words(found)}, then {_words(self._shard.identity)}",
                where=self.where,
                fix="restart the daemon to serve the new file",
            )

    def read(self, offset: int, size: int, buffer: memoryview) -> memoryview:
        """Bytes from `offset` on, at least one and at most `size`, as part of `buffer` (see `new_buffer`).

        ModelFileError: the file ends before `offset`, or cannot be read.
        """
        block = self.way.block
        before = offset % block if block else 0
        wanted = min(before + size, len(buffer))
        length = -(-wanted // block) * block if block else wanted
        n = self._read(buffer[:length], offset - before, wanted - before, offset)
        if n is None:
            return self.read(offset, size, buffer)
        if not block:
            os.posix_fadvise(self._cached, offset, n, os.POSIX_FADV_DONTNEED)
        if n <= before:
            raise self._ends_early(offset, size)
        return buffer[before : min(n, wanted)]

    def straight(self, offset: int, size: int, at: int) -> tuple[int, int, int, int] | None:
        """How to read `size` bytes from `offset` on straight to a place that begins `at` bytes behind a page.

        Descriptor, first byte, bytes that are needed from there on, bytes to ask for: whole blocks, so that the rest of
        the first and the last is read, too. None: that cannot be; file and memory must lie alike in blocks.
        """
        block = self.way.block
        if not block or (at - offset) % block:
            return None
        before = offset % block
        return self._direct, offset - before, before + size, before + size + -(at + size) % block

    def read_straight(self, offset: int, size: int, memory: memoryview, at: int) -> bool:
        """Read `size` bytes from `offset` on to `memory[at:]`, and with them the rest of their first and last block.

        False, and nothing is done: that cannot be. `memory` begins at a page; file and memory must lie alike in blocks.
        ModelFileError: the file ends early, or cannot be read.
        """
        straight = self.straight(offset, size, at)
        if straight is None:
            return False
        _, first, needed, asked = straight
        start = at - (offset - first)
        place = memory[start : start + asked]
        done = 0
        while done < needed:
            n = self._read(place[done:], first + done, size, offset)
            if n is None:
                return False
            if done + n < needed:
                n -= n % self.way.block
                if not n:
                    raise self._ends_early(offset, size)
            done += n
        return True

    def _read(self, memory: memoryview, first: int, size: int, offset: int) -> int | None:
        """One read, from byte `first` on, for `size` bytes at `offset`; how much came.

        None: a direct read was refused, and `way` is another from now on.
        """
        try:
            return os.preadv(self._direct if self.way.block else self._cached, [memory], first)
        except OSError as error:
            if self.way.block and error.errno == errno.EINVAL:
                self.way = Way(0, f"a direct read of {len(memory)} bytes at byte {first} was refused")
                return None
            place = f"{size} bytes at byte {offset}"
            raise ModelFileError(f"cannot read {place}: {error.strerror}", where=self.where) from None

    def _ends_early(self, offset: int, size: int) -> ModelFileError:
        return ModelFileError(
            f"ends early: {size} bytes at byte {offset} are missing",
            where=self.where,
            fix="the file was cut while it was read: copy or download it again",
        )

    def _find_way(self) -> Way:
        try:
            self._direct = os.open(f"/proc/self/fd/{self._cached}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            return Way(0, f"the file system takes no direct reads ({error.strerror})")
        told = direct_block(self._cached)
        if told == 0:
            return Way(0, "the file system takes no direct reads of this file")
        if told is not None and told <= mmap.PAGESIZE:
            return Way(told)
        buffer = new_buffer()
        for block in _USUAL_BLOCKS:
            try:
                os.preadv(self._direct, [buffer[:block]], block)
            except OSError:
                continue
            return Way(block)
        return Way(0, f"direct reads in blocks of {_USUAL_BLOCKS[-1]} bytes are refused")


def new_buffer() -> memoryview:
    """A reader's buffer: anonymous memory begins at a page, which suits every block up to that size."""
    return memoryview(mmap.mmap(-1, BUFFER))


def direct_block(fd: int) -> int | None:
    """The block of direct reads, in memory and in the file, by statx (Linux 6.1); 0: none, None: it does not say."""
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "statx"):
        return None
    answer = (ctypes.c_uint32 * 64)()
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0 or not answer[0] & _STATX_DIOALIGN:
        return None
    # stx_dio_mem_align and stx_dio_offset_align stand at bytes 152 and 156 of struct statx.
    memory, offset = answer[38], answer[39]
    return max(memory, offset)


def _words(identity: Identity) -> str:
    seconds, nanoseconds = divmod(identity.mtime_ns, 10**9)
    place = f"device {identity.device} inode {identity.inode}"
    return f"{place} size {identity.size} modified {seconds}.{nanoseconds:09d}"
