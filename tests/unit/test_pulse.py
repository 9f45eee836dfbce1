"""Signs of life: silent, busy and stuck are told apart, and a supervisor that overslept blames nobody."""

from __future__ import annotations

import pytest

from sparkd.supervisor.pulse import FIRST_S, LOST_S, SILENT_S, STUCK_S, Pulse


def beating(until: float, busy: bool, progress: int = 1) -> Pulse:
    """A child that has beaten twice a second, always with the same progress."""
    pulse = Pulse.since(0.0)
    now = 0.0
    while now < until:
        now += 0.5
        pulse.beat(progress, busy, now)
    return pulse


def test_a_child_is_silent_before_two_seconds_are_over_and_lost_later() -> None:
    pulse = beating(20.0, busy=True)
    assert not pulse.silent(20.5) and SILENT_S < 2.0
    assert pulse.silent(21.75) and pulse.lost(21.75) == ""
    assert pulse.lost(20.0 + LOST_S) == ""
    assert "no life" in pulse.lost(20.1 + LOST_S)


def test_a_child_that_begins_has_more_time_for_its_first_word() -> None:
    pulse = Pulse.since(0.0)
    assert pulse.lost(FIRST_S - 1) == ""
    assert "no life" in pulse.lost(FIRST_S + 1)


def test_a_long_piece_of_work_is_no_fault_until_it_is_too_long() -> None:
    pulse = beating(STUCK_S - 1, busy=True)
    assert not pulse.silent(STUCK_S - 1) and pulse.lost(STUCK_S - 1) == ""
    pulse = beating(STUCK_S + 1, busy=True)
    assert not pulse.silent(STUCK_S + 1) and "got no further" in pulse.lost(STUCK_S + 1)


def test_a_child_without_work_may_wait_for_ever() -> None:
    assert beating(10 * STUCK_S, busy=False).lost(10 * STUCK_S) == ""


def test_work_that_goes_on_is_never_stuck() -> None:
    pulse = Pulse.since(0.0)
    for second in range(1, int(10 * STUCK_S)):
        pulse.beat(second // 60, True, float(second))
        assert pulse.lost(float(second)) == ""


@pytest.mark.parametrize("asleep", [5.0, 100.0, 10_000.0])
def test_what_could_not_be_heard_while_the_supervisor_slept_is_not_missed(asleep: float) -> None:
    pulse = beating(10.0, busy=True)
    pulse.overslept(asleep, 10.0 + asleep)
    assert not pulse.silent(10.0 + asleep) and pulse.lost(10.0 + asleep) == ""
    assert "no life" in pulse.lost(10.1 + asleep + LOST_S)
