"""How many of a token's experts will be found in the fast tier: from counts, or from a stated prior. Pure.

The prior has three constants. Two are from the published figures of Laguna-XS.2 under agent traffic with 60 % of the
experts hot: 39.7 of 312 choices missed the hot set, and a ring of 16 slots per layer (of 102 experts that were cold)
left 5.6 of them. One is from our built-in model on held-out text: a ring of 40 % of the slots, alone, found 71.3 %.

    missed by the hot set = (1 - hot)^HOT                  hot: share of the experts that is hot
    of those, missed by the ring too = exp(-k x)           x: slots of the ring / experts that are not hot
    k = RING_ALONE, growing evenly with hot, to RING at 60 % and on

The more is hot, the rarer and the burstier is what a ring has to catch. Traffic that never returns to an expert gains
nothing from it, so both numbers are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: ln(39.7 / 312) / ln(1 - 0.6)
HOT = 2.25
#: -ln(5.6 / 39.7) / (16 / 102.4)
RING = 12.5
#: -ln(1 - 0.713) / 0.4
RING_ALONE = 3.12
#: Rows that must have been counted before counts are believed more than the prior.
ENOUGH_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Hits:
    """Shares of all choices that find their expert: by the hot set alone, and with the ring. `source` in words."""

    hot: float
    ring: float
    source: str


def prior(hot: Sequence[int], experts: Sequence[int], ring_slots: int) -> Hits:
    """The hits expected without counts: `hot` of `experts` in each layer, and a ring of `ring_slots` per layer."""
    missed = [(1 - h / n) ** HOT for h, n in zip(hot, experts, strict=True)]
    return _hits(missed, hot, experts, ring_slots, "the prior (no profile of this model)")


def counted(
    counts: Sequence[Sequence[int]], rows: int, hot: Sequence[int], experts: Sequence[int], ring_slots: int
) -> Hits:
    """The hits of each layer's busiest experts by `counts` [layer][expert] of `rows` rows.

    The prior where a layer was never counted.
    """
    if not all(sum(layer) for layer in counts):
        return prior(hot, experts, ring_slots)
    ordered = [sorted(layer, reverse=True) for layer in counts]
    missed = [sum(layer[h:]) / sum(layer) for layer, h in zip(ordered, hot, strict=True)]
    return _hits(missed, hot, experts, ring_slots, f"this model's profile ({rows} tokens)")


def _hits(missed: Sequence[float], hot: Sequence[int], experts: Sequence[int], ring_slots: int, source: str) -> Hits:
    if not missed:
        return Hits(1.0, 1.0, "a model without experts")
    if list(hot) == list(experts):
        return Hits(1.0, 1.0, "the fact that every expert is there")
    both = [miss * _left(h / n, ring_slots, n - h) for miss, h, n in zip(missed, hot, experts, strict=True)]
    return Hits(1 - sum(missed) / len(missed), 1 - sum(both) / len(both), source)


def _left(hot: float, ring_slots: int, cold: int) -> float:
    """What a ring leaves of the misses in one layer."""
    if ring_slots >= cold:
        return 0.0
    k = RING_ALONE + (RING - RING_ALONE) * hot / 0.6
    return math.exp(-k * ring_slots / cold)
