"""The ring: resident records that are not hot, the least used goes first. Pure.

A record's *heat* is the number of its uses, each counted for half as much every `half_life` steps: a mean of frequency
and recency. With a half-life of one step it is the order of the last use (what came later weighs more than all before
it), with a very long one plain frequency. Heats are kept as logarithms relative to a clock, so that they change with
uses alone and two records never change places but by a use: a heap of heats as they were is a heap of lower bounds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

#: Steps after which a use counts half, unless a placement says otherwise (bench/policies.py).
HALF_LIFE = 64.0
#: Half-lives, in powers of two, after which an old use changes nothing in the sum with a new one.
_FORGOTTEN = 50.0

RecordT = TypeVar("RecordT", bound=Hashable)


class Heats(Generic[RecordT]):
    """The heat of every record that was ever used, resident or not; constant time for a use."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        """ValueError when `half_life` (in steps) is below 1 or not finite."""
        #: Logarithm, to base 2, of the heat that one use in the present step gives.
        self.now = 0.0
        #: Logarithm of the heat of each record that was ever used.
        self.logs: dict[RecordT, float] = {}
        self.set_half_life(half_life)

    def set_half_life(self, half_life: float) -> None:
        """Go on with another half-life; heats so far stay what they are now. ValueError as at the beginning."""
        if not 1.0 <= half_life < math.inf:
            raise ValueError(f"a half-life of {half_life} steps")
        self._tick = 1.0 / half_life

    def use(self, records: Iterable[RecordT]) -> None:
        """A step, the next one, uses these records, each named once."""
        self.now = now = self.now + self._tick
        logs = self.logs
        for record in records:
            age = now - logs.get(record, -math.inf)
            logs[record] = now + math.log2(1.0 + 2.0**-age) if age < _FORGOTTEN else now

    def heat(self, record: RecordT) -> float:
        """The heat of a record in the present step: 1 for one use now."""
        return float(2.0 ** (self.logs.get(record, -math.inf) - self.now))


class Ring(Generic[RecordT]):
    """Members, of which the coldest can be found: logarithmic time for each use of a member, at most.

    A member that has just come in counts as used once in that step, if its heat is less: it was brought for a use. Not
    so one that was brought ahead of need: it has to be used before it is worth a place.
    """

    def __init__(self, heats: Heats[RecordT]) -> None:
        self._heats = heats
        self._logs = heats.logs
        self._members: dict[RecordT, int] = {}
        #: (lower bound of the logarithm of the heat, number of the coming in, record); old entries stay until met.
        self._heap: list[tuple[float, int, RecordT]] = []
        self._comings = 0

    def add(self, record: RecordT, ahead: bool = False) -> None:
        """Take in a member; `ahead` of need or for a use."""
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if self._members.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        self._comings += 1
        self._members[record] = self._comings
        heat = self._logs.get(record, -math.inf)
        heapq.heappush(self._heap, (heat if ahead else max(heat, self._heats.now), self._comings, record))

    def remove(self, record: RecordT) -> None:
        """Let a member go. KeyError when it is none."""
        del self._members[record]

    def coldest(self, busy: Callable[[RecordT], bool] | None = None) -> RecordT | None:
        """The coldest member that is not busy, of equals the one that came first; None without one.

        Busy members that are colder are passed over, each time: there should be few.
        """
        heap, members, logs = self._heap, self._members, self._logs
        passed = []
        found = None
        while heap:
            bound, coming, record = heap[0]
            if members.get(record) != coming:
                heapq.heappop(heap)
            elif (heat := logs.get(record, bound)) > bound:
                heapq.heapreplace(heap, (heat, coming, record))
            elif busy is not None and busy(record):
                passed.append(heapq.heappop(heap))
            else:
                found = record
                break
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def __contains__(self, record: RecordT) -> bool:
        return record in self._members

    def __iter__(self) -> Iterator[RecordT]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)
