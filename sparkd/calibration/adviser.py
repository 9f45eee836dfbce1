"""Decides what should be hot in a tier that does not hold everything, and how its ring is run. Pure.

Every `PAUSE` decode steps it looks at what was counted. It has something to say when another rule found more of late,
or when the rule pins records and others than the present ones are worth a copy now.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkd.calibration.shadow import FIRST, WARM, Rule, Shadow
from sparkd.calibration.tuner import SAMPLE, Tuner
from sparkd.residency.placement import Placement, choose_hot
from sparkd.residency.slabs import LayerSize

#: Decode steps between two looks.
PAUSE = 256


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier: its expert layers, and for each slab the bytes of a record and the slots for hot set and ring.

    `spare` of these slots are kept free.
    """

    name: str
    layers: tuple[LayerSize, ...]
    record_bytes: tuple[int, ...]
    slots: tuple[int, ...]
    spare: tuple[int, ...]

    @property
    def records(self) -> int:
        """How many records there are, resident or not."""
        return sum(layer.experts for layer in self.layers)


class Adviser:
    """What one tier is told."""

    def __init__(self, tier: Tier, version: int = 0, sample: int = SAMPLE, shadow: type[Shadow] = Shadow) -> None:
        """`version` is that of the last placement before; later ones have higher ones."""
        self.tier = tier
        capacity = [slots - spare for slots, spare in zip(tier.slots, tier.spare, strict=True)]
        self.tuner = Tuner(tier.layers, capacity, sample=sample, shadow=shadow)
        self.rule = FIRST
        self._hot: list[list[int]] = [[] for _ in tier.layers]
        self.version = version
        self._next = PAUSE

    def warm(self, heat: NDArray[np.float64]) -> Placement | None:
        """What a profile, `heat` [layers, experts], says before any traffic; None when it says nothing."""
        if not heat.any():
            return None
        self.tuner.pin(heat.ravel())
        self.rule = WARM
        self._hot = self._choose(heat, WARM)
        return self._placement()

    def step(self, numbers: NDArray[np.int64]) -> None:
        """Decode rows of one step used these numbers (layer x most experts + expert), [rows, uses of a row]."""
        self.tuner.step(np.unique(numbers) if len(numbers) > 1 else numbers.ravel())

    @property
    def due(self) -> bool:
        """Whether it is time for `advise`."""
        return self.tuner.steps >= self._next

    def advise(self, heat: NDArray[np.float64]) -> Placement | None:
        """What should change, `heat` [layers, experts] being what is wanted now; None: nothing that pays."""
        self._next = self.tuner.steps + PAUSE
        self.tuner.pin(heat.ravel())
        rule = self.tuner.better(self.rule)
        hot = self._choose(heat, rule)
        if rule == self.rule and [*map(set, hot)] == [*map(set, self._hot)]:
            return None
        self.rule, self._hot = rule, hot
        return self._placement()

    def _choose(self, heat: NDArray[np.float64], rule: Rule) -> list[list[int]]:
        if not rule.pinned:
            return [[] for _ in self.tier.layers]
        room = [slots - round(slots * (1.0 - rule.pinned)) for slots in self.tier.slots]
        return choose_hot(heat.tolist(), self.tier.layers, self.tier.record_bytes, room, self._hot)

    def _placement(self) -> Placement:
        self.version += 1
        return Placement(self.version, self._hot, 1.0 - self.rule.pinned, self.rule.half_life)
