"""The directory: whoever sees a record as resident sees its bytes, and words say exactly what was published."""

from __future__ import annotations

import multiprocessing
import os
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.errors import UnavailableError
from sparkd.ipc import _atomics
from sparkd.ipc.directory import WORKERS, Directory, Entry, State
from sparkd.ipc.memory import Region
from sparkd.residency.epochs import Steps
from sparkd.residency.slots import GENERATIONS


@pytest.fixture
def region():
    with Region.create(1 << 16) as region:
        yield region


_ENTRIES = st.builds(Entry, st.sampled_from(State), st.integers(0, GENERATIONS - 1), st.integers(0, 2**32 - 1))


@given(_ENTRIES)
def test_a_word_holds_state_generation_and_slot(entry):
    assert 0 <= entry.word < 1 << 64
    assert Entry.of(entry.word) == entry


def test_the_word_layout_is_the_documented_one():
    assert Entry(State.RESIDENT, 3, 5).word == 2 << 62 | 3 << 32 | 5
    assert Entry.of(0) == Entry(State.ABSENT, 0, 0)


def test_generations_wrap():
    assert Entry.of(Entry(State.RESIDENT, GENERATIONS, 9).word) == Entry(State.RESIDENT, 0, 9)


def test_readers_see_what_the_store_published(region):
    store = Directory.create(region, 4096, layers=3, experts=7)
    reader = Directory.attach(Region.map(os.dup(region.fd), writable=False), 4096)
    assert reader.layers == 3 and reader.experts == 7
    assert reader.residents() == [0, 0, 0]
    store.publish(2, 6, Entry(State.RESIDENT, 1, 20))
    store.publish(0, 0, Entry(State.LOADING, 1, 0))
    assert reader.entry(2, 6) == Entry(State.RESIDENT, 1, 20)
    assert reader.entry(0, 0).state is State.LOADING
    assert reader.residents() == [0, 0, 1]
    assert reader.snapshot().shape == (3, 7)
    assert reader.snapshot()[2, 6] == Entry(State.RESIDENT, 1, 20).word


def test_a_reader_with_a_read_only_map_cannot_publish(region):
    Directory.create(region, 0, 1, 1)
    reader = Directory.attach(Region.map(os.dup(region.fd), writable=False), 0)
    with pytest.raises(TypeError):
        reader.publish(0, 0, Entry(State.RESIDENT, 1, 0))


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (3, 0), (0, -1), (0, 7)])
def test_no_word_outside_the_table_is_touched(region, layer, expert):
    directory = Directory.create(region, 0, 3, 7)
    with pytest.raises(IndexError):
        directory.entry(layer, expert)
    with pytest.raises(IndexError):
        directory.publish(layer, expert, Entry(State.RESIDENT, 0, 0))


def test_everybody_sees_which_steps_of_a_worker_have_begun_and_ended(region):
    store = Directory.create(region, 4096, 1, 1)
    worker = Directory.attach(region, 4096).step_counter(3)
    assert store.steps() == [Steps(0, 0)] * WORKERS
    for step in range(1, 4):
        with worker:
            assert store.steps()[3] == Steps(step, step - 1)
            assert store.steps() is store.steps(), "nothing has changed"
        assert store.steps()[3] == Steps(step, step)
    assert store.steps()[2] == store.steps()[4] == Steps(0, 0)


def test_a_step_ends_however_it_ends(region):
    directory = Directory.create(region, 0, 1, 1)
    with pytest.raises(OSError), directory.step_counter(0):
        raise OSError
    assert directory.steps()[0] == Steps(1, 1)


def test_the_step_a_dead_worker_was_in_has_ended_when_its_successor_counts(region):
    directory = Directory.create(region, 0, 1, 1)
    directory.step_counter(15).__enter__()
    assert directory.steps()[15] == Steps(1, 0)
    with directory.step_counter(15):
        assert directory.steps()[15] == Steps(2, 1)
    for nobody in (-1, 16):
        with pytest.raises(IndexError, match="there are 16"):
            directory.step_counter(nobody)


def test_a_region_without_a_directory_is_refused(region):
    with pytest.raises(UnavailableError, match="no directory of version"):
        Directory.attach(region, 0)


def test_atomics_check_their_index():
    words = np.zeros(4, np.uint64)
    _atomics.store(words, 3, 2**64 - 1)
    assert _atomics.load(words, 3) == 2**64 - 1
    with pytest.raises(IndexError):
        _atomics.load(words, 4)
    with pytest.raises(IndexError):
        _atomics.store(words, 4, 0)
    with pytest.raises(ValueError, match="length"):
        _atomics.copy(words, np.zeros(3, np.uint64))


def _publish_rounds(fd: int, rounds: int) -> None:
    region = Region.map(fd)
    directory = Directory.attach(region, 0)
    payload = region.array(32768, 512, np.uint64)
    for number in range(1, rounds + 1):
        slot = number % 2 * 256
        payload[slot : slot + 256] = number
        directory.publish(0, 0, Entry(State.RESIDENT, number, slot))


def test_a_reader_in_another_process_never_sees_a_record_before_its_bytes(region):
    rounds = 20_000
    directory = Directory.create(region, 0, 1, 1)
    payload = region.array(32768, 512, np.uint64)
    writer = multiprocessing.get_context("fork").Process(target=_publish_rounds, args=(region.fd, rounds))
    writer.start()
    seen = 0
    while seen < rounds:
        entry = directory.entry(0, 0)
        if entry.state is State.RESIDENT:
            low = int(payload[entry.slot : entry.slot + 256].min())
            assert low >= entry.generation
            assert entry.generation >= seen
            seen = entry.generation
        assert writer.is_alive() or directory.entry(0, 0).generation == rounds
    writer.join(10)
    assert writer.exitcode == 0


SWAPS = 10_000
_SLOTS, _RECORDS, _WIDTH = 4, 6, 64


def _swap(fd: int, seed: int) -> None:
    """Move records in and out at random: what leaves is taken back first, what comes is published when it is there."""
    region = Region.map(fd)
    directory, slots = Directory.attach(region, 0), region.array(32768, _SLOTS * _WIDTH, np.uint64)
    chance = random.Random(seed)
    resident: dict[int, int] = {}
    for generation in range(1, SWAPS + 1):
        record = chance.choice([record for record in range(_RECORDS) if record not in resident])
        if len(resident) == _SLOTS:
            leaving = chance.choice(list(resident))
            directory.publish(0, leaving, Entry(State.ABSENT, 0, 0))
            slot = resident.pop(leaving)
        else:
            slot = len(resident)
        resident[record] = slot
        directory.publish(0, record, Entry(State.LOADING, generation, slot))
        slots[slot * _WIDTH : (slot + 1) * _WIDTH] = generation * _RECORDS + record
        directory.publish(0, record, Entry(State.RESIDENT, generation, slot))


def _watch(fd: int, last: Any, seen: Any) -> None:
    """Read records until the last swap: one that is still published afterwards was read as its own whole bytes."""
    region = Region.map(fd, writable=False)
    directory, slots = Directory.attach(region, 0), region.array(32768, _SLOTS * _WIDTH, np.uint64)
    newest, ended = [0] * _RECORDS, False
    while not ended:
        ended = last.is_set()
        for record in range(_RECORDS):
            before = directory.entry(0, record)
            if before.state is State.RESIDENT:
                found = slots[before.slot * _WIDTH : (before.slot + 1) * _WIDTH].tolist()
                if directory.entry(0, record) == before:
                    assert found == [before.generation * _RECORDS + record] * _WIDTH
                    assert before.generation >= newest[record]
                    newest[record] = before.generation
                    seen.value += 1


def test_readers_of_a_placement_that_is_swapped_ten_thousand_times_see_old_or_new_and_never_a_mixture(region):
    Directory.create(region, 0, 1, _RECORDS)
    processes = multiprocessing.get_context("fork")
    last, counts = processes.Event(), [processes.Value("q", 0) for _ in range(3)]
    readers = [processes.Process(target=_watch, args=(region.fd, last, count)) for count in counts]
    for reader in readers:
        reader.start()
    try:
        _swap(region.fd, 3)
    finally:
        last.set()
        for reader in readers:
            reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert all(count.value > 0 for count in counts)
