"""The copier with real files and threads: a tier smaller than the model gives what is asked for, in the right order."""

from __future__ import annotations

import os
import queue
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from filled_arena import Filled, empty, regions_closed
from test_store_residents import arena_record, file_record, residents

from sparkd.errors import ModelFileError, SparkError
from sparkd.residency.commands import Grant, Lend, Refuse
from sparkd.residency.leases import Use
from sparkd.residency.placement import Placement
from sparkd.residency.slabs import SlabSize
from sparkd.residency.slots import Record
from sparkd.store import copier, reading
from sparkd.store.copier import BACKGROUND, Copier, Need
from sparkd.store.layout import Extent

NAME = "qwen35moe-tiny-s1-q4_k_m"
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _close_regions():
    with regions_closed():
        yield


@pytest.fixture
def path(model_path, tmp_path) -> Path:
    return Path(shutil.copy(model_path(NAME), tmp_path / "model.gguf"))


@pytest.fixture
def small(path):
    """A loaded tier with room for less than half of the records, whose copier goes on."""
    slabs = empty(path).arena.layout.slabs
    one = empty(path, [SlabSize(max(slab.records // 3, 4), 2, 1) for slab in slabs])
    one.loader.load()
    yield one
    one.copier.close()


def answer(one: Filled, lease: int) -> Grant | Refuse:
    """What became of a lease, when the threads have got so far."""
    woken = threading.Event()
    one.residents._wake = woken.set
    while not (answers := [answer for answer in one.residents.answers() if not isinstance(answer, Lend)]):
        assert woken.wait(PATIENCE_S)
        woken.clear()
    (found,) = answers
    assert found.lease == lease
    return found


def absent(one: Filled, layer: int = 0) -> list[Record]:
    there = residents(one)
    experts = range(one.arena.layout.layers[layer].experts)
    return [Record(layer, expert) for expert in experts if Record(layer, expert) not in there]


@pytest.mark.parametrize("way", ["straight", "through a buffer", "through the page cache"])
def test_every_record_of_a_model_can_be_had_from_a_tier_that_holds_a_third(path, monkeypatch, way, request):
    if way == "through a buffer":
        monkeypatch.setattr(reading.ShardFile, "straight", lambda *_: None)
    if way == "through the page cache":
        monkeypatch.setattr(reading, "direct_block", lambda fd: 0)
    one = request.getfixturevalue("small")
    one.residents.attach(0)
    assert 0 < len(residents(one)) < sum(records.experts for records in one.arena.layout.layers) // 2
    for use in (Use.PREFILL, Use.DECODE, Use.DECODE):
        for layer, records in enumerate(one.arena.layout.layers):
            with one.arena.directory.step_counter(0):
                for expert in range(records.experts):
                    record = Record(layer, expert)
                    lease = one.residents.stage(0, [record], use)
                    (place,) = answer(one, lease).places
                    assert arena_record(one, record, place.slot) == file_record(one, record)
                    one.residents.release(lease)
            one.residents.used(0, [Record(layer, expert) for expert in range(records.experts)], use)
    one.residents.settle(lambda: False)
    for record, place in residents(one).items():
        assert arena_record(one, record, place.slot) == file_record(one, record)
    assert one.residents.counts()[Use.DECODE].uses == 2 * one.residents.counts()[Use.PREFILL].uses


class _Unlucky:
    """Threads that never get a job to its end."""

    def __init__(self, threads: int, files: object) -> None:
        self.jobs: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def begin(self, job: int, pieces: object, told: object) -> None:
        self.jobs.put(job)

    def ended(self) -> list[tuple[int, bool]]:
        job = self.jobs.get(timeout=PATIENCE_S)
        return [] if job is None else [(job, False)]

    def close(self) -> None:
        self.jobs.put(None)


def test_what_cannot_be_read_the_short_way_is_read_the_long_way(monkeypatch, request):
    monkeypatch.setattr(copier, "Readers", _Unlucky)
    one = request.getfixturevalue("small")
    one.residents.attach(0)
    for record in absent(one)[:3]:
        lease = one.residents.stage(0, [record], Use.PREFILL)
        (place,) = answer(one, lease).places
        assert arena_record(one, record, place.slot) == file_record(one, record)
        one.residents.release(lease)


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _cut(path: Path) -> None:
    os.truncate(path, 10_000)


@pytest.mark.parametrize("change", [_touch, _cut])
def test_a_file_that_changes_under_a_running_store_is_refused_by_name_and_what_is_resident_stays(
    small, path, change: Callable[[Path], None]
):
    small.residents.attach(0)
    before = {record: arena_record(small, record, place.slot) for record, place in residents(small).items()}
    change(path)
    refused = answer(small, small.residents.stage(0, absent(small)[:1], Use.PREFILL))
    assert isinstance(refused, Refuse)
    assert str(path) in refused.reason
    assert "inode" in refused.reason or "ends early" in refused.reason
    small.residents.settle(lambda: True)
    assert {record: arena_record(small, record, place.slot) for record, place in residents(small).items()} == before
    record = next(iter(before))
    assert isinstance(answer(small, small.residents.stage(0, [record], Use.DECODE)), Grant)


class _Gate:
    """Lets reads happen one by one: each waits until it is let through, and is noted by its offset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.seen: list[int] = []
        self._lock = threading.Lock()
        read = reading.ShardFile.read

        def gated(file, offset, size, buffer):
            with self._lock:
                self.seen.append(offset)
            self.waiting.release()
            assert self.let.acquire(timeout=PATIENCE_S)
            return read(file, offset, size, buffer)

        monkeypatch.setattr(reading.ShardFile, "read", gated)
        monkeypatch.setattr(reading.ShardFile, "straight", lambda *_: None)

    def arrived(self, count: int) -> None:
        for _ in range(count):
            assert self.waiting.acquire(timeout=PATIENCE_S)


def _ended(results: dict[str, SparkError | None], name: str, done: threading.Semaphore):
    def ended(error: SparkError | None) -> None:
        results[name] = error
        done.release()

    return ended


def test_urgent_jobs_come_first_and_others_leave_them_threads(path, monkeypatch):
    one = empty(path)
    copier = Copier(one.arena, readers=BACKGROUND + 2)
    gate = _Gate(monkeypatch)
    results: dict[str, SparkError | None] = {}
    done = threading.Semaphore(0)
    start = one.model.shards[0].data_offset
    target = one.arena.layout.slabs[0].offset
    extents = {name: [Extent(0, start + n * 64, target + n * 64, 64)] for n, name in enumerate("abcdefgh")}
    place = {start + n * 64: name for n, name in enumerate("abcdefgh")}
    copier.arena_filled()
    for name in "abcd":
        copier.begin(name, extents[name], _ended(results, name, done))
    copier.open()
    gate.arrived(BACKGROUND)
    assert sorted(place[offset] for offset in gate.seen) == ["a", "b"], "the others wait"
    copier.begin("e", extents["e"], _ended(results, "e", done), Need.NOW)
    copier.hurry("d")
    gate.arrived(2)
    assert sorted(place[offset] for offset in gate.seen[2:]) == ["d", "e"]
    assert copier.withdraw("c")
    assert not copier.withdraw("a"), "it has begun"
    copier.begin("f", extents["f"], _ended(results, "f", done))
    gate.let.release(5)
    for _ in range(5):
        assert done.acquire(timeout=PATIENCE_S)
    copier.close()
    assert results == dict.fromkeys("abdef")
    assert copier.read == 5 * 64


def test_the_pieces_of_one_record_are_read_at_the_same_time_and_one_that_fails_fails_it_once(path, monkeypatch):
    one = empty(path)
    copier = Copier(one.arena, readers=3)
    gate = _Gate(monkeypatch)
    results: dict[str, SparkError | None] = {}
    done = threading.Semaphore(0)
    start, target = one.model.shards[0].data_offset, one.arena.layout.slabs[0].offset
    beyond = path.stat().st_size + 4096
    extents = [Extent(0, start, target, 64), Extent(0, beyond, target, 64), Extent(0, beyond, target, 64)]
    copier.open()
    copier.begin("record", extents, _ended(results, "record", done), Need.NOW)
    gate.arrived(3)
    gate.let.release(3)
    assert done.acquire(timeout=PATIENCE_S)
    copier.close()
    assert isinstance(results["record"], ModelFileError)
    assert not done.acquire(blocking=False)


def test_a_closed_copier_gives_up_what_waits_and_closes_the_files(path, monkeypatch):
    one = empty(path)
    copier = Copier(one.arena, readers=1)
    gate = _Gate(monkeypatch)
    results: dict[str, SparkError | None] = {}
    done = threading.Semaphore(0)
    start, target = one.model.shards[0].data_offset, one.arena.layout.slabs[0].offset
    copier.open()
    for name in "ab":
        copier.begin(name, [Extent(0, start, target, 64)], _ended(results, name, done))
    gate.arrived(1)
    gate.let.release(1)
    closing = threading.Thread(target=copier.close)
    closing.start()
    gate.let.release(1)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert set(results) <= {"a", "b"}
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert path not in links


def test_steps_see_whole_records_while_placements_are_swapped_under_them(small):
    """Threads that copy, one that places and swaps, one that reads step by step whatever the words lead to."""
    expected = {
        Record(layer, expert): file_record(small, Record(layer, expert))
        for layer, records in enumerate(small.arena.layout.layers)
        for expert in range(records.experts)
    }
    small.residents.attach(0)
    counter = small.arena.directory.step_counter(0)
    stop = threading.Event()
    wrong: list[Record] = []
    steps = 0

    def work() -> None:
        nonlocal steps
        while not stop.is_set():
            with counter:
                for record, place in residents(small).items():
                    if arena_record(small, record, place.slot) != expected[record]:
                        wrong.append(record)
            steps += 1

    worker = threading.Thread(target=work)
    worker.start()
    chance = random.Random(1)
    swaps = 0
    woken = threading.Event()
    small.residents._wake = woken.set
    layers = small.arena.layout.layers
    room = {number: slab.size.hot(0.4) for number, slab in enumerate(small.arena.layout.slabs)}
    for version in range(60):
        left = dict(room)
        hot: list[list[int]] = []
        for records in layers:
            count = min(left[records.slab], chance.randrange(3))
            left[records.slab] -= count
            hot.append(chance.sample(range(records.experts), count))
        small.residents.place(Placement(version, hot, 0.4))
        swaps += small.residents.placement().swaps_left
        begun = steps
        while small.residents.advance() and small.residents.placement().swaps_left:
            woken.wait(0.01)
            woken.clear()
        while steps < begun + 2:
            small.residents.advance()
    stop.set()
    worker.join(PATIENCE_S)
    assert wrong == []
    assert swaps > 200
    assert small.residents.failure is None
