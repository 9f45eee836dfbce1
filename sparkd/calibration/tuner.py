"""Compares ways to run a tier, by what shadow policies find in a sample of its records. Pure.

A sample of the records (at most `SAMPLE`, chosen by their numbers alone) stands for all: each shadow has that share of
the tier's slots and sees that share of the traffic. So the cost of a step does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sparkd.calibration.shadow import RULES, Rule, Shadow
from sparkd.residency.ring import Heats
from sparkd.residency.slabs import LayerSize

#: Records that stand for all.
SAMPLE = 256
#: Steps after which what a shadow found counts half; steps before which nothing is concluded.
MEMORY = 1000.0
_FIRST = 256
#: By how much more of all uses another rule has to find, before it is followed.
MARGIN = 0.004

_Ids: TypeAlias = NDArray[np.int64]


class Tuner:
    """Shadows of all rules on one tier's traffic."""

    def __init__(
        self,
        layers: Sequence[LayerSize],
        capacity: Sequence[int],
        rules: Sequence[Rule] = RULES,
        sample: int = SAMPLE,
        shadow: type[Shadow] = Shadow,
    ) -> None:
        """`capacity[slab]` counts the slots for hot set and ring.

        Records are numbered layer x experts of the layer with most + expert.
        """
        experts = max(layer.experts for layer in layers)
        slabs = np.array([layer.slab if e < layer.experts else -1 for layer in layers for e in range(experts)])
        self._chosen = _spread(np.flatnonzero(slabs >= 0), sample)
        self._number = np.full(len(slabs), -1, np.int64)
        self._number[self._chosen] = np.arange(len(self._chosen))
        self._sampled = slabs[self._chosen]
        held = [_share(self._sampled == slab, slabs == slab, slots) for slab, slots in enumerate(capacity)]
        #: Of each half-life; shadows share them.
        self._heats: dict[float, Heats[int]] = {rule.half_life: Heats(rule.half_life) for rule in rules}
        slab_of = self._sampled.tolist()
        self._shadows = [shadow(slab_of, held, rule, self._heats[rule.half_life]) for rule in rules]
        self.steps = 0
        self._decay = 0.5 ** (1.0 / MEMORY)
        self._uses = 0.0
        self._hits = [0.0] * len(rules)

    def step(self, records: _Ids) -> None:
        """A decode step used the records of these numbers, each named once."""
        numbers = self._number[records]
        sampled = numbers[numbers >= 0].tolist()
        self.steps += 1
        self._uses = self._uses * self._decay + len(sampled)
        decay = self._decay
        for heats in self._heats.values():
            heats.use(sampled)
        self._hits = [
            hits * decay + shadow.find(sampled) for hits, shadow in zip(self._hits, self._shadows, strict=True)
        ]

    def pin(self, heat: NDArray[np.float64]) -> None:
        """Say how much each record is used, so that rules that pin know what."""
        heat = heat[self._chosen]
        for shadow in self._shadows:
            if shadow.rule.pinned:
                shadow.pin(top(heat, self._sampled, shadow.pins))

    def rates(self) -> dict[Rule, float]:
        """Share of the uses of late that each rule would have found; empty before any."""
        if not self._uses:
            return {}
        return {shadow.rule: hits / self._uses for shadow, hits in zip(self._shadows, self._hits, strict=True)}

    def better(self, rule: Rule) -> Rule:
        """The rule to follow after `rule`: the one that found most, if that is clearly more and there is evidence."""
        rates = {other: rate for other, rate in self.rates().items() if other.pinned < 1.0}
        if self.steps < _FIRST or not rates:
            return rule
        best = max(rates, key=lambda other: rates[other])
        return best if rates[best] > rates.get(rule, 0.0) + MARGIN else rule


def top(heat: NDArray[np.float64], slabs: _Ids, room: Sequence[int]) -> list[int]:
    """Numbers of the hottest records that were used at all, `room[slab]` of each slab at most."""
    found: list[int] = []
    for slab, most in enumerate(room):
        numbers = np.flatnonzero((slabs == slab) & (heat > 0.0))
        order = np.argsort(-heat[numbers], kind="stable")
        found += numbers[order[:most]].tolist()
    return found


def _spread(records: _Ids, sample: int) -> _Ids:
    """`sample` of these record numbers at most, spread without regard to layers."""
    mixed = records.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(20)
    return np.sort(records[np.argsort(mixed, kind="stable")[:sample]])


def _share(sampled: NDArray[np.bool_], all_of_slab: NDArray[np.bool_], slots: int) -> int:
    return round(slots * int(sampled.sum()) / max(1, int(all_of_slab.sum())))
