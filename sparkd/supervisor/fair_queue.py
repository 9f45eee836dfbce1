"""Who is next: owners take turns, what one owner waits for stays in its order.

    a: 1 4 5
    b: 2 6        turns from a on: 1 2 3 4 6 5
    c: 3

An owner that comes while others wait gets its first turn when all of them have had one more, at the latest. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Generic, TypeVar

_T = TypeVar("_T")
_NOBODY = object()


class FairQueue(Generic[_T]):
    """Items that wait, by owner. Iterating gives them in the order of service."""

    def __init__(self) -> None:
        #: Owners that wait for something, the one whose turn is next first.
        self._lines: dict[Hashable, deque[_T]] = {}

    def push(self, owner: Hashable, item: _T) -> None:
        """Add to the end of an owner's line."""
        self._lines.setdefault(owner, deque()).append(item)

    def first(self) -> _T | None:
        """What `pop` would give; None when nothing waits."""
        return next(iter(self), None)

    def pop(self) -> _T:
        """Take what is next; its owner's turn is over. IndexError when nothing waits."""
        owner = next(iter(self._lines), None)
        if owner is None:
            raise IndexError("nothing waits")
        line = self._lines.pop(owner)
        item = line.popleft()
        if line:
            self._lines[owner] = line
        return item

    def remove(self, owner: Hashable, item: _T) -> None:
        """Take an item out of an owner's line. ValueError when it is not there."""
        line = self._lines.get(owner, deque())
        line.remove(item)
        if not line:
            del self._lines[owner]

    def waiting(self, owner: Hashable) -> int:
        """Length of an owner's line."""
        return len(self._lines.get(owner, ()))

    @property
    def owners(self) -> int:
        """Owners that wait for something."""
        return len(self._lines)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[_T]:
        for turn in zip_longest(*self._lines.values(), fillvalue=_NOBODY):
            yield from (item for item in turn if item is not _NOBODY)  # type: ignore[misc]
