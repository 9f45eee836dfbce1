"""What a calibrator wants to be hot. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparkd.residency.ring import HALF_LIFE
from sparkd.residency.slabs import LayerSize
from sparkd.residency.slots import Record

#: Experts that every layer has hot, at the least.
FLOOR = 1


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


def choose_hot(
    heat: Sequence[Sequence[float]],
    layers: Sequence[LayerSize],
    record_bytes: Sequence[int],
    room: Sequence[int],
    present: Sequence[Sequence[int]],
    *,
    floor: int = FLOOR,
    budget: int | None = None,
) -> list[list[int]]:
    """The hot experts of each layer, most wanted first: those with most uses per byte, over all layers at once.

    `heat[layer][expert]` are uses of late; `record_bytes` and `room` (records that may be hot) are those of each slab;
    `budget`: bytes of all hot records together. Each layer gets its `floor` best first, as far as the room of its slab
    goes. Records in `present` are hot already: others take their places only if they save more uses than their copy
    costs, beyond what chance makes of equals (the square root of the uses). What was never used is never hot.
    """
    wants = []
    for layer, (size, uses, held) in enumerate(zip(layers, heat, present, strict=True)):
        stays = set(held)
        worth = [_worth(uses[e], e in stays) / record_bytes[size.slab] for e in range(size.experts)]
        order = sorted((e for e in range(size.experts) if uses[e] > 0.0), key=lambda e: (-worth[e], e))
        wants += [(rank >= floor, -worth[e], layer, e) for rank, e in enumerate(order)]
    left = list(room)
    bytes_left = math.inf if budget is None else float(budget)
    hot: list[list[int]] = [[] for _ in layers]
    for _, _, layer, expert in sorted(wants):
        slab = layers[layer].slab
        if left[slab] > 0 and record_bytes[slab] <= bytes_left:
            left[slab] -= 1
            bytes_left -= record_bytes[slab]
            hot[layer].append(expert)
    return hot


def _worth(uses: float, held: bool) -> float:
    """What a record is worth in the choice; a copy costs as much as one use without it."""
    return uses + 1.0 + math.sqrt(uses) if held else uses
