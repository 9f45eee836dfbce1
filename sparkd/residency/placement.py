"""What a calibrator wants to be hot. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparkd.residency.ring import HALF_LIFE
from sparkd.residency.slots import Record


class PlacementError(ValueError):
    """A placement that a tier cannot take: one line that says why."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`hot[layer]` lists the experts to be hot, most wanted first; `ring` is the share of slots left to the tail.

    In the ring a use counts half after `half_life` steps.
    """

    version: int
    hot: Sequence[Sequence[int]]
    ring: float
    half_life: float = HALF_LIFE

    def ranked(self, experts: Sequence[int]) -> list[Record]:
        """The hot records, the most wanted of every layer first. `experts` of each expert layer are there.

        PlacementError when the placement is for other layers, names an expert twice or one that is not there, or gives
        the ring an impossible share or half-life.
        """
        if len(self.hot) != len(experts):
            raise PlacementError(f"placement for {len(self.hot)} expert layers, the model has {len(experts)}")
        if not 0.0 <= self.ring <= 1.0:
            raise PlacementError(f"a ring cannot have the share {self.ring} of the slots")
        for layer, hot in enumerate(self.hot):
            if len(set(hot)) != len(hot):
                raise PlacementError(f"placement names an expert of expert layer {layer} twice")
            if hot and not 0 <= min(hot) <= max(hot) < experts[layer]:
                raise PlacementError(f"placement names an expert outside expert layer {layer}: it has {experts[layer]}")
        if not 1.0 <= self.half_life < math.inf:
            raise PlacementError(f"a ring cannot have a half-life of {self.half_life} steps")
        ranks = sorted((rank, layer) for layer, hot in enumerate(self.hot) for rank in range(len(hot)))
        return [Record(layer, self.hot[layer][rank]) for rank, layer in ranks]
