"""A card computes: its memory divided, its executor, its tier of experts, and what others leave of it.

The card is shared with programs that know nothing of this one. A margin of it stays free; where others come into that,
blocks of slots are given back, and the calibrator advises what is left. Once there has been room for a while, they are
taken back one after another.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from sparkd.config import Settings
from sparkd.errors import BudgetError, DeviceError
from sparkd.executors.base import Executor
from sparkd.executors.cuda import CudaExecutor
from sparkd.executors.cuda_host import HostExperts
from sparkd.executors.cuda_prompt_plan import workspace_of
from sparkd.executors.device import Device
from sparkd.executors.metered import Metered
from sparkd.graph.state import StateLayout
from sparkd.ipc import internal
from sparkd.ipc.internal import Tier
from sparkd.ipc.messages import Json
from sparkd.log import details
from sparkd.residency.budget import GIB
from sparkd.residency.device_budget import (
    CARD_MARGIN,
    RESERVE_PARTS,
    RING_SLOTS,
    ROWS,
    STAGING_PARTS,
    DeviceBudget,
    DeviceNeeds,
    Stack,
    allowance,
    choose_step,
    divide,
    slab_sizes,
    staging_slots,
    step_rows,
)
from sparkd.residency.placement import Placement, PlacementError
from sparkd.store.arena import Arena
from sparkd.store.layout import told_tier
from sparkd.worker.backend import computed_with
from sparkd.worker.device_misses import measured
from sparkd.worker.device_slots import DeviceSlots
from sparkd.worker.device_staging import Staging
from sparkd.worker.device_tier import DeviceTier
from sparkd.worker.engine import Routing
from sparkd.worker.registration import Registration
from sparkd.worker.state import PoolSize
from sparkd.worker.threads import count_threads

#: The name of this tier in placements.
TIER = "device"
#: Seconds between two looks at what others leave.
_LOOK_S = 1.0
#: Seconds for which there has to be room, beside the whole margin, before a block is taken back.
_CALM_S = 30.0
_log = logging.getLogger(__name__)


class DeviceBackend:
    """Implements `sparkd.worker.backend.Backend` on a device. BudgetError where its memory is too small."""

    def __init__(
        self,
        device: Device,
        model: str,
        settings: Settings,
        arena: Arena,
        layout: StateLayout,
        size_for: Callable[[int], PoolSize],
        context: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model` is the name that stands in messages; `wake` is called, by any thread, when `advance` has work.

        `size_for`: the state that sequences need where steps have at most so many rows.
        """
        self._model = model
        self._kv_type = settings.kv.type
        formats = computed_with(arena)
        self._types = {format.name: format.arithmetic.value for format in formats if format.arithmetic is not None}
        self._arena = arena
        self._clock = clock
        free, total = device.memory()
        wanted = int(settings.memory.vram_gib * GIB)
        limit, note = allowance(free, total, wanted, device.context)
        if note:
            _log.warning("%s", note)
        self._margin = int(total * CARD_MARGIN)
        self._device = Metered(device, limit, f" ({free / GIB:.2f} of {total / GIB:.2f} GiB were free)")
        self.rows = _choose_rows(limit, arena, layout, size_for, context)
        self.size = size_for(self.rows)
        host = _host(settings, self._device, arena)
        began = clock()
        _log.info("making kernels for the GPU: half a minute, unless CuPy's cache has them from an earlier start")
        executor = CudaExecutor(
            self._device,
            arena.program,
            arena,
            layout,
            pages=self.size.pages,
            slots=self.size.records,
            context=context,
            prompt_rows=self.rows,
            host=host,
        )
        _log.info("kernels and core weights are on the card after %.1f s", clock() - began)
        self.executor: Executor = executor
        records = [slab.record_bytes for slab in arena.layout.slabs]
        top_k = max((layer.top_k for layer in arena.program.expert_layers), default=0)
        staging = Staging(self._device, staging_slots(top_k, self.rows), max(records, default=0))
        self._policy = measured(settings.worker.misses, self._device, executor.stream, staging, arena, host)
        self._budget = _divide(self._device, arena, self.size.bytes(layout))
        #: Experts that no slot holds cross the link in each step of a prompt, however short it is.
        self.least_rows = ROWS[0] if self._budget.residency < 1 else 1
        slabs = [layer.slab for layer in arena.layout.layers]
        self._slots = DeviceSlots(self._device, slab_sizes(self._budget, slabs), records)
        self._registration = Registration(self._device, arena, wake)
        self._tier = DeviceTier(
            self._device,
            executor,
            arena,
            self._slots,
            self._registration,
            staging,
            self._policy.misses,
        )
        executor.serve_from(self._tier)
        self._told: Tier | None = None
        self._refused = ""
        self._look_at = self._calm_since = clock()
        self._registration.start()

    def used(self, routing: Routing) -> None:
        """The tier heats and admits by it, in the next step; what it missed in the one before says who computes."""
        decode = routing.decode.astype(bool)
        self._tier.used(decode, routing.ids)
        before = self._policy.misses
        if decode.any() and self._policy.saw(self._tier.missed_bytes, self._tier.all_readable) is not before:
            self._tier.choose(self._policy.misses)
            _log.info("what the card misses: %s", details(policy=self._policy.misses.value, why=self._policy.why()))

    def advance(self) -> bool:
        """Go on with copies while no step runs, and give back what others need."""
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_S
            self._heed_others()
        return self._tier.advance()

    def place(self, placement: internal.Placement) -> None:
        """Take a placement as the goal of swaps; one that cannot be is refused, with a reason in log and status."""
        self._refused = ""
        try:
            if placement.tier != TIER:
                raise PlacementError(f"a placement for tier {placement.tier!r}, this is {TIER!r}"[:500])
            self._tier.place(Placement(placement.version, placement.hot, placement.ring, placement.half_life))
        except PlacementError as error:
            self._refused = f"placement {placement.version}: {error}"
            _log.warning("refused %s", self._refused)

    def tiers(self) -> list[Tier]:
        """The tier, unless every expert has a slot; again when its size has changed."""
        layout, sizes = self._arena.layout, self._tier.sizes()
        tier = told_tier(TIER, self._model, layout, sizes)
        records = [slab.records for slab in layout.slabs]
        whole = all(size.ordinary >= count for size, count in zip(sizes, records, strict=True))
        if whole or tier == self._told:
            return []
        self._told = tier
        return [tier]

    def line(self) -> str:
        """What is where, and the types that are computed with."""
        budget = self._budget
        return details(
            device="cuda",
            limit_bytes=self._device.limit,
            residency=f"{budget.residency:.1%}",
            ring_slots=budget.ring_slots,
            misses=self._policy.misses.value,
            why=self._policy.why(),
            **self._types,
        )

    def status(self) -> dict[str, Json]:
        """The executor, and the device border in the terms of the host border."""
        types: dict[str, Json] = {
            format.name: f"{format.arithmetic.value}, cuda"
            for format in computed_with(self._arena)
            if format.arithmetic
        }
        executor: dict[str, Json] = {"kind": "cuda", "max_rows": self.rows, "kv_type": self._kv_type, "types": types}
        return {"executor": executor, "device": self._border()}

    def close(self) -> None:
        """End the registration."""
        self._registration.close()

    def _border(self) -> dict[str, Json]:
        tier, layout = self._tier, self._arena.layout
        free, total = self._device.memory()
        residents = tier.residents()
        records = sum(layer.experts for layer in layout.layers)
        slots = sum(size.ordinary for size in tier.sizes())
        version, swaps_left = tier.placement()
        return {
            "limit_bytes": self._device.limit,
            "used_bytes": self._device.used,
            "free_bytes": free,
            "total_bytes": total,
            "given_back_bytes": tier.given_back,
            "records": records,
            "slots": slots,
            "partial": slots < records,
            "resident": sum(residents),
            "in_place": tier.readable(),
            "in_place_note": self._registration.refused,
            "misses": self._policy.status(),
            "layers": [
                {"records": layer.experts, "resident": resident, "experts": letters}
                for layer, resident, letters in zip(layout.layers, residents, tier.letters(), strict=True)
            ],
            "slabs": [
                {"record_bytes": slab.record_bytes, "spare": 0, **dataclasses.asdict(use)}
                for slab, use in zip(layout.slabs, tier.slabs(), strict=True)
            ],
            "uses": {use.value: dataclasses.asdict(counts) for use, counts in tier.counts().items()},
            "moved_bytes": tier.moved,
            "streamed_bytes": tier.streamed,
            "placement": {"version": version, "swaps_left": swaps_left, "refused": self._refused},
        }

    def _heed_others(self) -> None:
        """Give back slots where less than half of the margin is left; take them back where all of it would stay free.

        What is taken back leaves half a margin before it would have to go again.
        """
        free, _ = self._device.memory()
        short = self._margin // 2 - free - self._tier.returning
        if short > 0 and (size := self._tier.shrink(short)):
            _log.warning("others use the card: %d bytes are free, %d bytes of slots are given back", free, size)
        room, growth, now = free - self._margin, self._tier.growth, self._clock()
        if not growth or self._tier.returning or room < growth:
            self._calm_since = now
        elif now - self._calm_since >= _CALM_S:
            self._calm_since = now
            try:
                size = self._tier.grow(growth)
                _log.info("the card has room again: %d bytes are free, %d bytes of slots are taken back", free, size)
            except DeviceError as error:
                _log.warning("the card has room, but not in one piece: %s", error)


def _host(settings: Settings, device: Metered, arena: Arena) -> HostExperts | None:
    """The CPU's part of steps, where the setting may want it."""
    if settings.worker.misses not in ("auto", "host") or not arena.program.expert_layers:
        return None
    return HostExperts(device, arena.program, arena, count_threads(settings.cpu.threads), settings.cpu.isa)


def _choose_rows(
    limit: int, arena: Arena, layout: StateLayout, size_for: Callable[[int], PoolSize], context: int
) -> int:
    """Rows of the longest step of a prompt, within `limit` bytes."""
    workspace = workspace_of(arena.program)
    stacks = _stacks(arena)
    top_k = max((layer.top_k for layer in arena.program.expert_layers), default=0)
    largest = max((stack.record_bytes for stack in stacks), default=0)

    def divided(rows: int) -> DeviceBudget:
        taken = workspace.bytes(rows) + STAGING_PARTS * staging_slots(top_k, rows) * largest
        needs = DeviceNeeds(0, arena.layout.core_bytes, size_for(rows).bytes(layout), 0, taken, stacks, rows)
        return divide(needs, limit, RING_SLOTS, RESERVE_PARTS * top_k)

    return choose_step(map(divided, step_rows(context))).needs.rows


def _stacks(arena: Arena) -> tuple[Stack, ...]:
    slabs = arena.layout.slabs
    return tuple(Stack(layer.experts, slabs[layer.slab].record_bytes) for layer in arena.layout.layers)


def _divide(device: Metered, arena: Arena, state: int) -> DeviceBudget:
    """What is left of the device's limit, as slots. BudgetError when that is not even a reserve."""
    core = min(arena.layout.core_bytes, device.used - state)
    needs = DeviceNeeds(0, core, state, 0, device.used - state - core, _stacks(arena))
    top_k = max((layer.top_k for layer in arena.program.expert_layers), default=0)
    budget = divide(needs, device.limit, RING_SLOTS, RESERVE_PARTS * top_k)
    if budget.missing:
        raise BudgetError(
            f"needs {budget.used / GIB:.2f} GiB of GPU memory before the first expert, {device.limit / GIB:.2f} GiB may"
            f" be used{device.free_at_first}",
            where="memory.vram_gib",
            fix="lower limits.context or limits.sequences, or give it more",
        )
    return budget
