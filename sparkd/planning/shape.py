"""A model as far as budgets and speeds need it: from its headers, held against settings and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from sparkd.config import Settings
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.planning.work import Work, work_of
from sparkd.residency.budget import Fit, Limit, tightest
from sparkd.residency.device_budget import DeviceBudget, DeviceNeeds, Stack, divide
from sparkd.store.layout import ArenaLayout
from sparkd.store.plan import host_needs, kv_and_state, open_model
from sparkd.store.planned import STEP_ROWS

#: Bytes of a CUDA context with our kernels. Stated, not measured.
CARD_CONTEXT = 400 << 20
#: Slots in two buffers, through which a prompt's cold experts are streamed.
RESERVE_SLOTS = 2 * 8


@dataclass(frozen=True, slots=True)
class Shape:
    """A model file, its program, where its weights lie in an arena, and what its steps do."""

    model: ModelFile
    program: Program
    layout: ArenaLayout
    work: Work

    @staticmethod
    def open(settings: Settings) -> Shape:
        """From the headers of the model that `settings` name; the errors of `open_model`."""
        model, program = open_model(settings)
        layout = ArenaLayout.of(program, model)
        stacks = tuple(Stack(layer.experts, layout.slabs[layer.slab].record_bytes) for layer in layout.layers)
        state = StateLayout.of(program, 2 if settings.kv.type == "f16" else 4)
        return Shape(model, program, layout, work_of(program, model, stacks, state))

    def host(self, settings: Settings, limits: Sequence[Limit]) -> Fit:
        """Host memory against the limit that leaves least, as the daemon's plan has it."""
        return tightest(host_needs(self.program, self.layout, settings), limits)

    def device(self, settings: Settings, limit: int, ring_slots: int) -> DeviceBudget:
        """`limit` bytes of a card's memory divided, with up to `ring_slots` of a ring in each layer."""
        kv, state = kv_and_state(self.program, settings)
        # The address of each record is one word of a table in which kernels look it up.
        table = 8 * sum(stack.experts for stack in self.work.stacks)
        needs = DeviceNeeds(
            context=CARD_CONTEXT,
            core=self.layout.core_bytes,
            kv=kv,
            state=state,
            workspace=self.work.workspace(STEP_ROWS) + table,
            stacks=self.work.stacks,
        )
        return divide(needs, limit, ring_slots, RESERVE_SLOTS)


def with_limits(settings: Settings, **limits: int) -> Settings:
    """The same settings with other limits (`context`, `sequences`)."""
    return dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, **limits))
