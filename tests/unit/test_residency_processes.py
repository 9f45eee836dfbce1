"""The residency engine and the directory between real processes: an owner that swaps, workers that read without asking.

Readers take no lock and check no word twice: that a slot is not written under them is the engine's promise, kept by the
step counters alone.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from sparkd.ipc.directory import Directory, Entry, State
from sparkd.ipc.memory import Region
from sparkd.residency.commands import Command, Copy, Publish, Retract
from sparkd.residency.placement import Placement
from sparkd.residency.slabs import LayerSize, SlabSize
from sparkd.residency.transfers import Residency

SWAPS = 10_000
READERS = 3
LAYERS, EXPERTS, SLOTS, RESERVE = 3, 24, 40, 2
#: u64 words of a slot, written in several pieces.
WIDTH, PIECES = 256, 4
SLOTS_AT = 16384
PATIENCE_S = 200.0


def stamp(layer: int, expert: int, generation: int) -> int:
    """What every word of a slot is when it holds this filling of this record."""
    return layer << 48 | expert << 32 | generation


def slots_of(region: Region) -> np.ndarray:
    return region.array(SLOTS_AT, (SLOTS, WIDTH), np.uint64)


class Owner:
    """Carries out commands in shared memory; copies are done some time later, in any order."""

    def __init__(self, region: Region) -> None:
        self.directory = Directory.attach(region, 0)
        self.slots = slots_of(region)
        self.engine = Residency([LayerSize(0, EXPERTS)] * LAYERS, [SlabSize(SLOTS, RESERVE)])
        self.random = random.Random(34)
        self.copies: list[Copy] = []
        self.published = 0

    def run(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Copy():
                    self.copies.append(command)
                case Publish(record, place):
                    self.directory.publish(*record, Entry(State.RESIDENT, place.generation, place.slot))
                    self.published += 1
                case Retract(record, place):
                    self.directory.publish(*record, Entry(State.ABSENT, place.generation, place.slot))

    def swap(self) -> None:
        if not self.engine.swaps_left():
            hot = [self.random.sample(range(EXPERTS), 9) for _ in range(LAYERS)]
            self.engine.place(Placement(1, hot, ring=0.2))
        self.run(self.engine.swap(12))
        self.random.shuffle(self.copies)
        while self.copies:
            copy = self.copies.pop()
            slot, value = self.slots[copy.place.slot], stamp(*copy.record, copy.place.generation)
            for piece in range(PIECES):
                slot[piece * WIDTH // PIECES : (piece + 1) * WIDTH // PIECES] = value
            self.run(self.engine.copied(copy))
        self.run(self.engine.publish())
        self.run(self.engine.observe(self.directory.steps()))


def step(fd: int, worker: int, last: Any, steps: Any, reads: Any) -> None:
    """Steps until told that the next one is the last: in each, look up words at its begin and while it runs."""
    region = Region.map(fd)
    directory, slots = Directory.attach(region, 0), slots_of(region)
    counter, chance = directory.step_counter(worker), random.Random(worker)
    ended = False
    while not ended:
        ended = last.is_set()
        with counter:
            words = directory.snapshot()
            resident = list(zip(*np.nonzero(words >> np.uint64(62) == State.RESIDENT), strict=True))
            read = chance.sample(resident, min(len(resident), 8))
            for _ in range(2):
                for found in read:
                    entry = Entry.of(int(words[found]))
                    assert (slots[entry.slot] == stamp(*map(int, found), entry.generation)).all()
                    layer, expert = chance.randrange(LAYERS), chance.randrange(EXPERTS)
                    later = directory.entry(layer, expert)
                    if later.state is State.RESIDENT:
                        assert (slots[later.slot] == stamp(layer, expert, later.generation)).all()
                        reads.value += 1
        steps.value += 1
        time.sleep(0.0002)


@pytest.fixture
def region():
    with Region.create(SLOTS_AT + SLOTS * WIDTH * 8) as region:
        yield region


def test_ten_thousand_swaps_are_never_seen_half_by_workers_that_read_without_a_lock(region):
    Directory.create(region, 0, LAYERS, EXPERTS)
    processes = multiprocessing.get_context("fork")
    last = processes.Event()
    counts = [(processes.Value("q", 0), processes.Value("q", 0)) for _ in range(READERS)]
    readers = [processes.Process(target=step, args=(region.fd, n, last, *counts[n])) for n in range(READERS)]
    for reader in readers:
        reader.start()
    owner = Owner(region)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while owner.published < SWAPS:
            before = owner.published
            owner.swap()
            if owner.published == before:
                os.sched_yield()
            assert all(reader.is_alive() for reader in readers), "a reader saw a mixture"
            assert time.monotonic() < deadline
    finally:
        last.set()
        for reader in readers:
            reader.join(PATIENCE_S)
    assert [reader.exitcode for reader in readers] == [0] * READERS
    assert all(steps.value > 0 and reads.value > 0 for steps, reads in counts)
    assert [steps.begun for steps in owner.directory.steps()[:READERS]] == [steps.value for steps, _ in counts]
