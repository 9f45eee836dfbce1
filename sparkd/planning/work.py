"""What one step of a program reads and computes, counted from the program and the types of its tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sparkd.executors.cuda_prompt_plan import graph_width, row_width
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.ops import Attention, Embed, GatedDelta, Logits, Op, Weight
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.residency.device_budget import Stack

#: Kernel launches that a layer and that the ends of a step (embedding, norm, logits, choice) are planned to take.
LAUNCHES_LAYER = 10
LAUNCHES_ENDS = 4
#: Sequences of one replayed step whose logits are kept at once.
LOGIT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and multiply-adds of a step of one row.

    `core_bytes` are the weights that every step reads once, however many rows it has; the head (`head_macs`) computes
    one row of a prompt's chunk only. `stacks` and `top_k` describe the expert layers. Workspace is in float32 numbers:
    `row_width` per row of a prompt, `logits_width` per row of a graph and its logits.
    """

    layers: int
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
    row_width: int
    logits_width: int

    @property
    def experts_bytes(self) -> int:
        """Bytes of the experts that one row uses."""
        return sum(k * stack.record_bytes for k, stack in zip(self.top_k, self.stacks, strict=True))

    @property
    def launches(self) -> int:
        """Kernel launches of a decode step on a card."""
        return self.layers * LAUNCHES_LAYER + LAUNCHES_ENDS

    def kv_bytes(self, position: int) -> int:
        """Bytes of K and V that a row at `position` reads."""
        return sum(size * (min(position, window) if window else position) for size, _, window in self.caches)

    def attention_macs(self, position: int) -> int:
        """Multiply-adds of q·k and P·V of a row at `position`."""
        return sum(macs * (min(position, window) if window else position) for _, macs, window in self.caches)

    def macs(self, position: int) -> int:
        """Multiply-adds of one row of a prompt at `position`, without the head."""
        return self.core_macs + self.expert_macs + self.delta_macs + self.attention_macs(position)

    def touched_bytes(self, rows: int) -> float:
        """Bytes of the different experts that `rows` rows use, expected when each chooses evenly."""
        return sum(
            stack.size * (1 - (1 - k / stack.experts) ** rows) for k, stack in zip(self.top_k, self.stacks, strict=True)
        )

    def workspace(self, rows: int) -> int:
        """Bytes on a card for prompts of at most `rows` rows in a step, and for graphs."""
        return 4 * (rows * self.row_width + LOGIT_ROWS * self.logits_width)


def work_of(program: Program, model: ModelFile, stacks: tuple[Stack, ...], state: StateLayout) -> Work:
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
        layers=len(program.layer_outputs),
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
        row_width=row_width(program),
        logits_width=program.vocab + graph_width(program),
    )


def _weights(op: Op) -> list[Weight]:
    values = (getattr(op, field.name) for field in dataclasses.fields(op))
    return [value for value in values if isinstance(value, Weight)]
