"""A model as far as budgets and speeds need it: from its headers, held against settings and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkd.config import Settings
from sparkd.errors import UnsupportedError
from sparkd.executors.cuda_counted import Launches, count_launches
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.planning.work import Work, work_of
from sparkd.residency.budget import Fit, Limit, tightest
from sparkd.residency.device_budget import (
    CARD_CONTEXT,
    RESERVE_PARTS,
    STAGING_PARTS,
    DeviceBudget,
    DeviceNeeds,
    Stack,
    choose_step,
    divide,
    staging_slots,
    step_rows,
)
from sparkd.store.layout import ArenaLayout, Slab, weights_bytes
from sparkd.store.plan import fit_layout, host_needs, kv_and_state, open_model


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Host memory as the daemon would divide it: the arena's layout, and its needs against the limit.

    Where not all records fit, the calibrator has the share `pinned` of the ordinary slots hold a hot set; the others
    are a ring.
    """

    layout: ArenaLayout
    fit: Fit
    pinned: float = 1.0

    @property
    def ordinary(self) -> list[int]:
        """Slots for hot set and ring of each expert layer, its part of those of its slab."""
        slabs = self.layout.slabs
        return [
            min(slabs[layer.slab].size.ordinary * layer.experts // slabs[layer.slab].records, layer.experts)
            for layer in self.layout.layers
        ]

    @property
    def hot_bytes(self) -> int:
        """Bytes of slots for the hot set: of all of them where nothing is ever evicted."""
        return sum(slab.record_bytes * self._hot(slab) for slab in self.layout.slabs)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring's slots, without spare ones."""
        return sum(
            slab.record_bytes * (slab.size.ordinary - self._hot(slab) - slab.size.spare) for slab in self.layout.slabs
        )

    @property
    def spare_bytes(self) -> int:
        """Bytes of ordinary slots that are kept free."""
        return sum(slab.record_bytes * slab.size.spare for slab in self.layout.slabs)

    @property
    def reserve_bytes(self) -> int:
        """Bytes of slots for leases alone."""
        return sum(slab.record_bytes * slab.size.reserve for slab in self.layout.slabs)

    def _hot(self, slab: Slab) -> int:
        size = slab.size
        return size.ordinary if slab.full else min(size.hot(1.0 - self.pinned), size.ordinary - size.spare)

    @property
    def residency(self) -> float:
        """Ordinary slots per record; 1 for a model without experts."""
        records = sum(slab.records for slab in self.layout.slabs)
        return sum(slab.size.ordinary for slab in self.layout.slabs) / records if records else 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A model file, its program, its arena with all records and with the fewest, and what its steps do.

    `unfit`: why no card can compute it; empty: one can.
    """

    model: ModelFile
    program: Program
    whole: ArenaLayout
    least: ArenaLayout
    work: Work
    unfit: str = ""

    @staticmethod
    def open(settings: Settings) -> Shape:
        """From the headers of the model that `settings` name; the errors of `open_model`."""
        model, program = open_model(settings)
        whole = ArenaLayout.of(program, model)
        stacks = tuple(Stack(layer.experts, weights_bytes(layer, model)) for layer in program.expert_layers)
        state = StateLayout.of(program, 2 if settings.kv.type == "f16" else 4)
        least = ArenaLayout.within(program, model, 0)
        launches, unfit = Launches(0, 0, 0), ""
        try:
            launches = count_launches(program, HeaderWeights(model, whole), state)
        except UnsupportedError as error:
            unfit = str(error)
        return Shape(model, program, whole, least, work_of(program, model, stacks, state, launches), unfit)

    def host(self, settings: Settings, limits: Sequence[Limit], pinned: float) -> HostBudget:
        """Host memory divided as the daemon's plan does it: all records, or as many as fit."""
        layout = fit_layout(self.program, self.model, settings, limits)
        return HostBudget(layout, tightest(host_needs(self.program, layout, settings), limits), pinned)

    def with_all(self, settings: Settings, limits: Sequence[Limit]) -> Fit:
        """All records in host memory, against the limit that leaves least."""
        return tightest(host_needs(self.program, self.whole, settings), limits)

    def with_least(self, settings: Settings, limits: Sequence[Limit]) -> Fit:
        """The fewest records that can be served with, against the limit that leaves least."""
        return tightest(host_needs(self.program, self.least, settings), limits)

    def device(self, settings: Settings, limit: int, ring_slots: int) -> DeviceBudget:
        """`limit` bytes of a card's memory divided, with up to `ring_slots` of a ring in each layer.

        With the longest steps of prompts that `choose_step` grants.
        """
        context = min(settings.limits.context, self.program.context)
        return choose_step(self.device_for(rows, settings, limit, ring_slots) for rows in step_rows(context))

    def device_for(self, rows: int, settings: Settings, limit: int, ring_slots: int) -> DeviceBudget:
        """The same with room for steps of `rows` rows."""
        kv, state = kv_and_state(self.program, settings, rows)
        # The address of each record is one word of a table in which kernels look it up.
        table = 8 * sum(stack.experts for stack in self.work.stacks)
        needs = DeviceNeeds(
            context=CARD_CONTEXT,
            core=self.whole.core_bytes,
            kv=kv,
            state=state,
            workspace=self.work.workspace.bytes(rows) + table + self.staging(rows),
            stacks=self.work.stacks,
            rows=rows,
        )
        return divide(needs, limit, ring_slots, RESERVE_PARTS * self.top_k)

    def staging(self, rows: int) -> int:
        """Bytes of the buffers that prompts stream through in steps of `rows` rows."""
        largest = max((stack.record_bytes for stack in self.work.stacks), default=0)
        return STAGING_PARTS * staging_slots(self.top_k, rows) * largest

    @property
    def top_k(self) -> int:
        """Experts of a token in each layer, at most."""
        return max(self.work.top_k, default=0)


class HeaderWeights:
    """Types and places of the weights of a model of which nothing but the header was read."""

    def __init__(self, model: ModelFile, layout: ArenaLayout) -> None:
        self._model = model
        self._layout = layout

    def tensor(self, name: str) -> Stored:
        """Its type; it lies nowhere."""
        return Stored(1 << 40, self._model.tensors[name].format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        """Gate, up, down inside a record."""
        return self._layout.layers[layer].pieces

    def records(self) -> list[NDArray[np.uint64]]:
        """They lie nowhere."""
        return [np.ones(layer.experts, np.uint64) for layer in self._layout.layers]


def with_limits(settings: Settings, **limits: int) -> Settings:
    """The same settings with other limits (`context`, `sequences`)."""
    return dataclasses.replace(settings, limits=dataclasses.replace(settings.limits, **limits))
