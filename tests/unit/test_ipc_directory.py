"""The directory: whoever sees a record as resident sees its bytes, and words say exactly what was published."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.errors import UnavailableError
from sparkd.ipc import _atomics
from sparkd.ipc.directory import GENERATIONS, Directory, Entry, State
from sparkd.ipc.memory import Region


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
