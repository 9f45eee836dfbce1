"""Steps of any size, of decode and prefill: what they are granted, and what they leave in the ring."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from residency_model import Stepper, Tier, one_layer, resident

from sparkd.residency.commands import Grant
from sparkd.residency.leases import LeaseState, Use
from sparkd.residency.slabs import LayerSize, SlabSize, SlabUse
from sparkd.residency.slots import Record


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize("reserve", [1, 2, 5])
def test_a_step_that_touches_every_expert_ends_at_five_percent_residency(workers, use, reserve):
    layers, experts = 10, 32
    tier = Tier([LayerSize(0, experts)] * layers, [SlabSize(layers * experts // 20, reserve)], workers)
    rng = random.Random(reserve)
    everything = [[Record(layer, expert) for expert in range(experts)] for layer in range(layers)]
    for _ in range(2):
        steps = [Stepper(tier, worker, everything, use) for worker in range(workers)]
        running = list(steps)
        turns = 0
        while running:
            turns += 1
            assert turns < 100 * layers * experts * workers
            step = rng.choice(running)
            if not step.advance():
                running.remove(step)
            if tier.copies:
                tier.copied(rng.choice(tier.copies))
            tier.publish()
            tier.observe()
        assert [step.computed for step in steps] == [layers * experts] * workers
    tier.settle()


def test_parts_are_granted_in_the_order_they_were_asked_for():
    tier = one_layer(4, 3)
    first = tier.stage(0, tier.part(0, [0, 1]), Use.PREFILL)
    second = tier.stage(1, tier.part(0, [2, 3, 4]), Use.PREFILL)
    small = tier.stage(1, tier.part(0, [5]), Use.PREFILL)
    assert tier.engine.leases() == {
        first: LeaseState.COPYING,
        second: LeaseState.WAITING,
        small: LeaseState.WAITING,
    }
    for copy in list(tier.copies):
        tier.copied(copy)
    shared = tier.stage(1, tier.part(0, [0]), Use.PREFILL)
    assert tier.engine.leases()[shared] is LeaseState.WAITING, "sharing a staged record would keep others waiting"
    tier.release(first)
    assert tier.engine.leases()[second] is LeaseState.COPYING
    tier.settle()


def test_a_part_whose_records_are_resident_waits_for_nobody():
    tier = one_layer(4, 1)
    resident(tier, 7)
    tier.stage(0, tier.part(0, [0]), Use.PREFILL)
    tier.stage(0, tier.part(0, [1]), Use.PREFILL)
    lease = tier.stage(1, tier.part(0, [7]), Use.PREFILL)
    assert tier.asked[lease].places == (tier.words[Record(0, 7)],)


def test_records_named_twice_are_granted_twice_from_one_slot():
    tier = one_layer(4, 2)
    lease = tier.stage(0, [Record(0, 3), Record(0, 2), Record(0, 3)], Use.PREFILL)
    assert len(tier.copies) == 2
    for copy in list(tier.copies):
        tier.copied(copy)
    first, other, again = tier.asked[lease].places
    assert first == again != other


def test_a_part_larger_than_the_reserve_is_impossible():
    engine = one_layer(6, 2).engine
    assert engine.part_limit(0) == 2
    with pytest.raises(ValueError, match="names 3 records, the reserve has 2"):
        engine.stage(0, [Record(0, 0), Record(0, 1), Record(0, 2)], Use.DECODE)
    assert engine.leases() == {}


def test_an_empty_part_is_granted_at_once():
    number, commands = one_layer(4, 2).engine.stage(0, [], Use.DECODE)
    assert commands == [Grant(number, ())]


# ---- prefill and decode ----


def test_prefill_streams_through_two_slots_of_the_reserve_and_leaves_no_trace():
    tier = one_layer(6, 2, experts=12)
    resident(tier, 0, 1, 2, 3)
    words, recency = dict(tier.words), list(tier.engine._slabs[0].ring)
    seen = set()
    leases = [tier.stage(0, [Record(0, expert)], Use.PREFILL) for expert in (4, 5)]
    for expert in range(4, 12):
        tier.copied(tier.copies[0])
        (place,) = tier.asked[leases[0]].places
        seen.add(place.slot)
        assert len(tier.copies) <= 1, "the next record is copied while this one is used"
        tier.release(leases.pop(0))
        if expert + 2 < 12:
            leases.append(tier.stage(0, [Record(0, expert + 2)], Use.PREFILL))
    tier.used(0, [Record(0, expert) for expert in (0, *range(4, 12))], Use.PREFILL)
    assert seen == {4, 5}
    assert tier.words == words
    assert list(tier.engine._slabs[0].ring) == recency
    counts = tier.engine.counts
    assert (counts[Use.PREFILL].uses, counts[Use.PREFILL].misses) == (9, 8)
    assert (counts[Use.DECODE].uses, counts[Use.DECODE].misses) == (0, 0)


def test_the_decode_hit_rate_after_a_long_prefill_is_that_of_before():
    layers, experts = 4, 32
    tier = Tier([LayerSize(0, experts)] * layers, [SlabSize(64, 4)], 1)
    rng = random.Random(1)

    def decode(steps: int) -> float:
        counts = tier.engine.counts[Use.DECODE]
        uses, misses = counts.uses, counts.misses
        for _ in range(steps):
            wanted = [
                [Record(layer, e) for e in {int(rng.paretovariate(0.7)) % experts for _ in range(4)}]
                for layer in range(layers)
            ]
            play(tier, wanted, Use.DECODE)
        return 1 - (counts.misses - misses) / (counts.uses - uses)

    decode(100)
    before = decode(100)
    everything = [[Record(layer, expert) for expert in range(experts)] for layer in range(layers)]
    for _ in range(20):
        play(tier, everything, Use.PREFILL)
    assert decode(100) >= 0.95 * before > 0.3


def play(tier: Tier, wanted: list[list[Record]], use: Use) -> None:
    """One step of worker 0, its copies done as soon as they are asked for."""
    step = Stepper(tier, 0, wanted, use)
    while step.advance():
        for copy in list(tier.copies):
            tier.copied(copy)
        tier.publish()
    tier.used(0, [record for records in wanted for record in records], use)
    tier.observe()
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.publish()


def test_a_miss_is_counted_once_however_it_was_served():
    tier = one_layer(4, 1)
    tier.begin(0)
    for expert in (0, 1, 2, 3, 4):  # three fit into the ring at once, the others go through the reserve, one at a time
        lease = tier.stage(0, [Record(0, expert)], Use.DECODE)
        tier.copied(tier.copies[0])
        tier.publish()
        tier.release(lease)
    missed = tier.used(0, [Record(0, expert) for expert in range(5)], Use.DECODE)
    assert missed == [Record(0, expert) for expert in range(5)]
    tier.end(0)
    tier.observe()
    assert [(copy.record.expert, copy.source is None) for copy in tier.copies] == [(4, False)], "nothing is read again"
    tier.settle()
    assert set(tier.words) == {Record(0, 1), Record(0, 2), Record(0, 4)}, "what the reserve still held"
    assert tier.used(0, [Record(0, 2)], Use.DECODE) == []
    counts = tier.engine.counts[Use.DECODE]
    assert (counts.uses, counts.misses) == (6, 5)


def test_a_spare_slot_takes_a_miss_straight_into_the_ring():
    tier = one_layer(8, 2, spare=2)
    tier.admit(Record(0, expert) for expert in range(6))
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.publish()
    tier.observe()
    assert tier.engine.slab_use() == [SlabUse(slots=8, reserve=2, hot=0, ring=4, moving=0, free=4)]
    tier.begin(0)
    lease = tier.stage(0, [Record(0, 10), Record(0, 11)], Use.DECODE)
    assert [copy.reserve for copy in tier.copies] == [False, False]
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.publish()
    tier.release(lease)
    tier.end(0)
    tier.observe()
    assert not tier.copies
    assert set(tier.words) == {Record(0, expert) for expert in (4, 5, 10, 11)}


# ---- the ring ----


def test_with_a_half_life_of_one_step_the_ring_is_a_plain_lru():
    tier = one_layer(9, 1, experts=40, workers=1)
    tier.place([[]], ring=1.0, half_life=1.0)
    rng = random.Random(5)
    plain: OrderedDict[Record, None] = OrderedDict()
    for _ in range(2000):
        record = Record(0, int(rng.gauss(20, 7)) % 40)
        serve(tier, [record])
        plain[record] = None
        plain.move_to_end(record)
        while len(plain) > 8:
            plain.popitem(last=False)
        assert set(tier.words) == set(plain)


def test_what_comes_once_does_not_drive_out_what_comes_often():
    tier = one_layer(9, 1, experts=40, workers=1)
    tier.place([[]], ring=1.0, half_life=64.0)
    often = [Record(0, expert) for expert in range(7)]
    for once in range(200):
        serve(tier, [often[once % 7], often[(once + 3) % 7], Record(0, 7 + once % 33)])
    assert set(often) < set(tier.words)
    for later in range(200):
        serve(tier, [Record(0, 20 + later % 8)])
    assert set(tier.words) == {Record(0, 20 + n) for n in range(8)}, "what was hot long ago is forgotten"


def serve(tier: Tier, wanted: list[Record]) -> None:
    """A step of worker 0 that admits what it missed."""
    tier.begin(0)
    tier.end(0)
    tier.admit(tier.used(0, wanted, Use.DECODE))
    tier.observe()
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.publish()


def test_a_leased_record_stays_and_the_next_coldest_goes():
    tier = one_layer(4, 1)
    resident(tier, 0, 1, 2)
    lease = tier.stage(1, [Record(0, 0)], Use.PREFILL)
    tier.admit([Record(0, 3)])
    assert set(tier.words) == {Record(0, 0), Record(0, 2)}
    tier.release(lease)
    tier.admit([Record(0, 4)])
    assert set(tier.words) == {Record(0, 2)}


def test_of_more_records_than_the_ring_has_room_for_the_last_ones_are_admitted():
    tier = one_layer(4, 1)
    tier.admit(Record(0, expert) for expert in range(10))
    assert [copy.record.expert for copy in tier.copies] == [7, 8, 9]
