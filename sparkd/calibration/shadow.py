"""Shadow policies: how often a tier run in another way would have found what live traffic wants. Pure, counting only.

The same ring as the tier's (`residency/ring`) decides who would have stayed; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkd.residency.ring import Heats, Ring


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to run a tier: the share `pinned` of its slots holds what the counts say, the rest is a ring.

    In the ring a use counts half after `half_life` steps.
    """

    name: str
    pinned: float
    half_life: float


#: Nothing is evicted for: the profile alone.
STATIC = Rule("static", 1.0, 64.0)
#: The least recently used goes.
LRU = Rule("lru", 0.0, 1.0)
#: Where a tier begins: hardly worse than the best on any recorded or made traffic (bench/policies.py).
FIRST = Rule("decay 64", 0.0, 64.0)
#: Where a tier begins that has a profile: it is filled with it at once.
WARM = Rule("pinned 80 %, decay 64", 0.8, 64.0)
RULES = (
    STATIC,
    LRU,
    Rule("decay 16", 0.0, 16.0),
    FIRST,
    Rule("decay 256", 0.0, 256.0),
    Rule("decay 1024", 0.0, 1024.0),
    Rule("pinned 50 %, decay 64", 0.5, 64.0),
    WARM,
    Rule("pinned 95 %, decay 64", 0.95, 64.0),
)


class Shadow:
    """One policy at work on the record numbers of every step: what it holds, and what it found."""

    def __init__(
        self, slabs: Sequence[int], capacity: Sequence[int], rule: Rule, heats: Heats[int] | None = None
    ) -> None:
        """`slabs[n]` is the slab of record n, `capacity[slab]` how many records it holds.

        `heats` may be those of other shadows, too, whose rules have the same half-life: then `find` is for steps.
        """
        self.rule = rule
        self._slabs = slabs
        self._capacity = capacity
        self._heats: Heats[int] = Heats(rule.half_life) if heats is None else heats
        self._rings: list[Ring[int]] = [Ring(self._heats) for _ in capacity]
        self._pinned: set[int] = set()
        self._there: set[int] = set()
        self._taken = [0] * len(capacity)

    @property
    def pins(self) -> list[int]:
        """Records of each slab that may be pinned."""
        return [round(slots * self.rule.pinned) for slots in self._capacity]

    def pin(self, records: Iterable[int]) -> int:
        """Hold these, the most wanted of their slabs, from now on; how many of them had to be brought.

        What is pinned no more joins the ring.
        """
        wanted = set(records)
        before, self._pinned = self._pinned, wanted
        brought = 0
        for record in sorted(wanted - before):
            ring = self._rings[self._slabs[record]]
            if record in ring:
                ring.remove(record)
            else:
                brought += 1
                self._there.add(record)
        self._taken = [0] * len(self._capacity)
        for record in wanted:
            self._taken[self._slabs[record]] += 1
        for record in sorted(before - wanted):
            self._rings[self._slabs[record]].add(record)
        self._evict()
        return brought

    def change(self, rule: Rule) -> None:
        """Go on by another rule; what it wants pinned is to be said."""
        self.rule = rule
        self._heats.set_half_life(rule.half_life)

    def step(self, records: Iterable[int]) -> int:
        """A decode step uses these records, each named once; how many of them were there."""
        named = tuple(records)
        self._heats.use(named)
        return self.find(named)

    def find(self, named: Sequence[int]) -> int:
        """`step`, where the heats know of it already."""
        there = self._there
        missed = [record for record in named if record not in there]
        there.update(missed)
        for record in missed:
            self._rings[self._slabs[record]].add(record)
        if missed:
            self._evict()
        return len(named) - len(missed)

    def _evict(self) -> None:
        for ring, capacity, taken in zip(self._rings, self._capacity, self._taken, strict=True):
            while len(ring) > capacity - taken:
                record = ring.coldest()
                assert record is not None
                ring.remove(record)
                self._there.remove(record)
