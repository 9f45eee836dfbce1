"""Turns: nobody starves, whatever others put in, and everybody's own order is kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkd.supervisor.fair_queue import FairQueue

OWNERS = st.sampled_from("abcde")


def filled(text: str) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for item in text.split():
        queue.push(item[0], item)
    return queue


def test_owners_take_turns_and_keep_their_own_order() -> None:
    queue = filled("a1 b2 c3 a4 a5 b6")
    assert list(queue) == ["a1", "b2", "c3", "a4", "b6", "a5"]
    assert queue.first() == "a1" and len(queue) == 6 and queue.owners == 3
    assert [queue.pop() for _ in range(6)] == ["a1", "b2", "c3", "a4", "b6", "a5"]
    assert queue.first() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_who_has_had_a_turn_waits_for_the_others_again() -> None:
    queue = filled("a1 b2 b3")
    assert queue.pop() == "a1"
    queue.push("a", "a4")
    assert [queue.pop() for _ in range(3)] == ["b2", "a4", "b3"]


def test_what_is_taken_out_costs_nobody_a_turn() -> None:
    queue = filled("a1 a2 b3 c4")
    queue.remove("a", "a1")
    queue.remove("c", "c4")
    assert list(queue) == ["a2", "b3"] and (queue.waiting("a"), queue.waiting("c")) == (1, 0)
    with pytest.raises(ValueError, match="not in"):
        queue.remove("c", "c4")


class Turns(RuleBasedStateMachine):
    """Items come, go and are served in any order; counts who was served while somebody waited."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.lines: dict[str, list[int]] = {}
        self.passed: dict[str, dict[str, int]] = {}
        self.last = 0

    @rule(owner=OWNERS, count=st.integers(1, 5))
    def push(self, owner: str, count: int) -> None:
        for _ in range(count):
            self.last += 1
            if not self.lines.get(owner):
                self.passed[owner] = {}
            self.lines.setdefault(owner, []).append(self.last)
            self.queue.push(owner, self.last)

    @precondition(lambda self: any(self.lines.values()))
    @rule()
    def pop(self) -> None:
        expected = next(iter(self.queue))
        item = self.queue.pop()
        assert item == expected
        (owner,) = (name for name, line in self.lines.items() if item in line)
        assert self.lines[owner].pop(0) == item, "an owner's own order was changed"
        self.passed[owner] = {}
        for other, line in self.lines.items():
            if line and other != owner:
                self.passed[other][owner] = self.passed[other].get(owner, 0) + 1

    @precondition(lambda self: any(self.lines.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(o for o, line in self.lines.items() if line)))
        item = data.draw(st.sampled_from(self.lines[owner]))
        self.lines[owner].remove(item)
        self.queue.remove(owner, item)

    @invariant()
    def nobody_starves(self) -> None:
        """While an owner waits for a turn every other gets one at most."""
        assert all(count <= 1 for passed in self.passed.values() for count in passed.values())

    @invariant()
    def nothing_is_lost(self) -> None:
        assert sorted(self.queue) == sorted(item for line in self.lines.values() for item in line)
        assert len(self.queue) == sum(map(len, self.lines.values()))


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(st.lists(OWNERS, max_size=40))
def test_the_order_of_service_is_told_before_it_happens(owners: list[str]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number, owner in enumerate(owners):
        queue.push(owner, (owner, number))
    told = list(queue)
    assert [queue.pop() for _ in owners] == told
