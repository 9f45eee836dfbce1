"""How often each expert was routed to, decode and prefill apart. Pure: ids in, counts out; nothing else is known.

Beside the totals there are *decayed* counts for each tag that requests carry: there a row counts for half once
`HALF_LIFE` further rows of its kind have come. Nothing is ever decayed row by row: later rows weigh more instead, and
all weights are brought down together when they get large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Words of one table of counts (layers x experts) at most: 32 MiB.
MAX_WORDS = 1 << 22
#: Rows of one kind of one tag after which a row counts half: some hours of one user.
HALF_LIFE = 16384.0
#: Decode rows, of all tags, after which one counts half in telling what traffic is there now.
RECENT = 512.0
#: Tags that are told apart; the one that was used least of late gives way to a further one.
MAX_TAGS = 16
#: Rows that are weighed together; weights are brought down when one row's exceeds what follows.
_TOGETHER = 256
_LARGE = 2.0**200


class RoutingError(ValueError):
    """Routed ids that cannot be: one line that says what is wrong with them."""


class Decayed:
    """A table of counts [layers, experts] and its rows, in which a row counts half after `half_life` further rows."""

    def __init__(self, layers: int, experts: int, half_life: float = HALF_LIFE) -> None:
        self._table = np.zeros((layers, experts))
        self._rows = 0.0
        self._weight = 1.0
        self._growth = 2.0 ** (1.0 / half_life)

    @property
    def table(self) -> NDArray[np.float64]:
        """Decayed counts as of now."""
        return self._table / self._weight

    @property
    def rows(self) -> float:
        """Decayed number of rows as of now."""
        return self._rows / self._weight

    def add(self, ids: NDArray[np.int64]) -> None:
        """Count rows, the oldest first: `ids` are numbers in the flat table, [rows, uses of one row], no use twice."""
        for first in range(0, len(ids), _TOGETHER):
            rows = ids[first : first + _TOGETHER]
            flat = self._table.reshape(-1)
            weights = self._weight * self._growth ** np.arange(1.0, len(rows) + 1.0)
            if len(rows) == 1:
                flat[rows[0]] += weights[0]
            else:
                flat += np.bincount(rows.ravel(), np.repeat(weights, rows.shape[1]), len(flat))
            self._rows += float(weights.sum())
            self._weight = float(weights[-1])
            if self._weight > _LARGE:
                self.put(self.table, self.rows)

    def put(self, table: NDArray[np.float64], rows: float) -> None:
        """Go on from these counts."""
        self._table, self._rows, self._weight = table.copy(), float(rows), 1.0


@dataclass(slots=True)
class Traffic:
    """What the requests of one tag were routed to. `recent` is their number of decode rows, decayed among all tags."""

    decode: Decayed
    prefill: Decayed
    recent: float = 0.0


class RoutingCounts:
    """Counts per (expert layer, expert) of one model.

    `decode` and `prefill` are uint64 [layers, experts], all there ever was; `decode_rows` and `prefill_rows` count
    token rows. `tags` has the decayed counts of each tag, "" for requests without one; `recent` those of decode rows
    of late, whatever their tag.
    """

    def __init__(self, layers: int, experts: int) -> None:
        if not (layers > 0 and experts > 0 and layers * experts <= MAX_WORDS):
            raise RoutingError(f"{layers} layers of {experts} experts: at most {MAX_WORDS} records can be counted")
        self.decode: NDArray[np.uint64] = np.zeros((layers, experts), np.uint64)
        self.prefill: NDArray[np.uint64] = np.zeros((layers, experts), np.uint64)
        self.decode_rows = 0
        self.prefill_rows = 0
        self.tags: dict[str, Traffic] = {}
        self.recent = Decayed(layers, experts, RECENT)
        self._bases = (np.arange(layers) * experts)[:, None, None]

    def add(
        self, ids: NDArray[np.int16], is_decode: NDArray[np.bool_], tags: Sequence[str] | None = None
    ) -> NDArray[np.int64]:
        """Count one step: `ids` [layers, rows, top_k], `is_decode` [rows], `tags` of the rows (None: none has one).

        Returns the numbers (layer x experts + expert) that its decode rows used, [rows, layers x top_k]. RoutingError,
        and nothing is counted, when a shape is wrong, an id is no expert, or a row names one twice.
        """
        layers, experts = self.decode.shape
        if ids.ndim != 3 or ids.shape[0] != layers or is_decode.shape != ids.shape[1:2]:
            raise RoutingError(f"ids {ids.shape} for {is_decode.shape} rows do not fit {layers} layers")
        if ids.size and not (ids.min() >= 0 and ids.max() < experts):
            raise RoutingError(f"expert ids from {ids.min()} to {ids.max()}, the model has {experts}")
        ordered = np.sort(ids, axis=2)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RoutingError("a row names an expert twice")
        rows = ids.shape[1]
        numbers = (ids + self._bases).transpose(1, 0, 2).reshape(rows, layers * ids.shape[2])
        named = np.array([""] * rows if tags is None else tags, dtype=object)
        for tag in dict.fromkeys(named.tolist()):
            self._count(tag, numbers[is_decode & (named == tag)], numbers[~is_decode & (named == tag)])
        return numbers[is_decode]

    def blended(self) -> NDArray[np.float64]:
        """Decode counts that tell what is wanted now: each tag's, by its share of what was decoded of late."""
        blend = np.zeros(self.decode.shape)
        rows, recent = self.blended_rows, self._recent
        for traffic in self._known:
            blend += traffic.decode.table * (rows * traffic.recent / recent / traffic.decode.rows)
        return blend

    @property
    def blended_rows(self) -> float:
        """Decode rows that `blended` stands for."""
        return sum(traffic.recent / self._recent * traffic.decode.rows for traffic in self._known)

    @property
    def _known(self) -> list[Traffic]:
        return [traffic for traffic in self.tags.values() if traffic.decode.rows > 0 and traffic.recent > 0]

    @property
    def _recent(self) -> float:
        return sum(traffic.recent for traffic in self._known)

    def traffic(self, tag: str) -> Traffic:
        """The counts of a tag, which takes the place of another one when there are too many."""
        found = self.tags.get(tag)
        if found is None:
            if len(self.tags) >= MAX_TAGS:
                del self.tags[min(self.tags, key=lambda name: self.tags[name].recent)]
            found = self.tags[tag] = Traffic(Decayed(*self.decode.shape), Decayed(*self.decode.shape))
        return found

    def _count(self, tag: str, decode: NDArray[np.int64], prefill: NDArray[np.int64]) -> None:
        traffic = self.traffic(tag)
        if len(decode):
            traffic.decode.add(decode)
            self.recent.add(decode)
            flat = self.decode.reshape(-1)
            for row in decode:
                flat[row] += np.uint64(1)
            self.decode_rows += len(decode)
            for other in self.tags.values():
                other.recent *= 0.5 ** (len(decode) / RECENT)
            traffic.recent += len(decode)
        if len(prefill):
            traffic.prefill.add(prefill)
            counted = np.bincount(prefill.ravel(), minlength=self.prefill.size).reshape(self.prefill.shape)
            self.prefill += counted.astype(np.uint64)
            self.prefill_rows += len(prefill)


def busiest_share(counts: NDArray[np.uint64], share: float = 0.25) -> list[float]:
    """For each layer the part of all its work that its busiest `share` of experts did; 0 without any work."""
    experts = counts.shape[1]
    ordered = np.sort(counts, axis=1)[:, ::-1]
    top = ordered[:, : max(1, round(experts * share))].sum(axis=1).astype(np.float64)
    total = counts.sum(axis=1).astype(np.float64)
    return [float(t / n) if n else 0.0 for t, n in zip(top, total, strict=True)]
