"""Page locks: as much as the limits allow, and in words how much that is, why not more, and what it costs."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkd.ipc.mapping import Mapping
from sparkd.ipc.memory import Region
from sparkd.supervisor.memlock import MemoryLock

GIB = 1 << 30
ARENA = 3 * GIB
NOBODY = 65534


class Kernel:
    """Locks up to `limit` bytes and no more; fails with `number` from then on."""

    def __init__(self, limit: int, number: int = errno.ENOMEM) -> None:
        self.limit = limit
        self.number = number
        self.locked: list[tuple[int, int]] = []

    def lock(self, offset: int, size: int) -> None:
        if sum(size for _, size in self.locked) + size > self.limit:
            raise OSError(self.number, os.strerror(self.number))
        self.locked.append((offset, size))


@pytest.fixture
def kernel(monkeypatch) -> Callable[..., Kernel]:
    def make(limit: int, number: int = errno.ENOMEM, told: int | None = None) -> Kernel:
        one = Kernel(limit, number)
        monkeypatch.setattr(Mapping, "lock", lambda self, offset, size: one.lock(offset, size))
        told_limit = limit if told is None else told
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (told_limit, told_limit))
        return one

    return make


def _swap(root: Path, size: int) -> Path:
    (root / "proc").mkdir()
    (root / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nSwapTotal: {size} kB\n")
    return root


def _locked(region: Region, root: Path = Path("/")) -> MemoryLock:
    lock = MemoryLock(region, True, root)
    for _ in lock.steps():
        pass
    return lock


@pytest.mark.parametrize("limit", [64 << 10, GIB, GIB + 12345, ARENA - 1])
def test_what_the_limit_allows_is_locked_and_the_words_say_how_much_and_what_it_costs(kernel, tmp_path, limit):
    one = kernel(limit)
    with Region.create(ARENA) as region:
        lock = _locked(region, _swap(tmp_path, 100))
    assert limit - (64 << 10) < lock.locked <= limit
    assert sum(size for _, size in one.locked) == lock.locked
    assert [offset for offset, _ in one.locked] == [sum(s for _, s in one.locked[:n]) for n in range(len(one.locked))]
    assert lock.note.startswith(
        f"{lock.locked} of {ARENA} bytes are locked, the limit on locked memory is {limit} bytes; "
        "the rest may be swapped out when memory is short, and a token that needs it then waits for the disk; "
    )
    assert lock.note.endswith('raise the limit (ulimit -l, LimitMEMLOCK=) or set memory.lock = "off"')
    assert "\n" not in lock.note


def test_without_a_limit_all_is_locked_and_nothing_needs_to_be_said(kernel, tmp_path):
    kernel(1 << 60, told=resource.RLIM_INFINITY)
    with Region.create(ARENA) as region:
        lock = _locked(region, tmp_path)
    assert (lock.locked, lock.note) == (ARENA, "")


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_a_lock_that_fails_half_way_for_another_reason_ends_there_and_says_so(kernel, tmp_path, number):
    kernel(GIB, number, told=resource.RLIM_INFINITY)
    with Region.create(ARENA) as region:
        lock = _locked(region, _swap(tmp_path, 100))
    assert lock.locked == GIB
    assert f"the kernel refuses more: {os.strerror(number)}" in lock.note


def test_a_machine_without_swap_is_told_that_nothing_is_lost(kernel, tmp_path):
    kernel(0)
    with Region.create(ARENA) as region:
        lock = _locked(region, _swap(tmp_path, 0))
    assert lock.locked == 0
    assert "this machine has no swap, so the rest stays in memory as well until there is some" in lock.note


def test_huge_pages_of_the_pool_need_no_lock(kernel, tmp_path):
    one = kernel(0)
    with Region.create(4096) as region:
        region.pooled = True
        lock = _locked(region, tmp_path)
    assert (lock.locked, lock.note, one.locked) == (4096, "", [])


def test_nothing_is_locked_where_that_is_not_wanted(kernel, tmp_path):
    one = kernel(1 << 60)
    with Region.create(4096) as region:
        lock = MemoryLock(region, False, tmp_path)
        assert list(lock.steps()) == []
    assert (lock.locked, lock.note, one.locked) == (0, 'memory.lock is "off"', [])


def test_before_the_weights_are_in_place_nothing_is_locked_and_that_is_said(kernel, tmp_path):
    one = kernel(1 << 60)
    with Region.create(4096) as region:
        lock = MemoryLock(region, True, tmp_path)
    assert (lock.locked, lock.note, one.locked) == (0, "locked once the weights are in place", [])


def test_the_soft_limit_is_raised_as_far_as_it_goes(monkeypatch, tmp_path):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1000, 5000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append((kind, limits)))
    with Region.create(4096) as region:
        next(MemoryLock(region, True, tmp_path).steps())
    assert raised == [(resource.RLIMIT_MEMLOCK, (5000, 5000))]


def test_locked_bytes_are_what_the_kernel_counts():
    def counted() -> int:
        return int(re.search(r"^VmLck:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10

    before = counted()
    with Region.create(32 << 10) as region:
        lock = _locked(region)
        assert counted() - before == lock.locked
        assert lock.locked == region.size or lock.note
    assert counted() == before


@pytest.mark.parametrize("limit", [64 << 10, 1 << 20, 5 << 20])
def test_as_much_is_locked_as_the_limit_allows_a_user_without_privileges(limit):
    """In a process of its own: root may lock everything, whatever the limit."""
    script = (
        "import os, resource\n"
        "from sparkd.ipc.memory import Region\n"
        "from sparkd.supervisor.memlock import MemoryLock\n"
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))\n"
        f"if os.getuid() == 0: os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "lock = MemoryLock(Region.create(4 << 20), True)\n"
        "for _ in lock.steps(): pass\n"
        "print(lock.locked, lock.note)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    locked, _, note = done.stdout.strip().partition(" ")
    assert min(limit, 4 << 20) - (128 << 10) <= int(locked) <= limit
    assert (note == "") == (limit >= 4 << 20)
    assert note == "" or str(limit) in note


def test_the_whole_arena_is_locked_where_nothing_forbids_it():
    if os.getuid() != 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] not in (-1, resource.RLIM_INFINITY):
        pytest.skip("this user may not lock memory without limit")
    with Region.create(4 << 20) as region:
        lock = _locked(region)
        assert (lock.locked, lock.note) == (4 << 20, "")
