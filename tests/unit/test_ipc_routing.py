"""The ring between worker and calibrator: whole steps in order, none of them torn, whoever is killed whenever."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkd.errors import UnavailableError
from sparkd.ipc.memory import Region
from sparkd.ipc.routing import MAX_TAGS, Routed, RoutingRing, TornError

FINGERPRINT = "5a" * 32
LAYERS = 3
PATIENCE_S = 60.0


def region_of(capacity: int) -> Region:
    region = Region.create(4096 + capacity, "sparkd-routing")
    RoutingRing.create(region, FINGERPRINT, LAYERS, 8)
    return region


def routed(step: int, rows: int, top_k: int = 2) -> Routed:
    """A step whose every byte follows from its number."""
    chance = random.Random(step)
    return Routed(step, rows, top_k, chance.randbytes(rows), chance.randbytes(2 * LAYERS * rows * top_k))


@pytest.fixture
def region() -> Iterator[Region]:
    with region_of(1 << 14) as made:
        yield made


def test_steps_come_out_whole_and_in_order(region: Region) -> None:
    worker, calibrator = RoutingRing(region), RoutingRing(region)
    assert (calibrator.fingerprint, calibrator.layers, calibrator.experts) == (FINGERPRINT, LAYERS, 8)
    assert calibrator.peek() is None
    for turn in range(200):
        for step in range(3):
            assert worker.push(routed(3 * turn + step, 1 + (turn + step) % 40))
        for step in range(3):
            taken = calibrator.peek()
            assert taken == routed(3 * turn + step, 1 + (turn + step) % 40)
            calibrator.advance(taken)
    assert calibrator.peek() is None and calibrator.dropped == 0


def test_a_full_ring_drops_whole_steps_and_counts_them(region: Region) -> None:
    worker, calibrator = RoutingRing(region), RoutingRing(region)
    kept = [step for step in range(1000) if worker.push(routed(step, 10))]
    assert kept == list(range(len(kept))) and calibrator.dropped == 1000 - len(kept) > 0
    assert not worker.push(routed(1, 10_000)), "a step larger than the ring can never be taken"
    for step in kept:
        taken = calibrator.peek()
        assert taken == routed(step, 10)
        calibrator.advance(taken)
    assert calibrator.peek() is None
    assert worker.push(routed(2000, 10)) and calibrator.peek() == routed(2000, 10)


def test_a_step_that_was_not_dealt_with_is_there_for_the_next_calibrator(region: Region) -> None:
    worker = RoutingRing(region)
    worker.push(routed(1, 4))
    worker.push(routed(2, 4))
    assert RoutingRing(region).peek() == routed(1, 4)
    successor = RoutingRing(region)
    assert successor.peek() == routed(1, 4)
    successor.advance(routed(1, 4))
    assert RoutingRing(region).peek() == routed(2, 4)


@pytest.mark.parametrize("junk", [b"\xff" * 64, bytes(64), b"\x01\x00\x00\x00" + b"\xff" * 60, b"\x08" * 8])
def test_what_no_worker_writes_is_passed_over_and_reading_goes_on(region: Region, junk: bytes) -> None:
    worker, calibrator = RoutingRing(region), RoutingRing(region)
    worker.push(routed(1, 4))
    calibrator.advance(routed(1, 4))
    written = region.view(0, 4096).cast("Q")[8]
    region.view(4096 + written, len(junk))[:] = junk
    region.view(0, 4096).cast("Q")[8] = written + len(junk)
    with pytest.raises(TornError, match="routed ids"):
        calibrator.peek()
    assert calibrator.peek() is None
    worker.push(routed(2, 4))
    assert calibrator.peek() == routed(2, 4)


def test_tags_have_numbers_that_any_end_knows_and_the_next_worker_too(region: Region) -> None:
    worker, calibrator = RoutingRing(region), RoutingRing(region)
    assert calibrator.tags == [""]
    assert [worker.kind(0, ""), worker.kind(1, ""), worker.kind(1, "coding"), worker.kind(0, "x" * 24)] == [0, 1, 3, 4]
    assert calibrator.tags == ["", "coding", "x" * 24]
    successor = RoutingRing(region)
    assert [successor.kind(1, "x" * 24), successor.kind(1, "legal"), successor.kind(0, "coding")] == [5, 7, 2]
    for number in range(200):
        assert successor.kind(0, f"more-{number}") in (0, *range(8, 256))
    assert len(calibrator.tags) == 1 + MAX_TAGS
    assert successor.kind(1, "one-too-many") == 1, "what cannot be told apart has no tag"
    assert successor.kind(1, "coding") == 3
    for bad in ("Upper", "two words", "x" * 25, "é"):
        with pytest.raises(ValueError, match="no tag"):
            successor.kind(1, bad)


def test_a_tag_that_cannot_be_is_none(region: Region) -> None:
    worker, calibrator = RoutingRing(region), RoutingRing(region)
    worker.kind(1, "coding")
    region.view(1024, 3)[:] = b"\xff\n "
    assert calibrator.tags == ["", ""]
    region.view(0, 4096).cast("Q")[10] = 1 << 60
    assert len(calibrator.tags) == 1 + MAX_TAGS


def test_a_region_without_a_ring_is_refused() -> None:
    with Region.create(8192, "sparkd-routing") as empty, pytest.raises(UnavailableError, match="no routing ring"):
        RoutingRing(empty)


class Ring(RuleBasedStateMachine):
    """Any order of writing, reading and crashes, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.region = region_of(2048)
        self.worker, self.calibrator = RoutingRing(self.region), RoutingRing(self.region)
        self.waiting: list[Routed] = []
        self.dropped = 0
        self.step = 0

    @rule(rows=st.integers(1, 60), top_k=st.integers(1, 3))
    def push(self, rows: int, top_k: int) -> None:
        self.step += 1
        step = routed(self.step, rows, top_k)
        if self.worker.push(step):
            self.waiting.append(step)
        else:
            self.dropped += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        taken = self.calibrator.peek()
        assert taken == self.waiting.pop(0)
        self.calibrator.advance(taken)

    @rule(noise=st.integers(0, 2**32), size=st.integers(0, 300))
    def kill_the_worker_while_it_writes(self, noise: int, size: int) -> None:
        """What it had begun lies behind the end; it may have filled all that was free."""
        words = self.region.view(0, 4096).cast("Q")
        written, free = words[8], 2048 - (words[8] - words[16])
        for i, byte in enumerate(random.Random(noise).randbytes(min(size, free))):
            self.region.view(4096, 2048)[(written + i) % 2048] = byte
        self.worker = RoutingRing(self.region)

    @rule()
    def kill_the_calibrator(self) -> None:
        self.calibrator.peek()
        self.calibrator = RoutingRing(self.region)

    @invariant()
    def the_oldest_is_first_and_all_that_were_dropped_are_counted(self) -> None:
        assert self.calibrator.peek() == (self.waiting[0] if self.waiting else None)
        assert self.calibrator.dropped == self.dropped

    def teardown(self) -> None:
        for step in self.waiting:
            assert self.calibrator.peek() == step
            self.calibrator.advance(step)
        self.region.close()


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


_WRITER = """
import random, sys
from sparkd.ipc.memory import Region
from sparkd.ipc.routing import Routed, RoutingRing
ring = RoutingRing(Region.map(int(sys.argv[1])))
step, end = int(sys.argv[2]), int(sys.argv[3])
print("begun", flush=True)
while step < end:
    chance = random.Random(step)
    rows = 1 + step % 50
    if ring.push(Routed(step, rows, 2, chance.randbytes(rows), chance.randbytes(2 * ring.layers * rows * 2))):
        step += 1
"""


class Writer:
    """A worker's process that writes steps in order, each until it finds room."""

    def __init__(self, region: Region, start: int, end: int = 1 << 60) -> None:
        command: list[Any] = [sys.executable, "-c", _WRITER, str(region.fd), str(start), str(end)]
        self.process = subprocess.Popen(command, pass_fds=[region.fd], stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"begun\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def read(region: Region, first: int, count: int) -> int:
    """Take `count` steps from `first` on, each as it must be; returns the number that is next."""
    ring = RoutingRing(region)
    deadline = time.monotonic() + PATIENCE_S
    for step in range(first, first + count):
        while (taken := ring.peek()) is None:
            assert time.monotonic() < deadline, f"step {step} never came"
            os.sched_yield()
        assert taken == routed(step, 1 + step % 50)
        ring.advance(taken)
    return first + count


def test_two_processes_pass_every_step_whole_and_in_order(region: Region) -> None:
    writer = Writer(region, 0, 5000)
    assert read(region, 0, 5000) == 5000
    assert writer.process.wait(PATIENCE_S) == 0
    writer.process.communicate()


def test_a_worker_killed_while_it_writes_leaves_whole_steps_and_a_ring_that_works(region: Region) -> None:
    moments = random.Random(7)
    begin = 0
    for _ in range(10):
        writer = Writer(region, begin)
        reached = read(region, begin, moments.randrange(1, 400))
        writer.kill()
        ring = RoutingRing(region)
        while (taken := ring.peek()) is not None:
            assert taken == routed(reached, 1 + reached % 50)
            ring.advance(taken)
            reached += 1
        begin = reached
    assert begin > 10


_READER = """
import random, sys
from sparkd.ipc.memory import Region
from sparkd.ipc.routing import RoutingRing
ring = RoutingRing(Region.map(int(sys.argv[1])))
print("begun", flush=True)
last = -1
while True:
    taken = ring.peek()
    if taken is not None:
        if last >= 0 and taken.step != last + 1:
            print("torn", flush=True)
        chance = random.Random(taken.step)
        if taken.kinds != chance.randbytes(taken.rows) or taken.ids != chance.randbytes(len(taken.ids)):
            print("torn", flush=True)
        last = taken.step
        ring.advance(taken)
"""


def test_a_calibrator_killed_while_it_reads_leaves_every_other_step_to_the_next(region: Region) -> None:
    moments = random.Random(8)
    worker = RoutingRing(region)
    step = 0
    for _ in range(5):
        reader = subprocess.Popen(
            [sys.executable, "-c", _READER, str(region.fd)], pass_fds=[region.fd], stdout=subprocess.PIPE
        )
        assert reader.stdout is not None and reader.stdout.readline() == b"begun\n"
        deadline = time.monotonic() + PATIENCE_S
        goal = step + moments.randrange(200, 600)
        while step < goal:
            assert time.monotonic() < deadline, "the reader never made room"
            step += worker.push(routed(step, 1 + step % 50))
        reader.kill()
        said, _ = reader.communicate()
        assert said == b""
    ring = RoutingRing(region)
    taken = ring.peek()
    first = step if taken is None else taken.step
    assert read(region, first, step - first) == step
