"""The worker's schedule where the link to the card has a speed: late copies hold nobody up, and no byte crosses twice.

Time is simulated (`throttled_device`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from emulated_tiers import PART_ROWS, Churned
from pairs import Pair, loaded
from test_device_tier import STEPS, Reader, live
from throttled_device import Crossed, ThrottledDevice

from sparkd.residency.device_budget import STAGING_PARTS
from sparkd.residency.misses import Misses
from sparkd.store.arena import Arena

MODELS = ["qwen35moe-tinyk-s1-q4_k_m", "laguna-tinyk-s1-q4_k_m"]
#: Seconds of a kernel, and of whatever else is not a copy over the link.
WORK_S = 1e-3


@pytest.fixture(scope="module")
def arena(model_path: Callable[[str], Path]) -> Iterator[Arena]:
    with loaded(model_path("laguna-tiny-s1-q4_k_m")) as arena:
        yield arena


def records_of(arena: Arena) -> range:
    """Where they are in host memory."""
    first = arena.region.address + arena.layout.slabs[0].offset
    return range(first, arena.region.address + arena.layout.total_bytes)


def largest(arena: Arena) -> int:
    return max(slab.record_bytes for slab in arena.layout.slabs)


def test_copies_end_when_the_link_has_moved_their_bytes() -> None:
    device = ThrottledDevice(bytes_s=100.0, work_s=1.0)
    here = np.arange(200, dtype=np.uint8)
    there = np.zeros(100, np.uint8)
    one, other, third = device.stream(), device.stream(), device.stream()
    target = device.allocate(400)
    device.copy(one, target, here.ctypes.data, 100)
    first = one.record()
    device.upload(other, target + 128, here[100:])
    second = other.record()
    assert not first.done() and not second.done()
    device.sleep(0.99)
    assert not first.done()
    device.sleep(0.01)
    assert first.done() and not second.done(), "one at a time"
    # The other way is free; within the device nothing crosses; who waits for an event begins when that is reached.
    device.download(one, target, there)
    third.wait(second)
    device.copy(third, target + 256, target + 128, 100)
    one.synchronize()
    assert device.now == 2.0 and np.array_equal(there, here[:100])
    third.synchronize()
    assert device.now == 3.0
    assert sorted((crossed.up, crossed.size) for crossed in device.crossed) == [(False, 100), (True, 100), (True, 100)]


def test_who_has_waited_longest_for_the_link_is_next() -> None:
    """So little copies pass a queue of large ones."""
    device = ThrottledDevice(bytes_s=100.0)
    data = np.zeros(100, np.uint8)
    queue, single = device.stream(), device.stream()
    target = device.allocate(512)
    for _ in range(4):
        device.copy(queue, target, data.ctypes.data, 100)
    device.upload(single, target, data[:50])
    single.synchronize()
    assert device.now == 1.5
    queue.synchronize()
    assert device.now == 4.5


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("steps_a_record", [0.1, 1.0, 10.0])
def test_every_step_reads_every_record_as_it_is_on_a_slow_link(
    arena: Arena, share: float, registered: bool, steps_a_record: float, seed: int
) -> None:
    """A record takes a part of a step to come, or several steps."""
    step_s = len(arena.layout.layers) * WORK_S
    device = ThrottledDevice(largest(arena) / (steps_a_record * step_s), WORK_S, seed=seed)
    churned = live(arena, share, seed, device, registered=registered)  # type: ignore[arg-type]
    assert churned.tier.moved
    device.sleep(1e9)
    assert sum(one.size for one in device.crossed_from(records_of(arena))) <= churned.tier.moved


def test_steps_wait_for_no_copy_of_what_they_can_read_in_place(arena: Arena, seed: int) -> None:
    """Slots fill and change meanwhile; a table waits for the record that the link is at, not for those behind it."""
    record_s = 5 * WORK_S
    device = ThrottledDevice(largest(arena) / record_s, WORK_S, seed=seed)
    reader = Reader(device, arena)
    churned = Churned(device, reader, arena, 0.5, seed)
    records = records_of(arena)
    late = 0
    for _ in range(2 * STEPS):
        before, crossed = device.now, len(device.crossed)
        reader.step(churned)
        tables = [one for one in device.crossed[crossed:] if one.host not in records]
        most = len(arena.layout.layers) * WORK_S + sum(record_s + one.size / device.bytes_s for one in tables)
        assert device.now - before <= most * (1 + 1e-9)
        late += bool(churned.tier._under_way)
        churned.happen()
    assert late >= STEPS, "the link was not busy"
    assert len(device.crossed_from(records)) > 0


@pytest.mark.parametrize("name", MODELS)
def test_what_is_missed_crosses_the_link_once_and_nothing_else_does(
    name: str, model_path: Callable[[str], Path], seed: int
) -> None:
    """Decoding and prompts without a slot, and all that is missed copied: the least bytes that there can be."""
    rng = np.random.default_rng(seed)
    with loaded(model_path(name)) as arena:
        device = ThrottledDevice(1e9, 1e-5, seed=seed)
        pair = Pair(arena.program, arena, device, positions=80, max_rows=48, prompt_rows=32, prompt_from=5)
        churned = Churned(device, pair.cuda, arena, 0.0, seed, misses=Misses.COPY)
        pair.cuda.serve_from(churned.tier)
        first, second = pair.start(), pair.start()
        vocab = arena.program.vocab

        def brought(*rows: list[int]) -> tuple[Counter[int], Counter[int]]:
            """Bytes that each record has brought in a step, by its address, and those that it had to bring."""
            del device.crossed[:]
            result = pair.step(*zip((first, second), rows, strict=False))
            addresses = arena.addresses(arena.directory.snapshot())
            least: Counter[int] = Counter()
            for layer, (records, ids) in enumerate(zip(arena.layout.layers, result.experts, strict=True)):
                for expert in np.unique(ids):
                    least[int(addresses[layer, expert])] = arena.layout.slabs[records.slab].record_bytes
            return _bytes(device.crossed_from(records_of(arena))), least

        crossed, least = brought([5], [7])
        assert crossed == least
        for rows in ([9],), ([3], [4]), ([11], [12]):
            crossed, least = brought(*rows)
            assert crossed <= least  # the reserve still has some of those of the step before
        prompt = rng.integers(0, vocab, 24).tolist()
        before = churned.tier.streamed
        crossed, least = brought(prompt)
        assert crossed.total() == churned.tier.streamed - before
        assert all(crossed[address] == size for address, size in least.items()), "each once"
        vain = len(crossed) - len(least)
        assert vain <= STAGING_PARTS * PART_ROWS * len(arena.layout.layers)


def _bytes(crossed: list[Crossed]) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for one in crossed:
        sizes[one.host] += one.size
    return sizes
