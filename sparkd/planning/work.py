"""What one step of a program reads and computes, counted from the program and the types of its tensors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from sparkd.executors.cuda_counted import Launches
from sparkd.executors.cuda_prompt_plan import LIKELY_ROWS, Workspace, workspace_of
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.ops import Attention, Embed, GatedDelta, Logits, Op, Weight
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.residency.device_budget import Stack


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and multiply-adds of a step of one row.

    `core_bytes` are the weights that every step reads once, however many rows it has; the head (`head_macs`) computes
    one row of a prompt's chunk only. `stacks` and `top_k` describe the expert layers.
    """

    launches: Launches
    core_bytes: int
    core_macs: int
    head_macs: int
    stacks: tuple[Stack, ...]
    top_k: tuple[int, ...]
    expert_macs: int
    delta_macs: int
    #: K and V bytes per position and multiply-adds per row and position, with the window (0: none), per cache.
    caches: tuple[tuple[int, int, int], ...]
    record_bytes: int
    workspace: Workspace

    @property
    def experts_bytes(self) -> int:
        """Bytes of the experts that one row uses."""
        return sum(k * stack.record_bytes for k, stack in zip(self.top_k, self.stacks, strict=True))

    def kv_bytes(self, position: int) -> int:
        """Bytes of K and V that a row at `position` reads."""
        return sum(size * (min(position, window) if window else position) for size, _, window in self.caches)

    def attention_macs(self, position: int) -> int:
        """Multiply-adds of q·k and P·V of a row at `position`."""
        return sum(macs * (min(position, window) if window else position) for _, macs, window in self.caches)

    def macs(self, position: int) -> int:
        """Multiply-adds of one row of a prompt at `position`, without the head."""
        return self.mixer_macs(position) + self.expert_macs

    def mixer_macs(self, position: int) -> int:
        """Those of them that no routed expert does."""
        return self.core_macs + self.delta_macs + self.attention_macs(position)

    def touched_bytes(self, rows: int) -> float:
        """Bytes of the different experts that `rows` rows use, expected when each chooses evenly."""
        return sum(
            stack.size * (1 - (1 - k / stack.experts) ** rows) for k, stack in zip(self.top_k, self.stacks, strict=True)
        )

    def touched_weights(self, rows: int) -> float:
        """Weights of the core and of the different experts that `rows` rows use, as in `touched_bytes`."""
        an_expert = self.expert_macs / max(1, sum(self.top_k))
        different = sum(
            stack.experts * (1 - (1 - k / stack.experts) ** rows)
            for k, stack in zip(self.top_k, self.stacks, strict=True)
        )
        return self.core_macs + an_expert * different

    def likely_bytes(self, rows: int, records: int) -> float:
        """Bytes of up to `records` experts of each layer, where `rows` rows are sure enough to need whichever."""
        return sum(
            min(records, stack.experts) * stack.record_bytes
            for k, stack in zip(self.top_k, self.stacks, strict=True)
            if rows * k >= LIKELY_ROWS * stack.experts
        )

    def parts(self, rows: int, residency: float, records: int) -> int:
        """Parts of all layers' experts that are multiplied one after another: those in slots, and buffers of others."""
        count = 0
        for k, stack in zip(self.top_k, self.stacks, strict=True):
            touched = stack.experts * (1 - (1 - k / stack.experts) ** rows)
            count += (residency > 0) + math.ceil(touched * (1 - residency) / records)
        return count


def work_of(
    program: Program, model: ModelFile, stacks: tuple[Stack, ...], state: StateLayout, launches: Launches
) -> Work:
    """Count `program`; `stacks` are its expert layers as they lie in memory."""
    core_bytes = core_macs = head_macs = delta_macs = 0
    for op in program.ops:
        for weight in _weights(op):
            row_bytes = model.tensors[weight.tensor].row_bytes
            core_bytes += row_bytes if isinstance(op, Embed) else weight.rows * row_bytes
            if isinstance(op, Logits):
                head_macs += weight.rows * weight.columns
            elif not isinstance(op, Embed):
                core_macs += weight.rows * weight.columns
        if isinstance(op, GatedDelta):
            # S * decay, S k, d k^T and S q: four passes over every head's matrix.
            delta_macs += 4 * op.v_heads * op.head_dim * op.head_dim
    experts = program.expert_layers
    attentions = [op for op in program.ops if isinstance(op, Attention)]
    caches = tuple(
        (2 * op.kv_heads * op.head_dim * state.kv_bytes, 2 * op.heads * op.head_dim, op.window) for op in attentions
    )
    return Work(
        launches=launches,
        core_bytes=core_bytes,
        core_macs=core_macs,
        head_macs=head_macs,
        stacks=stacks,
        top_k=tuple(layer.top_k for layer in experts),
        expert_macs=sum(
            layer.top_k * weight.rows * weight.columns
            for layer in experts
            for weight in (layer.gate, layer.up, layer.down)
        ),
        delta_macs=delta_macs,
        caches=caches,
        record_bytes=state.record_bytes,
        workspace=workspace_of(program),
    )


def _weights(op: Op) -> list[Weight]:
    values = (getattr(op, field.name) for field in dataclasses.fields(op))
    return [value for value in values if isinstance(value, Weight)]
