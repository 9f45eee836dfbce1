"""Prompts on a device whose experts are elsewhere: the bits of the native executor, each record over the link once.

What is brought before it is known to be wanted is bounded, and no wait of the two buffers can be left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulated_tiers import PART_ROWS, Churned
from host_device import HostDevice
from pairs import Pair, loaded
from prompt_replay import Recording, Replay, arena_for
from test_device_tier import Careless, WrongBytes

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
                assert max(vain.values(), default=0) <= STAGING_PARTS * PART_ROWS
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


def test_a_recorded_prompt_of_20000_tokens_leaves_slots_and_what_decode_finds_there_as_they_were(
    tmp_path: Path, seed: int
) -> None:
    """Decoding and the prompt as a model of true shapes routed them; and hardly a record comes in vain."""
    recording = Recording.load()
    half = len(recording.decode) // 2
    with arena_for(recording, tmp_path) as arena:
        replay = Replay(arena, 0.5, 512, seed)
        tier = replay.tier
        replay.decode(recording.decode[: half // 2])
        hits = replay.decode(recording.decode[half // 2 : half])
        letters, uses = tier.letters(), tier.counts()[Use.DECODE].uses
        replay.prompt(recording.steps(512))
        assert tier.letters() == letters
        assert tier.counts()[Use.DECODE].uses == uses
        assert replay.least <= tier.streamed <= 1.02 * replay.least
        after = replay.decode(recording.decode[half : half + half // 2])
        print(f"hits before {hits:.1%}, after {after:.1%}; streamed {tier.streamed / replay.least - 1:+.2%}")
        assert after >= 0.95 * hits
