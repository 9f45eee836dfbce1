"""Device tiers for tests: of any share of the records, with placements and misses that make them churn."""

from __future__ import annotations

import random

from host_device import HostDevice

from sparkd.residency.misses import Misses
from sparkd.residency.placement import Placement
from sparkd.residency.slabs import SlabSize
from sparkd.store.arena import Arena
from sparkd.worker.device_slots import DeviceSlots
from sparkd.worker.device_staging import Staging
from sparkd.worker.device_tier import DeviceTier, Tables
from sparkd.worker.registration import Registration

#: Rows of a part whose missing records the reserve holds.
PART_ROWS = 2


def sizes_of(arena: Arena, share: float) -> list[SlabSize]:
    """Ordinary slots for `share` of the records of each slab, and a reserve unless that is all of them."""
    sizes = []
    for number, slab in enumerate(arena.layout.slabs):
        top_k = max(
            layer.top_k
            for layer, records in zip(arena.program.expert_layers, arena.layout.layers, strict=True)
            if records.slab == number
        )
        ordinary = round(slab.records * share)
        reserve = 0 if ordinary == slab.records else PART_ROWS * top_k
        sizes.append(SlabSize(ordinary + reserve, reserve))
    return sizes


def any_placement(dice: random.Random, tier: DeviceTier, version: int) -> Placement:
    """One that leaves a part of the slots to the ring."""
    ring = dice.choice([0.3, 0.5, 1.0])
    room = [size.hot(ring) for size in tier.sizes()]
    hot: list[list[int]] = []
    for layer in tier.layers:
        count = dice.randint(0, min(room[layer.slab], layer.experts))
        room[layer.slab] -= count
        hot.append(dice.sample(range(layer.experts), count))
    return Placement(version, hot, ring, 16.0)


class Churned:
    """A tier, and what happens to it between steps."""

    def __init__(
        self,
        device: HostDevice,
        tables: Tables,
        arena: Arena,
        share: float,
        seed: int,
        *,
        registered: bool = True,
        misses: Misses = Misses.IN_PLACE,
        staging: int = PART_ROWS,
    ) -> None:
        """`registered`: all host memory is, from the beginning; else a piece now and then.

        `staging`: records of a buffer that prompts stream through.
        """
        self.random = random.Random(seed)
        records = [slab.record_bytes for slab in arena.layout.slabs]
        self.slots = DeviceSlots(device, sizes_of(arena, share), records, block_bytes=3 * max(records))
        # Pieces of one slot, or as few as end with a page.
        self.registration = Registration(device, arena, piece_bytes=1)
        while registered and self.registration.register_next():
            pass
        buffers = Staging(device, staging, max(records))
        self.tier = DeviceTier(device, tables, arena, self.slots, self.registration, buffers, misses)
        self._version = 0
        self.taken_back = 0

    def happen(self) -> None:
        """Now and then a placement, a piece that is registered, or time without a step."""
        dice = self.random
        if dice.random() < 0.25:
            self.place()
        if dice.random() < 0.3:
            self.registration.register_next()
        if dice.random() < 0.3:
            self.tier.advance()

    def place(self) -> None:
        """A placement."""
        self._version += 1
        self.tier.place(any_placement(self.random, self.tier, self._version))
