"""A model as a linear program over `ops`, with the state its sequences carry."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.graph.ops import Op, Value, Weight


@dataclass(frozen=True, slots=True)
class KvCache:
    """K and V of one attention layer: `kv_heads` x `head_dim` each per position. `window` 0: all positions are kept."""

    layer: int
    kv_heads: int
    head_dim: int
    window: int


@dataclass(frozen=True, slots=True)
class ConvState:
    """The last `rows` raw rows of `channels` float32, oldest first."""

    layer: int
    rows: int
    channels: int


@dataclass(frozen=True, slots=True)
class DeltaState:
    """The delta rule's S: [heads, head_dim (v), head_dim (k)] float32."""

    layer: int
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of one model layer.

    `gate`, `up`, `down` describe one expert: rows inside its slice of the stacked tensor (for a fused gate_up tensor,
    `gate` and `up` name the same tensor and differ in `first_row`).
    """

    layer: int
    experts: int
    top_k: int
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class Program:
    """One model: operations in order, and what they refer to by index."""

    architecture: str
    hidden: int
    vocab: int
    context: int
    ops: tuple[Op, ...]
    caches: tuple[KvCache, ...]
    conv_states: tuple[ConvState, ...]
    delta_states: tuple[DeltaState, ...]
    expert_layers: tuple[ExpertLayer, ...]
    #: The residual stream after each model layer, for tests and tracing.
    layer_outputs: tuple[Value, ...]
    #: What a reader of the log should know (draft layers skipped, a doubtful key, ...).
    notes: tuple[str, ...] = ()
