"""The state pool: which sequence owns which KV pages and which recurrent record.

Bookkeeping only; the memory itself is the executor's `StateMemory`, committed by the kernel page by page when it is
first written.

    admit ──► held ──extend before a step, trim after it──► held ──release──► gone

`admit` sets aside everything the sequence can ever hold at once, or refuses and changes nothing. After that `extend`
cannot fail: a running sequence never waits for memory, and none is ever evicted to make room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sparkd.graph.state import PAGE, StateLayout


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How much state a pool can hold: `pages[g]` pages of group g, and `records` recurrent records."""

    pages: tuple[int, ...]
    records: int

    @staticmethod
    def worst_case(layout: StateLayout, sequences: int, positions: int, chunk: int) -> PoolSize:
        """Room for `sequences` of `positions` each, in steps of at most `chunk` rows."""
        return PoolSize(tuple(sequences * g.pages_for(positions, chunk) for g in layout.groups), sequences)

    def bytes(self, layout: StateLayout) -> int:
        """Bytes of memory when all of it is used."""
        pages = sum(count * g.page_bytes for count, g in zip(self.pages, layout.groups, strict=True))
        return pages + self.records * layout.record_bytes


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence holds: per group a table from logical to physical page (-1: none), and its record."""

    tables: tuple[NDArray[np.int32], ...]
    record: int
    reserved: tuple[int, ...]
    #: First logical page that is still held, and the first that was not given out yet, per group.
    first: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)


class StatePool:
    """Pages and records of one worker."""

    def __init__(self, layout: StateLayout, size: PoolSize, chunk: int) -> None:
        """A pool of `size`, for steps of at most `chunk` rows of one sequence."""
        self.layout = layout
        self.size = size
        self.chunk = chunk
        self._free_pages = [list(range(count - 1, -1, -1)) for count in size.pages]
        self._free_records = list(range(size.records - 1, -1, -1))
        self._unreserved = list(size.pages)

    def admit(self, positions: int) -> Holding | None:
        """Set aside what a sequence of `positions` needs; None when it does not fit now, and nothing has changed."""
        need = tuple(g.pages_for(positions, self.chunk) for g in self.layout.groups)
        if not self._free_records or any(n > have for n, have in zip(need, self._unreserved, strict=True)):
            return None
        for group, pages in enumerate(need):
            self._unreserved[group] -= pages
        logical = -(-positions // PAGE)
        tables = tuple(np.full(logical, -1, np.int32) for _ in need)
        return Holding(tables, self._free_records.pop(), need, [0] * len(need), [0] * len(need))

    def extend(self, holding: Holding, end: int) -> None:
        """Give pages to all positions below `end`, before a step writes them."""
        for group, table in enumerate(holding.tables):
            while holding.end[group] * PAGE < end:
                table[holding.end[group]] = self._free_pages[group].pop()
                holding.end[group] += 1
            if holding.end[group] - holding.first[group] > holding.reserved[group]:
                raise RuntimeError(f"a sequence holds more pages of group {group} than it reserved")

    def trim(self, holding: Holding, position: int) -> None:
        """Take back the pages that no query at `position` or later can see."""
        for group, table in enumerate(holding.tables):
            visible = min(self.layout.groups[group].first_page(position), holding.end[group])
            if visible > holding.first[group]:
                self._take_back(group, table[holding.first[group] : visible])
                holding.first[group] = visible

    def release(self, holding: Holding) -> None:
        """Take everything back; `holding` must not be used again."""
        for group, table in enumerate(holding.tables):
            self._take_back(group, table[holding.first[group] : holding.end[group]])
            self._unreserved[group] += holding.reserved[group]
        self._free_records.append(holding.record)
        holding.record = -1

    def used_bytes(self) -> int:
        """Bytes of the pages and records that are held now."""
        pages = zip(self.layout.groups, self.size.pages, self._free_pages, strict=True)
        held = sum(g.page_bytes * (count - len(free)) for g, count, free in pages)
        return held + (self.size.records - len(self._free_records)) * self.layout.record_bytes

    def _take_back(self, group: int, pages: NDArray[np.int32]) -> None:
        self._free_pages[group].extend(pages.tolist())
        pages[:] = -1
