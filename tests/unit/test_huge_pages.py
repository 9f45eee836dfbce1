"""Huge pages: from the pool, else joined behind the load, else ordinary ones; what was got is told, nothing changes."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filled_arena import filled, regions_closed

from sparkd.errors import BudgetError
from sparkd.ipc import mapping, memory
from sparkd.ipc.mapping import HUGE_PAGE, Mapping
from sparkd.ipc.memory import Region
from sparkd.supervisor.huge_pages import HugePages

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
SIZE = 4 * HUGE_PAGE


def _joined(region: Region) -> HugePages:
    pages = HugePages(region, wanted=True)
    for _ in pages.steps():
        pass
    return pages


def _can_join() -> bool:
    with Region.create(HUGE_PAGE) as region:
        try:
            region.mapping.make_huge(0)
        except OSError:
            return False
        return True


needs_joining = pytest.mark.skipif(not _can_join(), reason="this kernel joins no pages of shared memory")


@pytest.mark.parametrize("size", [1, 5000, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_every_mapping_begins_where_a_huge_page_can(size):
    with Region.create(size) as one, Region.map(os.dup(one.fd), writable=False) as other:
        assert one.address % HUGE_PAGE == other.address % HUGE_PAGE == 0
        one.view(size - 1, 1)[:] = b"x"
        assert bytes(other.view(size - 1, 1)) == b"x"


def test_address_space_that_is_no_longer_used_is_given_back():
    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if "memfd:sparkd-arena" in line]

    gc.collect()  # What earlier tests left in cycles would go in between.
    before, size = mapped(), int(Path("/proc/self/statm").read_text().split()[0])
    for _ in range(20):
        with Region.create(64 << 20):
            assert len(mapped()) == len(before) + 1
    assert mapped() == before
    grown = int(Path("/proc/self/statm").read_text().split()[0]) - size
    assert grown * os.sysconf("SC_PAGESIZE") < 64 << 20


@needs_joining
def test_pages_are_joined_without_a_change_to_what_they_hold():
    with Region.create(SIZE) as region, Region.map(os.dup(region.fd), writable=False) as reader:
        data = os.urandom(SIZE)
        region.write(0, memoryview(data))
        assert bytes(reader.view(0, SIZE)) == data
        pages = _joined(region)
        assert (pages.bytes, pages.kind, pages.note) == (SIZE, "transparent", "")
        assert region.mapping.huge_bytes() == reader.mapping.huge_bytes() == SIZE
        assert bytes(reader.view(0, SIZE)) == data
        region.write(HUGE_PAGE - 3, memoryview(b"across"))
        assert bytes(reader.view(HUGE_PAGE - 3, 6)) == b"across"


@needs_joining
def test_who_writes_and_reads_meanwhile_notices_nothing():
    with Region.create(SIZE) as region, Region.map(os.dup(region.fd), writable=False) as reader:
        done = threading.Event()
        wrong = []

        def write() -> None:
            number = 0
            while not done.is_set():
                number += 1
                at = number * 4093 % (SIZE - 8)
                region.write(at, memoryview(number.to_bytes(8, "little")))
                if bytes(reader.view(at, 8)) != number.to_bytes(8, "little"):
                    wrong.append(number)

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(5):
            pages = _joined(region)
        done.set()
        writer.join()
        assert wrong == []
        assert pages.bytes + 2 * HUGE_PAGE >= SIZE


@needs_joining
def test_a_filled_arena_keeps_every_byte(model_path):
    with regions_closed():
        one = filled(model_path("qwen35moe-tiny-s1-q4_k_m"))
        before = bytes(one.region.view(0, one.region.size))
        assert _joined(one.region).bytes == one.region.size
        assert bytes(one.region.view(0, one.region.size)) == before


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOMEM, "memory has no more free pieces of 2 MiB"),
        (errno.EINVAL, "this kernel joins no pages of shared memory"),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_what_the_kernel_refuses_half_way_is_told_and_costs_nothing_else(monkeypatch, number, said):
    def refuse(self: Mapping, page: int) -> None:
        if page >= 1:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Mapping, "make_huge", refuse)
    monkeypatch.setattr(Mapping, "huge_bytes", lambda self: 0)
    with Region.create(SIZE) as region:
        region.write(0, memoryview(b"weights"))
        pages = _joined(region)
        assert pages.bytes == HUGE_PAGE
        assert pages.note.startswith(f"{HUGE_PAGE} of {SIZE} bytes lie in huge pages: {said}")
        assert bytes(region.view(0, 7)) == b"weights"


def test_a_page_that_is_in_use_is_passed_over(monkeypatch):
    def busy(self: Mapping, page: int) -> None:
        if page == 1:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(Mapping, "make_huge", busy)
    monkeypatch.setattr(Mapping, "huge_bytes", lambda self: 0)
    with Region.create(SIZE) as region:
        pages = _joined(region)
    assert pages.bytes == SIZE - HUGE_PAGE
    assert "some pages were in use" in pages.note


def test_nothing_is_tried_where_it_is_not_wanted(monkeypatch):
    monkeypatch.setattr(Mapping, "make_huge", lambda self, page: pytest.fail("tried"))
    with Region.create(SIZE) as region:
        pages = HugePages(region, wanted=False)
        assert list(pages.steps()) == []
        assert (pages.bytes, pages.kind, pages.note) == (0, "none", 'memory.huge_pages is "off"')


def _free_pool_pages() -> int:
    return int(POOL.read_text()) if POOL.exists() else 0


@pytest.mark.skipif(_free_pool_pages() < 4, reason="the pool of huge pages has less than 4 free (vm.nr_hugepages)")
def test_a_pool_that_has_enough_is_used():
    free = _free_pool_pages()
    with Region.create(SIZE, pool=True) as region, Region.map(os.dup(region.fd)) as other:
        assert region.pooled and other.pooled
        data = os.urandom(SIZE - 1000)
        region.write(1000, memoryview(data))
        assert bytes(other.view(1000, len(data))) == data
        assert not region.array(0, 1000).any()
        pages = _joined(other)
        assert (pages.bytes, pages.kind, pages.note) == (SIZE, "hugetlb", "")
        assert region.mapping.huge_bytes() == SIZE
        assert _free_pool_pages() == free - 4
        code = "import sys; from sparkd.ipc.memory import Region; r = Region.map(int(sys.argv[1])); print(r.pooled)"
        child = [sys.executable, "-c", code, str(region.fd)]
        assert subprocess.run(child, pass_fds=[region.fd], capture_output=True, check=True).stdout == b"True\n"
    assert _free_pool_pages() == free


def test_a_pool_that_lacks_a_page_is_left_alone():
    size = (_free_pool_pages() + 1) * HUGE_PAGE
    with Region.create(size, pool=True) as region:
        assert not region.pooled
        region.write(size - 5, memoryview(b"bytes"))
        assert bytes(region.view(size - 5, 5)) == b"bytes"


def test_a_kernel_without_a_pool_gives_ordinary_pages(monkeypatch):
    made = os.memfd_create
    kinds = []

    def without(name: str, flags: int) -> int:
        kinds.append(bool(flags & os.MFD_HUGETLB))
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOSYS, "Function not implemented")
        return made(name, flags)

    monkeypatch.setattr(memory.os, "memfd_create", without)
    with Region.create(SIZE, pool=True) as region:
        assert kinds == [True, False]
        assert not region.pooled


def test_a_pool_that_this_process_may_not_use_is_left_alone(monkeypatch):
    def forbidden(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = os.memfd_create
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(memory.os, "memfd_create", lambda name, flags: made(name, flags & ~os.MFD_HUGETLB & 0x3FFFFFF))
    monkeypatch.setattr(memory.os, "posix_fallocate", forbidden)
    with Region.create(SIZE, pool=True) as region:
        region.write(5, memoryview(b"bytes"))
        assert bytes(region.view(5, 5)) == b"bytes"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_write_that_the_pool_has_no_page_for_is_an_error_not_a_signal(monkeypatch):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Region.create(SIZE) as region:
        monkeypatch.setattr(memory.os, "posix_fallocate", full)
        region.pooled = True
        with pytest.raises(BudgetError, match=f"no memory for bytes 10 to 13 of {SIZE}: No space left on device"):
            region.write(10, memoryview(b"abc"))


def test_a_write_to_pages_of_the_pool_goes_through_the_mapping(monkeypatch):
    with Region.create(SIZE) as region:
        monkeypatch.setattr(memory.os, "pwrite", lambda *given: pytest.fail("the pool takes no writes"))
        region.pooled = True
        region.write(12345, memoryview(b"weights"))
        assert bytes(region.view(12345, 7)) == b"weights"


def test_descriptor_and_addresses_are_given_back_when_the_kernel_refuses_the_mapping(monkeypatch):
    before = len(list(Path("/proc/self/fd").iterdir()))
    real = mapping._libc.mmap

    class Refusing:
        def __getattr__(self, name):
            return getattr(real_libc, name)

        @staticmethod
        def mmap(start, *rest):
            return real(start, *rest) if start is None else mapping._FAILED

    real_libc = mapping._libc
    monkeypatch.setattr(mapping, "_libc", Refusing())
    with pytest.raises(BudgetError, match="cannot make a shared memory region"):
        Region.create(SIZE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
