"""The threads that read what a step waits for: whole jobs, told once, and what cannot be had is said."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import astuple

import pytest

from sparkd.gguf.model_file import Identity
from sparkd.ipc.directory import Directory
from sparkd.ipc.memory import Region
from sparkd.store._readers import Readers

SIZE = 1 << 20
CONTENT = os.urandom(SIZE)
PATIENCE_S = 60.0


@pytest.fixture
def fd(tmp_path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(SIZE) as region:
        yield region


def _files(*fds: int) -> dict[int, tuple[int, int, int, int]]:
    return {fd: astuple(Identity.of(os.fstat(fd))) for fd in fds}


def _ended(readers: Readers, count: int) -> dict[int, bool]:
    found: dict[int, bool] = {}
    while len(found) < count:
        ended = readers.ended()
        assert ended, "closed"
        found |= dict(ended)
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_each_job_ends_once_with_all_of_its_pieces_in_place(fd, region, threads):
    readers = Readers(threads, _files(fd))
    pieces = [(fd, at, 1000, 1024, region.address + at) for at in range(0, SIZE, 4096)]
    for job in range(0, len(pieces), 4):
        readers.begin(job, pieces[job : job + 4])
    assert _ended(readers, len(pieces) // 4) == dict.fromkeys(range(0, len(pieces), 4), True)
    readers.close()
    assert readers.ended() == []
    for at in range(0, SIZE, 4096):
        assert bytes(region.view(at, 1024)) == CONTENT[at : at + 1024]
        assert not any(region.view(at + 1024, 3072))


def test_a_file_may_end_within_the_last_block_but_not_before_what_is_needed(fd, region):
    readers = Readers(2, _files(fd))
    last = SIZE - 100
    readers.begin(1, [(fd, last, 100, 512, region.address)])
    readers.begin(2, [(fd, 0, 10, 10, region.address + 4096), (fd, last, 101, 512, region.address)])
    readers.begin(3, [(-1, 0, 10, 10, region.address)])
    assert _ended(readers, 3) == {1: True, 2: False, 3: False}
    assert bytes(region.view(0, 100)) == CONTENT[last:]
    readers.close()


def test_closing_wakes_who_waits_and_jobs_are_not_empty():
    readers = Readers(2, {})
    waiting = threading.Thread(target=readers.ended)
    waiting.start()
    with pytest.raises(ValueError, match="without pieces"):
        readers.begin(1, [])
    readers.close()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    with pytest.raises(ValueError, match="threads"):
        Readers(0, {})


def test_who_waits_for_a_job_is_told_before_it_ends_and_only_if_all_of_it_is_there(fd, region):
    directory = Directory.create(region, 512 << 10, layers=1, experts=8)
    readers = Readers(2, _files(fd))
    for slot, needed in ((3, 1000), (5, 1001)):
        piece = fd, SIZE - 1000, needed, needed, region.address + 4096 * slot
        rung = directory.rung()
        readers.begin(slot, [piece, (fd, 0, 10, 10, region.address)], directory.told_at(slot, 7))
        assert _ended(readers, 1) == {slot: needed == 1000}
        assert directory.holds(slot, 7) == (needed == 1000)
        assert directory.rung() == rung + (needed == 1000)
    readers.close()


def test_a_file_that_has_changed_meanwhile_is_not_what_was_asked_for(fd, region, tmp_path):
    readers = Readers(1, _files(fd))
    os.utime(tmp_path / "file", ns=(1, 1))
    readers.begin(1, [(fd, 0, 10, 10, region.address)])
    assert _ended(readers, 1) == {1: False}
    readers.close()
    strange = Readers(1, {})
    strange.begin(1, [(fd, 0, 10, 10, region.address)])
    assert _ended(strange, 1) == {1: False}
    strange.close()


def test_what_is_read_ahead_comes_after_all_that_somebody_waits_for_and_can_be_hurried_or_given_up(fd, region):
    readers = Readers(1, _files(fd))
    piece = fd, 0, SIZE, SIZE, region.address
    readers.begin(0, [piece] * 300)  # long enough for what follows here
    for job in (1, 2, 3):
        readers.begin(job, [piece], ahead=True)
    assert readers.withdraw(2)
    assert not readers.withdraw(2)
    readers.hurry(3)
    assert not readers.withdraw(3)
    assert list(_ended(readers, 3)) == [0, 3, 1]
    assert not readers.withdraw(1)
    readers.close()
