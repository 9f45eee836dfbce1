"""Epochs: when no step can read a slot any more whose word was retracted. Pure.

Each worker counts the steps it has begun and ended. A step may read whatever was published at any time since it began,
so a slot is safe once every step has ended that had begun when its word was retracted:

    retire(slot)     its word is about to be retracted
    observe(...)     the counters, read after that: the steps that are running are waited for
    observe(...)     ... and when the last of them has ended, the slot is handed back
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkd.residency.slots import Place, Record, Slot


class Steps(NamedTuple):
    """How many steps a worker has begun, and how many of them have ended."""

    begun: int
    ended: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """What the owner before this one left: residents, the highest generation it may have used, the workers' steps."""

    residents: Mapping[Record, Place]
    generation: int
    counters: Sequence[Steps]


@dataclass(slots=True)
class _Drain:
    """Slots that wait until each of these workers has ended that step."""

    slots: list[Slot]
    steps: dict[int, int]

    def over(self, counters: Sequence[Steps]) -> bool:
        return all(counters[worker].ended >= step for worker, step in self.steps.items())


class Epochs:
    """Retired slots in the order they came. A call costs the number of workers, and of what it hands back."""

    def __init__(self) -> None:
        self._retired: list[Slot] = []
        self._drains: deque[_Drain] = deque()
        self._leased = _Drain([], {})
        self._gone: set[int] = set()

    def retire(self, slot: Slot) -> None:
        """Have a slot wait for the steps that are running at the next `observe`."""
        self._retired.append(slot)

    def adopt(self, slots: list[Slot], reserve: list[Slot], counters: Sequence[Steps]) -> None:
        """Begin with slots that running steps may read, because an owner before this one had published or leased them.

        Those of the reserve are also safe from a worker that attaches: it gives up its leases with that.
        """
        self._drains.append(_Drain(slots, self._running(counters)))
        self._leased = _Drain(reserve, self._running(counters))

    def observe(self, counters: Sequence[Steps]) -> list[Slot]:
        """Slots that are safe now. `counters` of all workers, read after all retracted words were written.

        A later drain waits for every worker that an earlier one still waits for: they are over in order.
        """
        if self._retired:
            self._drains.append(_Drain(self._retired, self._running(counters)))
            self._retired = []
        safe: list[Slot] = []
        while self._drains and self._drains[0].over(counters):
            safe += self._drains.popleft().slots
        if self._leased.over(counters):
            safe += self._leased.slots
            self._leased.slots = []
        return safe

    @property
    def pending(self) -> bool:
        """Whether slots wait."""
        return bool(self._retired or self._drains or self._leased.slots)

    @property
    def retiring(self) -> bool:
        """Whether slots were retired since the last `observe`."""
        return bool(self._retired)

    def attach(self, worker: int) -> None:
        """A worker is there, and holds no lease."""
        self._gone.discard(worker)
        self._leased.steps.pop(worker, None)

    def gone(self, worker: int) -> None:
        """The process of a worker has ended, and its steps with it, whatever its counters say until it attaches."""
        self._gone.add(worker)
        for drain in (*self._drains, self._leased):
            drain.steps.pop(worker, None)

    def _running(self, counters: Sequence[Steps]) -> dict[int, int]:
        return {
            worker: steps.begun
            for worker, steps in enumerate(counters)
            if steps.begun > steps.ended and worker not in self._gone
        }
