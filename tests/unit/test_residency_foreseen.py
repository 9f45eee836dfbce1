"""What is copied ahead of need: it takes nothing that is wanted, serves who comes to need it, and is first to go."""

from __future__ import annotations

from residency_model import Tier, kinds

from sparkd.residency.commands import Copy, Hurry
from sparkd.residency.leases import Use
from sparkd.residency.slabs import LayerSize, SlabSize
from sparkd.residency.slots import Record


def tier(slots: int, reserve: int, spare: int = 0, experts: int = 12) -> Tier:
    return Tier([LayerSize(0, experts)], [SlabSize(slots, reserve, spare)])


def test_free_slots_and_half_of_the_reserve_are_filled_ahead_and_no_more() -> None:
    one = tier(6, 4)
    one.foresee(0, [Record(0, expert) for expert in range(8)])
    assert [(copy.record.expert, copy.reserve, copy.ahead) for copy in one.copies] == [
        (0, False, True), (1, False, True), (2, True, True), (3, True, True),
    ]  # fmt: skip
    one.settle()
    assert set(one.words) == {Record(0, 0), Record(0, 1)}


def test_what_was_foreseen_is_hurried_once_it_is_needed_and_counts_as_missed() -> None:
    one = tier(4, 2)
    one.foresee(0, [Record(0, 5)])
    lease = one.stage(0, [Record(0, 5), Record(0, 6)], Use.DECODE)
    (ahead, missed) = one.copies
    assert (ahead.record.expert, missed.record.expert, missed.ahead) == (5, 6, False)
    one.copied(ahead)
    one.copied(missed)
    one.publish()
    assert one.asked[lease].places is not None
    one.release(lease)
    assert one.used(0, [Record(0, 5), Record(0, 6)], Use.DECODE) == [Record(0, 5), Record(0, 6)]


def test_what_came_ahead_of_a_step_and_was_used_without_a_word_counts_as_missed_by_it() -> None:
    one = tier(4, 2)
    one.foresee(0, [Record(0, 5), Record(0, 6)])
    one.settle()
    assert set(one.words) == {Record(0, 5), Record(0, 6)}
    assert one.used(0, [Record(0, 5)], Use.DECODE) == [Record(0, 5)]
    assert one.used(0, [Record(0, 5), Record(0, 6)], Use.DECODE) == []


def test_a_guess_that_was_wrong_is_the_first_to_be_evicted() -> None:
    one = tier(5, 2)
    one.admit([Record(0, 1), Record(0, 2)])
    one.settle()
    one.foresee(0, [Record(0, 5)])
    one.settle()
    assert set(one.words) == {Record(0, 1), Record(0, 2), Record(0, 5)}
    one.admit([Record(0, 3)])
    one.settle()
    assert set(one.words) == {Record(0, 1), Record(0, 2), Record(0, 3)}


def test_what_is_there_or_on_its_way_is_not_foreseen_again_and_nothing_while_a_part_waits() -> None:
    one = tier(4, 2)
    one.admit([Record(0, 1)])
    one.settle()
    one.stage(0, [Record(0, 2), Record(0, 3)], Use.PREFILL)
    assert one.engine.foresee(0, [Record(0, 1), Record(0, 2)]) == []
    one.stage(0, [Record(0, 4), Record(0, 5)], Use.PREFILL)
    assert one.engine.foresee(0, [Record(0, 7)]) == []


def test_a_copy_ahead_of_need_can_be_given_up_by_its_owner() -> None:
    one = tier(3, 2)
    commands = one.engine.foresee(0, [Record(0, 1), Record(0, 2)])
    assert kinds(commands) == [Copy, Copy]
    for copy in commands:
        assert not any(isinstance(command, Hurry) for command in one.engine.failed(copy, "given up"))
    assert [copy.record for copy in one.engine.foresee(0, [Record(0, 2), Record(0, 1)])] == [Record(0, 2), Record(0, 1)]
