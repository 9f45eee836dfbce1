"""The residency engine's promises, one by one. `test_residency_machine` holds it to them under random operations."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from residency_model import Tier

from sparkd.residency.commands import Cancel, Copy, Grant, Hurry, Publish, Refuse, Retract
from sparkd.residency.epochs import Adopted, Steps
from sparkd.residency.leases import LeaseState, Use
from sparkd.residency.placement import Placement, PlacementError
from sparkd.residency.slabs import LayerSize, SlabSize, SlabUse
from sparkd.residency.slots import GENERATIONS, Place, Record, Slot, SlotState
from sparkd.residency.transfers import Residency

IDLE = [Steps(0, 0)]


def kinds(commands):
    return [type(command) for command in commands]


def one_layer(slots: int, reserve: int, experts: int = 20, spare: int = 0, workers: int = 2) -> Tier:
    return Tier([LayerSize(0, experts)], [SlabSize(slots, reserve, spare)], workers)


def resident(tier: Tier, *experts: int) -> list[Record]:
    """Admit experts of layer 0, in that order, and publish them."""
    records = [Record(0, expert) for expert in experts]
    tier.admit(records)
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.publish()
    assert all(record in tier.words for record in records)
    return records


# ---- steps of any size ----


class Stepper:
    """A worker's step: expert layer after expert layer, the absent records staged part by part."""

    def __init__(self, tier: Tier, worker: int, wanted: list[list[Record]], use: Use) -> None:
        self.tier, self.worker, self.use = tier, worker, use
        self.left = [list(records) for records in wanted]
        self.lease: int | None = None
        self.computed = 0
        tier.begin(worker)

    def advance(self) -> bool:
        """Do what can be done now; false once the step has ended."""
        tier = self.tier
        if self.lease is not None:
            if tier.asked[self.lease].places is not None:
                self.computed += len(tier.asked[self.lease].records)
                tier.release(self.lease)
                self.lease = None
            return True
        while self.left and not self.left[0]:
            self.left.pop(0)
        if not self.left:
            tier.end(self.worker)
            return False
        here = [record for record in self.left[0] if record in tier.words]
        self.computed += len(here)
        absent = [record for record in self.left[0] if record not in tier.words]
        part = tier.part(absent[0].layer, [record.expert for record in absent]) if absent else []
        self.left[0] = absent[len(part) :]
        if part:
            self.lease = tier.stage(self.worker, part, self.use)
        return True


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


# ---- epochs ----


def test_a_slot_is_written_again_only_when_every_step_that_could_read_it_has_ended():
    tier = one_layer(3, 1)
    resident(tier, 0, 1)
    tier.begin(0)
    tier.begin(1)
    tier.admit([Record(0, 2)])
    assert Record(0, 0) not in tier.words
    for act, free in ((lambda: None, False), (lambda: tier.end(1), False), (lambda: tier.end(0), True)):
        act()
        tier.observe()
        assert bool(tier.copies) is free


def test_a_step_that_began_after_the_word_was_retracted_is_not_waited_for():
    tier = one_layer(3, 1)
    resident(tier, 0, 1)
    tier.begin(0)
    tier.admit([Record(0, 2)])
    tier.observe()
    tier.begin(1)
    tier.begin(0)
    tier.end(0)
    tier.observe()
    assert [copy.record for copy in tier.copies] == [Record(0, 2)]


def test_without_a_running_step_a_slot_is_free_as_soon_as_the_counters_are_read():
    engine = Residency([LayerSize(0, 3)], [SlabSize(2, 1)])
    (copy,) = engine.admit([Record(0, 0)])
    assert engine.copied(copy) == []
    assert engine.publish() == [Publish(Record(0, 0), Place(0, 1))]
    assert engine.admit([Record(0, 1)]) == [Retract(Record(0, 0), Place(0, 1))]
    assert engine.observe(IDLE) == [Copy(Record(0, 1), 0, Place(0, 2), reserve=False)]


def test_a_worker_that_is_gone_is_waited_for_no_longer_and_loses_its_leases():
    tier = one_layer(3, 1)
    resident(tier, 0, 1)
    tier.begin(0)
    granted = tier.stage(0, [Record(0, 5)], Use.PREFILL)
    tier.copied(tier.copies[0])
    assert tier.asked[granted].places is not None
    waiting = tier.stage(1, [Record(0, 6)], Use.PREFILL)
    tier.admit([Record(0, 2)])
    tier.observe()
    tier.gone(0)
    tier.observe()
    assert {copy.record.expert for copy in tier.copies} == {2, 6}
    assert tier.engine.leases() == {waiting: LeaseState.COPYING}
    tier.settle()


def test_the_counters_of_a_worker_that_is_gone_mean_nothing_until_another_takes_its_place():
    tier = one_layer(3, 1)
    resident(tier, 0, 1)
    tier.begin(0)
    tier.gone(0)
    tier.admit([Record(0, 2)])
    tier.observe()
    assert [copy.record.expert for copy in tier.copies] == [2]
    tier.copied(tier.copies[0])
    tier.publish()
    tier.attach(0)
    tier.begin(0)
    tier.admit([Record(0, 3)])
    tier.observe()
    assert not tier.copies
    tier.end(0)
    tier.observe()
    assert [copy.record.expert for copy in tier.copies] == [3]


def test_generations_wrap_like_those_of_the_words():
    engine = Residency([LayerSize(0, 3)], [SlabSize(2, 1)], Adopted({}, GENERATIONS - 1, IDLE))
    engine.observe(IDLE)
    (copy,) = engine.admit([Record(0, 0)])
    assert copy.place.generation == 0


# ---- copies ----


def test_a_failed_copy_refuses_who_waits_for_it_and_gives_everything_back():
    tier = one_layer(5, 3)
    lease = tier.stage(0, [Record(0, 0), Record(0, 1)], Use.PREFILL)
    other = tier.stage(1, [Record(0, 1), Record(0, 2)], Use.PREFILL)
    bad, good = tier.copies[1], tier.copies[0]
    commands = tier.engine.failed(bad, "disk on fire")
    assert {c.lease for c in commands if isinstance(c, Refuse)} == {lease, other}
    assert [c.copy.record.expert for c in commands if isinstance(c, Cancel)] == [0, 2]
    tier.copies.remove(bad)
    tier.run(commands)
    assert tier.engine.leases() == {}
    tier.copied(good)
    tier.settle()


def test_a_copy_that_is_cancelled_keeps_its_slot_until_it_has_ended():
    tier = one_layer(2, 1)
    lease = tier.stage(0, [Record(0, 0)], Use.PREFILL)
    tier.release(lease)
    assert tier.cancelled == set(tier.copies)
    tier.stage(1, [Record(0, 1)], Use.PREFILL)
    assert len(tier.copies) == 1
    tier.copied(tier.copies[0])
    assert [copy.record.expert for copy in tier.copies] == [1]
    tier.settle()


def test_an_admission_can_be_cancelled_while_it_waits_and_while_it_is_copied_but_not_from_under_a_lease():
    tier = one_layer(2, 1)
    tier.admit([Record(0, 0), Record(0, 1)])
    assert [copy.record.expert for copy in tier.copies] == [1]
    tier.admit([Record(0, 2)])
    tier.cancel(Record(0, 2))
    tier.cancel(Record(0, 1))
    assert tier.cancelled == set(tier.copies)
    tier.failed(tier.copies[0])
    assert not tier.copies
    tier.stage(0, [Record(0, 3)], Use.DECODE)
    tier.cancel(Record(0, 3))
    assert not tier.cancelled
    tier.settle()
    assert set(tier.words) == {Record(0, 3)}


def test_copies_may_end_in_any_order_and_are_granted_when_the_last_has():
    tier = one_layer(8, 4)
    lease = tier.stage(0, tier.part(0, [0, 1, 2, 3]), Use.PREFILL)
    for number in (2, 0, 1, 0):
        assert tier.asked[lease].places is None
        tier.copied(tier.copies[number])
    assert [place.slot for place in tier.asked[lease].places] == [4, 5, 6, 7]


def test_what_is_complete_is_published_when_the_owner_says_so():
    tier = one_layer(4, 1)
    tier.admit([Record(0, 0)])
    tier.copied(tier.copies[0])
    assert tier.engine.place_of(Record(0, 0)) is None
    tier.publish()
    assert tier.engine.place_of(Record(0, 0)) == Place(0, 1)


def test_an_ending_of_a_copy_that_is_not_under_way_is_impossible():
    tier = one_layer(4, 1)
    tier.admit([Record(0, 0)])
    (copy,) = tier.copies
    older = Copy(copy.record, 0, Place(0, 0), reserve=False)
    with pytest.raises(RuntimeError, match="not under way"):
        tier.engine.copied(older)
    tier.copied(copy)
    for end in (tier.engine.copied, lambda copy: tier.engine.failed(copy, "again")):
        with pytest.raises(RuntimeError, match="not under way"):
            end(copy)
    with pytest.raises(KeyError):
        tier.engine.release(1)


def test_a_slot_takes_only_the_turns_that_are_drawn():
    slot = Slot(0, Place(3, 1), reserve=False)
    for wrong in (SlotState.RESIDENT, SlotState.DRAINING, SlotState.CANCELLING):
        with pytest.raises(RuntimeError, match=r"slot=3.* of slab 0 cannot go from FREE"):
            slot.turn(wrong)
    with pytest.raises(RuntimeError, match="has no record"):
        _ = slot.owner


# ---- what the reserve still holds ----


def test_what_a_step_missed_joins_the_ring_by_a_copy_from_the_reserve():
    tier = one_layer(4, 2)
    resident(tier, 0, 1)
    tier.begin(0)
    lease = tier.stage(0, [Record(0, 5)], Use.DECODE)
    (staged,) = tier.copies
    assert (staged.reserve, staged.source) == (True, None)
    tier.copied(staged)
    place = tier.asked[lease].places[0]
    tier.release(lease)
    tier.end(0)
    tier.observe()
    (copy,) = tier.copies
    assert (copy.record, copy.reserve, copy.source) == (Record(0, 5), False, place)
    others = [tier.stage(1, [Record(0, expert)], Use.PREFILL) for expert in (7, 8)]
    assert [tier.engine.leases()[n] for n in others] == [LeaseState.COPYING, LeaseState.WAITING], "the source is kept"
    tier.copied(copy)
    assert tier.engine.leases()[others[1]] is LeaseState.COPYING
    tier.settle()


def test_a_record_that_a_free_slot_of_the_reserve_holds_is_leased_without_a_copy():
    tier = one_layer(4, 3)
    first = tier.stage(0, [Record(0, 5), Record(0, 6)], Use.PREFILL)
    for copy in list(tier.copies):
        tier.copied(copy)
    places = tier.asked[first].places
    tier.release(first)
    again = tier.stage(1, [Record(0, 6), Record(0, 5), Record(0, 6)], Use.PREFILL)
    assert tier.asked[again].places == (places[1], places[0], places[1])
    assert tier.copies == []
    tier.settle()


def test_slots_of_the_reserve_are_filled_in_the_order_they_became_free():
    tier = one_layer(4, 3)
    for expert in range(3):
        lease = tier.stage(0, [Record(0, expert)], Use.PREFILL)
        tier.copied(tier.copies[0])
        tier.release(lease)
    tier.release(tier.stage(0, [Record(0, 0)], Use.PREFILL))
    lease = tier.stage(0, [Record(0, 9)], Use.PREFILL)
    assert {record for _, record in tier.whole.items()} == {Record(0, 0), Record(0, 2)}
    tier.release(lease)
    tier.settle()


def test_what_is_on_its_way_to_the_reserve_is_not_read_twice():
    tier = one_layer(3, 1)
    resident(tier, 0, 1)
    tier.begin(0)
    lease = tier.stage(0, [Record(0, 5)], Use.DECODE)
    (staged,) = tier.copies
    tier.end(0)
    tier.observe()
    assert tier.copies == [staged], "a slot is free, and waits"
    tier.copied(staged)
    (copy,) = tier.copies
    assert copy.source == tier.asked[lease].places[0]
    tier.settle()
    assert Record(0, 5) in tier.words


def test_a_copy_that_a_part_of_a_step_comes_to_wait_for_is_hurried_once():
    engine = Residency([LayerSize(0, 9)], [SlabSize(6, 2)])
    (copy,) = engine.admit([Record(0, 1)])
    _, commands = engine.stage(0, [Record(0, 1), Record(0, 2)], Use.DECODE)
    (missed,) = [command for command in commands if isinstance(command, Copy)]
    assert commands == [missed, Hurry(copy), Hurry(missed)]
    assert engine.stage(0, [Record(0, 1)], Use.DECODE)[1] == []


# ---- the hot set ----


def test_a_placement_is_reached_a_few_swaps_at_a_time_and_never_evicted():
    tier = one_layer(10, 2, experts=30)
    resident(tier, *range(8))
    tier.place([[3, 4, 20, 21, 22]], ring=0.25)
    swaps = []
    while tier.engine.swaps_left():
        swaps.append(tier.swap(2))
        tier.settle()
    assert swaps == [2, 2, 1]
    hot = {Record(0, expert) for expert in (3, 4, 20, 21, 22)}
    assert tier.engine.hot() == hot
    for expert in range(23, 30):
        tier.admit([Record(0, expert)])
        tier.settle()
        assert hot <= set(tier.words)


def test_a_record_that_becomes_hot_keeps_its_slot_and_costs_no_copy():
    tier = one_layer(5, 1)
    resident(tier, 0, 1, 2, 3)
    words = dict(tier.words)
    tier.place([[1, 2]], ring=0.5)
    tier.swap(10)
    assert not tier.copies
    assert tier.words == words
    tier.place([[3]], ring=0.5)
    tier.swap(10)
    assert (tier.words, tier.engine.hot()) == (words, {Record(0, 3)})
    assert not tier.copies


def test_a_record_that_is_no_longer_hot_counts_as_just_used_in_the_ring():
    tier = one_layer(4, 1)
    resident(tier, 0, 1, 2)
    tier.place([[0]], ring=0.5)
    tier.swap(1)
    tier.place([[]], ring=0.5)
    tier.swap(1)
    for expert, left in ((5, {0, 2}), (6, {0}), (7, set())):
        tier.admit([Record(0, expert)])
        assert set(tier.words) == {Record(0, e) for e in left}


def test_the_bound_on_swaps_is_for_all_slabs_together():
    tier = Tier([LayerSize(0, 9), LayerSize(1, 9)], [SlabSize(5, 1), SlabSize(5, 1)])
    tier.place([[0, 1], [0, 1]], ring=0.5)
    assert [tier.swap(3), tier.swap(3), tier.swap(3)] == [3, 1, 0]


def test_hot_copies_that_fail_are_tried_again_by_a_later_swap():
    tier = one_layer(4, 1)
    tier.place([[5]], ring=0.5)
    tier.swap(1)
    tier.failed(tier.copies[0])
    assert (tier.engine.hot(), tier.engine.swaps_left(), tier.copies) == (frozenset(), 1, [])
    tier.swap(1)
    tier.settle()
    assert set(tier.words) == {Record(0, 5)}


def test_a_new_placement_drops_what_still_waits_for_the_old_one():
    tier = one_layer(4, 1)
    resident(tier, 0, 1, 2)
    tier.begin(0)
    tier.place([[7, 8]], ring=0.3)
    tier.swap(2)
    tier.place([[9]], ring=0.3)
    tier.swap(2)
    tier.settle()
    assert tier.engine.hot() == {Record(0, 9)}
    assert not {Record(0, 7), Record(0, 8)} & set(tier.words)


@pytest.mark.parametrize(
    ("hot", "ring", "said"),
    [
        ([[1], [2]], 0.5, "placement for 2 expert layers, the model has 1"),
        ([[1, 1]], 0.5, "names an expert of expert layer 0 twice"),
        ([[20]], 0.5, "outside expert layer 0: it has 20"),
        ([[-1]], 0.5, "outside expert layer 0"),
        ([[0, 1, 2]], 0.5, "3 hot records of one size, beside the ring there is room for 2"),
        ([[0]], 1.5, "share 1.5"),
        ([[0]], float("nan"), "share nan"),
    ],
)
def test_an_impossible_placement_is_refused_and_changes_nothing(hot, ring, said):
    tier = one_layer(5, 1)
    resident(tier, 0, 1, 2, 3)
    tier.place([[1]], 0.5)
    with pytest.raises(PlacementError, match=said):
        tier.engine.place(Placement(2, hot, ring))
    tier.swap(10)
    assert tier.engine.hot() == {Record(0, 1)}


# ---- sizes, adoption ----


@pytest.mark.parametrize(
    ("size", "records", "fits"),
    [
        (SlabSize(2, 1), 20, True),
        (SlabSize(1, 1), 20, True),
        (SlabSize(1, 2), 20, False),
        (SlabSize(1, 0), 20, False),
        (SlabSize(19, 0), 20, False),
        (SlabSize(20, 0), 20, True),
        (SlabSize(21, 1), 20, True),
        (SlabSize(20, 1, spare=18), 20, True),
        (SlabSize(20, 1, spare=19), 20, False),
        (SlabSize(20, 0, spare=1), 20, False),
        (SlabSize(20, -1), 20, False),
        (SlabSize(0, 0), 0, True),
    ],
)
def test_a_slab_has_a_reserve_or_a_slot_for_every_record(size, records, fits):
    if fits:
        Residency([LayerSize(0, records)], [size])
    else:
        with pytest.raises(ValueError, match=f"{records} records cannot be served"):
            Residency([LayerSize(0, records)], [size])


def test_with_a_slot_for_every_record_nothing_moves_once_it_is_there():
    layers = [LayerSize(0, 5), LayerSize(1, 3), LayerSize(0, 4)]
    tier = Tier(layers, [SlabSize(9, 0), SlabSize(3, 0)])
    tier.admit(tier.records)
    slots = [(copy.slab, copy.place) for copy in sorted(tier.copies, key=lambda copy: copy.record)]
    assert slots[:5] == [(0, Place(n, 1)) for n in range(5)]
    assert slots[5:8] == [(1, Place(n, 1)) for n in range(3)]
    assert slots[8:] == [(0, Place(n, 1)) for n in range(5, 9)]
    lease = tier.stage(0, tier.records, Use.DECODE)
    for copy in list(tier.copies):
        assert tier.asked[lease].places is None
        tier.copied(copy)
    assert len(tier.asked[lease].places) == 12
    tier.publish()
    assert tier.engine.residents() == [5, 3, 4]
    for use in Use:
        number, commands = tier.engine.stage(0, tier.records, use)
        assert kinds(commands) == [Grant]
        assert tier.engine.release(number) == []
    assert tier.engine.admit(tier.records) == []


def test_a_slab_without_ordinary_slots_serves_parts_alone():
    tier = one_layer(2, 2)
    tier.admit(tier.records[:3])
    assert tier.copies == []
    lease = tier.stage(0, tier.part(0, [1, 4]), Use.DECODE)
    for copy in list(tier.copies):
        tier.copied(copy)
    assert len(tier.asked[lease].places) == 2
    tier.release(lease)
    tier.settle()


def test_closed_slots_are_given_up_by_whoever_is_in_them_and_the_hot_come_back_at_the_cost_of_the_ring():
    tier = one_layer(9, 1)
    resident(tier, 0, 1, 2, 3, 4, 5, 6, 7)
    tier.place([[6, 7]], 0.5)
    tier.swap(2)
    places = {tier.engine.place_of(Record(0, expert)).slot for expert in (6, 7)}
    tier.begin(0)
    assert not tier.close(0, places), "a step may read them"
    assert tier.engine.hot() == frozenset()
    tier.end(0)
    tier.observe()
    assert tier.close(0, places)
    assert sum(tier.engine.residents()) == 6
    assert tier.engine.swaps_left() == 2
    tier.swap(2)
    tier.settle()
    assert {Record(0, 6), Record(0, 7)} == tier.engine.hot() <= set(tier.words)
    assert sum(tier.engine.residents()) == 6
    assert not places & {place.slot for place in tier.words.values()}
    use = tier.engine.slab_use()[0]
    assert (use.slots, use.hot, use.ring) == (7, 2, 4)


def test_a_hot_set_that_closed_slots_have_no_room_for_gives_up_the_least_wanted():
    tier = one_layer(5, 1)
    tier.place([[3, 1, 7, 5]], 0.0)
    tier.swap(4)
    tier.settle()
    places = [tier.engine.place_of(Record(0, expert)).slot for expert in (3, 7)]
    tier.close(0, places)
    tier.observe()
    assert tier.close(0, places)
    tier.swap(4)
    tier.settle()
    assert tier.engine.hot() == {Record(0, 1), Record(0, 5)}
    assert tier.engine.swaps_left() == 0


def test_what_an_owner_before_left_is_adopted_where_it_is():
    residents = {Record(0, 5): Place(2, 7), Record(0, 1): Place(0, 9)}
    engine = Residency([LayerSize(0, 9)], [SlabSize(5, 1)], Adopted(residents, 9, IDLE))
    assert {record: engine.place_of(record) for record in residents} == residents
    copies = engine.observe(IDLE) + engine.admit([Record(0, 2), Record(0, 3)])
    assert [copy.place for copy in copies] == [Place(1, 10), Place(3, 10)]
    assert engine.admit([Record(0, 4)]) == [Retract(Record(0, 5), Place(2, 7))]


@pytest.mark.parametrize("places", [{0: Place(4, 1)}, {0: Place(-1, 1)}, {0: Place(1, 1), 3: Place(1, 2)}])
def test_residents_that_cannot_be_where_they_are_said_to_be_are_not_adopted(places):
    with pytest.raises(ValueError, match="cannot be resident"):
        Residency([LayerSize(0, 9)], [SlabSize(5, 1)], Adopted({Record(0, e): p for e, p in places.items()}, 2, IDLE))


def test_slots_that_the_readers_of_an_owner_before_may_read_are_not_written_until_these_have_passed():
    tier = one_layer(4, 2)
    resident(tier, 0)
    tier.begin(0)
    tier.begin(1)
    tier.stage(0, tier.part(0, [8, 9]), Use.PREFILL)
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.restart_owner()
    tier.observe()
    lease = tier.stage(1, tier.part(0, [3]), Use.PREFILL)
    tier.admit([Record(0, 4)])
    assert not tier.copies
    tier.attach(0)
    tier.observe()
    assert not tier.copies
    tier.attach(1)  # gives up its lease in the reserve, and its place in the queue
    tier.observe()
    assert lease not in tier.engine.leases()
    tier.stage(1, tier.part(0, [3]), Use.PREFILL)
    assert [copy.record.expert for copy in tier.copies] == [3], "the reserve is free, the rest waits for the steps"
    tier.end(0)
    tier.end(1)
    tier.observe()
    assert [copy.record.expert for copy in tier.copies] == [3, 4]
    tier.settle()


@pytest.mark.parametrize("half_life", [0.0, 0.5, -1.0, float("inf"), float("nan")])
def test_a_ring_without_a_possible_half_life_is_refused(half_life):
    tier = one_layer(5, 1)
    with pytest.raises(PlacementError, match="half-life"):
        tier.engine.place(Placement(1, [[0]], 0.5, half_life))
    assert tier.engine.hot() == frozenset()
