"""Prompts on a device whose experts are elsewhere: the bits of the native executor, each record over the link once.

What is brought before it is known to be wanted is bounded, and no wait of the two buffers can be left out.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulated_tiers import PART_ROWS, Churned
from host_device import HostDevice
from numpy.typing import NDArray
from pairs import Pair, loaded
from test_device_tier import Careless, Reader, WrongBytes

from sparkd.executors.device import Stream
from sparkd.residency.device_budget import STAGING_PARTS
from sparkd.residency.leases import Use
from sparkd.residency.slots import Record
from sparkd.store.arena import Arena
from sparkd.worker.device_staging import Staging
from sparkd.worker.device_tier import DeviceTier

SIZE = 64


@pytest.mark.parametrize("name", ["qwen35moe-tinyk-s1-q4_k_m", "laguna-tinyk-s1-q4_k_m"])
@pytest.mark.parametrize(("share", "registered"), [(0.0, True), (0.5, True), (1.0, True), (0.0, False), (0.5, False)])
def test_a_prompt_says_the_same_wherever_its_experts_are_and_brings_each_once(
    name: str, share: float, registered: bool, model_path: Callable[[str], Path], seed: int
) -> None:
    """Chunks beside a sequence that decodes, while placements and misses move what is in slots."""
    rng = np.random.default_rng(seed)
    with loaded(model_path(name)) as arena:
        device = HostDevice(seed=seed)
        pair = Pair(arena.program, arena, device, positions=80, max_rows=48, prompt_rows=32, prompt_from=5)
        churned = Churned(device, pair.cuda, arena, share, seed, registered=registered)
        tier = churned.tier
        brought = brought_by(tier)
        pair.cuda.serve_from(tier)
        vocab = arena.program.vocab
        first, second = pair.start(), pair.start()
        pair.step((first, rng.integers(0, vocab, 3).tolist()), logits=False)
        for length in (24, 7, 40):
            before = tier.streamed
            brought.clear()
            result = pair.step((first, [5]), (second, rng.integers(0, vocab, length).tolist()))
            if length <= 32:
                wanted = {
                    (layer, expert) for layer, ids in enumerate(result.experts[:, 1:]) for expert in np.unique(ids)
                }
                assert max(brought.values(), default=0) <= 1, "twice over the link"
                vain = Counter(layer for layer, expert in brought if (layer, expert) not in wanted)
                assert max(vain.values(), default=0) <= (STAGING_PARTS * PART_ROWS if length * 2 >= 8 * 8 else 0)
                assert tier.streamed - before == sum(record_bytes(arena, layer) for layer, _ in brought)
                if registered:  # else having records brought to decode rows moves others in and out of slots
                    absent = {record for record in wanted if tier._was_absent[record]}
                    assert set(brought) >= absent and not any(tier._was_absent[r] == 0 for r in brought)
            decode = np.arange(length + 1) == 0
            tier.used(decode, result.experts)
            churned.happen()
        assert share == 1.0 or tier.streamed > 0


def brought_by(tier: DeviceTier) -> Counter[Record]:
    """Counts, from now on, how often each record is given to the stream of the buffers."""
    brought: Counter[Record] = Counter()
    give = tier._stream

    def counting(stream: Stream, record: Record, place: int) -> None:
        brought[record] += 1
        give(stream, record, place)

    tier._stream = counting  # type: ignore[method-assign]
    return brought


def record_bytes(arena: Arena, layer: int) -> int:
    return arena.layout.slabs[arena.layout.layers[layer].slab].record_bytes


def stream(device: Careless, seed: int) -> None:
    """Records of two layers through buffers of three, each read when compute comes to it."""
    dice = random.Random(seed)
    records = np.frombuffer(random.Random(1).randbytes(20 * SIZE), np.uint8).reshape(20, SIZE)
    staging = Staging(device, 3, SIZE)
    compute = device.stream()

    def copy(stream: Stream, record: Record, place: int) -> None:
        device.copy(stream, place, records[record.expert].ctypes.data, SIZE)

    def read(record: Record, place: int) -> None:
        there = np.empty(SIZE, np.uint8)
        device.download(compute, place, there)

        def compare() -> None:
            if not np.array_equal(there, records[record.expert]):
                raise WrongBytes(f"record {record}")

        compute.push(compare)

    for _ in range(3):
        chosen = [Record(0, expert) for expert in dice.sample(range(20), 14)]
        staging.ahead([Record(0, expert) for expert in dice.sample(range(20), dice.randint(0, 9))], copy)
        told = []
        for part in staging.stream(compute, chosen, copy):
            told += [record for record, _ in part]
            for record, place in part:
                read(record, place)
            compute.poke()
        assert sorted(told) == sorted(chosen)
    compute.synchronize()


def test_every_record_is_there_when_it_is_read(seed: int) -> None:
    for number in range(50):
        stream(Careless(seed=seed + number), seed + number)


#: Where staging waits, and how often at least in `stream`.
PLACES = {"_fill": 8, "_read_parts": 10}


@pytest.mark.parametrize(("place", "drop"), [(place, drop) for place, most in PLACES.items() for drop in range(1, 6)])
def test_no_wait_can_be_left_out(place: str, drop: int) -> None:
    """For each there are dice with which a wrong record is read without it."""
    for seed in range(400):
        try:
            stream(Careless(place, drop, seed=seed), seed)
        except WrongBytes:
            return
    pytest.fail(f"nobody misses wait {drop} of {place}")


def test_there_are_no_other_waits() -> None:
    found: set[str] = set()
    for seed in range(20):
        device = Careless(seed=seed)
        stream(device, seed)
        found |= set(device.waits)
    assert found == set(PLACES)


def test_a_prompt_of_20000_tokens_leaves_slots_and_what_decode_finds_there_as_they_were(
    model_path: Callable[[str], Path], seed: int
) -> None:
    """Choices of decode lean to few experts, those of the prompt to none; no kernel runs, records are copied."""
    rng = np.random.default_rng(seed)
    with loaded(model_path("laguna-tiny-s1-q4_k_m")) as arena:
        device = HostDevice(seed=seed)
        tables = Reader(device, arena)
        tier = Churned(device, tables, arena, 0.5, seed).tier
        layers = arena.program.expert_layers

        def step(rows: int, lean: float) -> None:
            experts = np.array(
                [
                    [
                        rng.choice(one.experts, one.top_k, replace=False, p=leaning(one.experts, lean))
                        for _ in range(rows)
                    ]
                    for one in layers
                ]
            ).astype(np.int16)
            assert tier.begin() is None
            for number, chosen in enumerate(experts):
                if rows > 1:
                    told = [expert for part, _ in tier.stage(number, np.unique(chosen).tolist()) for expert in part]
                    assert sorted(told) == np.unique(chosen).tolist()
            tier.meanwhile()
            tables.stream.synchronize()
            tier.used(np.full(rows, rows == 1), experts)

        def decode(steps: int) -> float:
            before = dataclasses.replace(tier.counts()[Use.DECODE])
            for _ in range(steps):
                step(1, 3.0)
            tier.advance()
            now = tier.counts()[Use.DECODE]
            return 1 - (now.misses - before.misses) / (now.uses - before.uses)

        decode(200)
        while tier.advance():
            pass
        hits = decode(200)
        while tier.advance():
            pass
        letters, uses = tier.letters(), tier.counts()[Use.DECODE].uses
        for _ in range(40):
            step(512, 0.0)
        assert tier.letters() == letters
        assert tier.counts()[Use.DECODE].uses == uses
        assert tier.streamed > 0
        assert decode(200) >= 0.95 * hits


def leaning(experts: int, lean: float) -> NDArray[np.float64]:
    """How probable each expert is: all the same for 0."""
    weights = 1.0 / (1 + np.arange(experts)) ** lean
    return weights / weights.sum()
