"""A request that costs worker after worker its life fails; those that happened to run beside it never do."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sparkd.ipc.messages import Generate
from sparkd.supervisor import probation
from sparkd.supervisor.journal import Entry, Standing
from sparkd.supervisor.probation import MAX_CRASHES, PROOF_TOKENS


@dataclass
class Service:
    """Runs entries of given lengths; the worker ends when a poisoned one has made `deadly[i]` tokens in one life."""

    lengths: list[int]
    deadly: dict[int, int]
    seats: int
    entries: list[Entry] = field(default_factory=list)
    crashes: int = 0
    failed: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Until all have finished or failed; each turn every running request gets a token."""
        self.entries = [Entry(Generate(tag=n)) for n in range(len(self.lengths))]
        waiting, running = list(self.entries), dict[int, int]()
        for _ in range(100_000):
            while waiting and len(running) < self.seats:
                if not probation.may_start(waiting[0], [self.entries[n] for n in running]):
                    break
                running[self.entries.index(waiting.pop(0))] = 0
            if not running:
                assert not waiting
                return
            if any(running[n] == self.deadly.get(n) for n in running):
                self.crashes += 1
                cause = probation.crashed([self.entries[n] for n in running])
                left = [self.entries[n] for n in running if self.entries[n] is not cause]
                self.failed |= {n for n in running if self.entries[n] is cause}
                waiting = sorted(waiting + left, key=lambda entry: entry.turn)
                running.clear()
            for n in list(running):
                self.entries[n].produced.append(0)
                probation.produced(self.entries[n])
                running[n] += 1
                if len(self.entries[n].produced) == self.lengths[n]:
                    del running[n]
        raise AssertionError("some request never came to its end")


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    poisoned=st.integers(0, 5),
    deadly=st.integers(0, PROOF_TOKENS - 1),
    seats=st.integers(1, 4),
)
def test_the_poisoned_request_alone_fails(lengths: list[int], poisoned: int, deadly: int, seats: int) -> None:
    lengths.insert(poisoned % len(lengths), 300)
    poisoned = lengths.index(300)
    service = Service(lengths, {poisoned: deadly}, seats)
    service.run()
    assert service.failed == {poisoned}
    assert service.crashes == MAX_CRASHES
    innocents = [entry for n, entry in enumerate(service.entries) if n != poisoned]
    assert all(entry.standing is Standing.CLEAR or len(entry.produced) < entry.proof_at for entry in innocents)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=6),
    deadly=st.dictionaries(st.integers(0, 5), st.integers(0, 40), max_size=2),
    seats=st.integers(1, 4),
)
def test_whatever_the_poison_and_however_late_it_acts_nobody_else_fails(
    lengths: list[int], deadly: dict[int, int], seats: int
) -> None:
    service = Service(lengths, deadly, seats)
    service.run()
    assert service.failed <= set(deadly)
    assert service.crashes <= len(deadly) * 3 * MAX_CRASHES


def test_a_request_that_is_alone_has_as_many_lives_as_workers_may_end() -> None:
    entry = Entry(Generate(tag=1))
    assert [probation.crashed([entry]) for _ in range(MAX_CRASHES)] == [None] * (MAX_CRASHES - 1) + [entry]
