"""When a slot may be written again, how copies end, and what the reserve still holds."""

from __future__ import annotations

import pytest
from residency_model import IDLE, one_layer, resident

from sparkd.residency.commands import Cancel, Copy, Hurry, Lend, Publish, Refuse, Retract
from sparkd.residency.epochs import Adopted
from sparkd.residency.leases import LeaseState, Use
from sparkd.residency.slabs import LayerSize, SlabSize
from sparkd.residency.slots import GENERATIONS, Place, Record, Slot, SlotState
from sparkd.residency.transfers import Residency

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
    assert not any(isinstance(c, Cancel) for c in commands), "what has begun may be there already"
    tier.copies.remove(bad)
    tier.run(commands)
    assert tier.engine.leases() == {}
    tier.copied(good)
    tier.settle()


def test_what_nobody_leases_any_more_is_copied_to_its_end_and_kept():
    tier = one_layer(3, 1)
    lease = tier.stage(0, [Record(0, 0)], Use.PREFILL)
    tier.release(lease)
    tier.stage(1, [Record(0, 1)], Use.PREFILL)
    assert [copy.record.expert for copy in tier.copies] == [0]
    tier.copied(tier.copies[0])
    assert [copy.record.expert for copy in tier.copies] == [1]
    tier.settle()


def test_a_lease_may_end_before_its_copies_are_told_and_nothing_of_it_is_read_again():
    tier = one_layer(5, 2)
    lease = tier.stage(0, [Record(0, 0), Record(0, 1)], Use.PREFILL)
    tier.release(lease)
    again = tier.stage(0, [Record(0, 1)], Use.PREFILL)
    assert [copy.record.expert for copy in tier.copies] == [0, 1]
    tier.copied(tier.copies[0])
    tier.copied(tier.copies[0])
    assert tier.asked[again].places is not None
    last = tier.stage(0, [Record(0, 0)], Use.PREFILL)
    assert tier.asked[last].places is not None
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
    assert commands[:-1] == [missed, Hurry(copy), Hurry(missed)]
    (lend,) = engine.stage(0, [Record(0, 1)], Use.DECODE)[1]
    assert isinstance(lend, Lend)
