"""The arena is joined to huge pages, then locked, behind the load; and stays locked."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from sparkd.config import MemorySettings
from sparkd.ipc.mapping import HUGE_PAGE, Mapping
from sparkd.ipc.memory import Region
from sparkd.supervisor.holding import Holding

SIZE = 3 * HUGE_PAGE


@pytest.fixture
def region():
    with Region.create(SIZE) as region:
        yield region


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What is asked of the kernel, which does everything at once."""
    made: list[str] = []
    monkeypatch.setattr(Mapping, "make_huge", lambda self, page: made.append(f"join {page}"))
    monkeypatch.setattr(Mapping, "lock", lambda self, offset, size: made.append(f"lock {size}"))
    return made


def _finish(one: Holding) -> None:
    one.begin()
    one._thread.join()


def test_pages_are_joined_before_they_are_locked(region, calls):
    one = Holding(region, MemorySettings())
    assert calls == []
    _finish(one)
    assert calls == ["join 0", "join 1", "join 2", f"lock {SIZE}"]
    assert (one.pages.bytes, one.pages.note, one.lock.locked, one.lock.note) == (SIZE, "", SIZE, "")
    one.begin()
    one.close()
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lock": "off"}, ["join 0", "join 1", "join 2"]),
        ({"huge_pages": "off"}, [f"lock {SIZE}"]),
        ({"lock": "off", "huge_pages": "off"}, []),
    ],
)
def test_only_what_is_wanted_is_done(region, calls, given, expected):
    one = Holding(region, MemorySettings(**given))
    _finish(one)
    assert calls == expected


def test_a_stop_ends_it_where_it_is(region, monkeypatch):
    at_work, go_on = threading.Event(), threading.Event()
    done = []

    def join(self: Mapping, page: int) -> None:
        done.append(page)
        at_work.set()
        go_on.wait()

    monkeypatch.setattr(Mapping, "make_huge", join)
    one = Holding(region, MemorySettings())
    one.begin()
    at_work.wait()
    one._closed.set()
    go_on.set()
    one.close()
    assert done == [0]
    assert one.lock.locked == 0


def test_what_could_not_be_had_is_logged(region, monkeypatch, caplog):
    def refuse(*given: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Mapping, "make_huge", refuse)
    monkeypatch.setattr(Mapping, "huge_bytes", lambda self: 0)
    monkeypatch.setattr(Mapping, "lock", refuse)
    one = Holding(region, MemorySettings())
    _finish(one)
    assert caplog.messages == [one.pages.note, one.lock.note]
    assert "0 of" in one.pages.note and "0 of" in one.lock.note


def test_a_stop_before_anything_began_is_nothing(region, calls):
    Holding(region, MemorySettings()).close()
    assert calls == []


def test_what_is_said_to_be_locked_is_mapped_under_the_lock(region):
    """Not only asked for: joining pages after the lock would take them out of it."""
    region.write(0, memoryview(b"weights"))
    one = Holding(region, MemorySettings())
    _finish(one)
    smaps = Path("/proc/self/smaps").read_text()
    own = re.search(rf"^{region.address:08x}-.*\n(?:\w+:.*\n)+", smaps, re.MULTILINE)[0]
    flags = re.search(r"^VmFlags:(.*)$", own, re.MULTILINE)[1].split()
    resident = int(re.search(r"^Rss: +(\d+) kB", own, re.MULTILINE)[1]) << 10
    if one.lock.locked < SIZE:
        pytest.skip(f"this user may lock only so much: {one.lock.note}")
    assert "lo" in flags
    assert resident == SIZE
