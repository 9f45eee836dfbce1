"""Laguna (`laguna`): full and sliding-window attention with a softplus output gate, sigmoid-routed experts.

A layer is x + Attention(norm x), then x + FFN(norm x). Full layers rotate part of each head with YaRN, sliding-window
layers all of it with their own base. The first layers have one dense FFN, the others routed experts plus one shared
expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.gguf.model_file import ModelFile
from sparkd.graph.ops import Attention, Gate, OutputGate, QkNorm, Rope, RopeTable, Router, Value
from sparkd.graph.program import KvCache, Program
from sparkd.models.builder import (
    MOST_DIMS,
    MOST_EXPERTS,
    Builder,
    Keys,
    check_heads,
    check_rotated,
    check_value_length,
    count_layers,
    count_vocab,
    read_attention_scale,
    read_weights_scale,
)
from sparkd.models.rope import Reading, Yarn, read_yarn, rope_table


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of one layer; `window` 0 sees all positions."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    scale: float
    rope: RopeTable


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Everything the program depends on besides the tensors."""

    hidden: int
    vocab: int
    context: int
    eps: float
    blocks: int
    attention: tuple[LayerAttention, ...]
    dense_layers: int
    dense_width: tuple[int, ...]
    experts: int
    top_k: int
    expert_width: tuple[int, ...]
    shared_width: int
    weights_scale: float

    @staticmethod
    def read(model: ModelFile, reading: Reading, notes: list[str]) -> Hyperparameters:
        """From a file's metadata. Raises ModelFileError or UnsupportedError naming the key."""
        keys = Keys(model)
        layers, blocks = count_layers(model, keys, notes)
        experts = keys.integer("expert_count", 1, MOST_EXPERTS)
        if keys.integer("expert_gating_func", 0, 255, default=0) not in (0, 2):
            raise keys.unsupported("expert_gating_func", "is not sigmoid (2)")
        if not keys.metadata.boolean("laguna.expert_weights_norm", False):
            raise keys.unsupported("expert_weights_norm", "is false, sparkd always normalises the experts' weights")
        if keys.integer("expert_shared_count", 0, 1024, default=1) != 1:
            raise keys.unsupported("expert_shared_count", "is not 1")
        dense = keys.integer("leading_dense_block_count", 0, layers - 1)
        hidden = keys.integer("embedding_length", 1, 1 << 20)
        context = keys.integer("context_length", 1, 1 << 30)
        return Hyperparameters(
            hidden=hidden,
            vocab=count_vocab(model, keys),
            context=context,
            eps=keys.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
            blocks=blocks,
            attention=_read_attention(keys, hidden, layers, blocks, read_yarn(keys.metadata, context, reading, notes)),
            dense_layers=dense,
            dense_width=keys.integers("feed_forward_length", blocks, 0, 1 << 24) if dense else (),
            experts=experts,
            top_k=keys.integer("expert_used_count", 1, experts),
            expert_width=keys.integers("expert_feed_forward_length", blocks, 0, 1 << 24),
            shared_width=keys.integer("expert_shared_feed_forward_length", 1, 1 << 24),
            weights_scale=read_weights_scale(keys),
        )


def _read_attention(keys: Keys, hidden: int, layers: int, blocks: int, yarn: Yarn | None) -> tuple[LayerAttention, ...]:
    heads = keys.integers("attention.head_count", blocks, 1, 65536)
    kv_heads = keys.integers("attention.head_count_kv", blocks, 0, 65536, default=0)
    full_dim = keys.integer("attention.key_length", 2, MOST_DIMS, default=max(2, hidden // heads[0]))
    swa_dim = keys.integer("attention.key_length_swa", 2, MOST_DIMS, default=full_dim)
    check_value_length(keys, "", full_dim)
    check_value_length(keys, "_swa", swa_dim)
    window = keys.integer("attention.sliding_window", 0, 1 << 30, default=0)
    sliding = _sliding_layers(keys, layers, blocks) if window else (False,) * layers

    base = keys.number("rope.freq_base", 1.001, 1e15, default=10000.0)
    n_rot = keys.integer("rope.dimension_count", 2, MOST_DIMS, default=full_dim)
    check_rotated(keys, "rope.dimension_count", n_rot, full_dim)
    full_rope = rope_table(base, n_rot, yarn)
    swa_rope = full_rope
    if any(sliding):
        base_swa = keys.number("rope.freq_base_swa", 1.001, 1e15, default=base)
        n_rot_swa = keys.integer("rope.dimension_count_swa", 2, MOST_DIMS, default=swa_dim)
        check_rotated(keys, "rope.dimension_count_swa", n_rot_swa, swa_dim)
        swa_rope = rope_table(base_swa, n_rot_swa)

    result = []
    for layer in range(layers):
        kv = kv_heads[layer] or heads[layer]
        check_heads(keys, heads[layer], kv, layer)
        dim = swa_dim if sliding[layer] else full_dim
        result.append(
            LayerAttention(
                heads[layer],
                kv,
                dim,
                window if sliding[layer] else 0,
                read_attention_scale(keys, dim),
                swa_rope if sliding[layer] else full_rope,
            )
        )
    return tuple(result)


def _sliding_layers(keys: Keys, layers: int, blocks: int) -> tuple[bool, ...]:
    """Which layers slide: an array says so for each; a period p (absent: 4) leaves layers 0, p, 2p ... full."""
    key = "attention.sliding_window_pattern"
    if keys.metadata.is_array(f"laguna.{key}"):
        return keys.metadata.booleans(f"laguna.{key}", blocks)[:layers]
    period = keys.integer(key, 1, 1024, default=4)
    return tuple(layer % period != 0 for layer in range(layers))


def build(model: ModelFile, reading: Reading) -> Program:
    """The program of a Laguna file."""
    notes: list[str] = []
    hp = Hyperparameters.read(model, reading, notes)
    b = Builder(model, hp.hidden, hp.eps, notes)

    x = b.embed(hp.vocab)
    for layer, attention in enumerate(hp.attention):
        b.enter(layer)
        x = b.add(x, _attention(b, b.rms_norm(x, "attn_norm.weight"), layer, attention), "attn_residual")
        h = b.rms_norm(x, "ffn_norm.weight")
        y = b.swiglu(h, hp.dense_width[layer]) if layer < hp.dense_layers else _experts(b, h, layer, hp)
        x = b.add(x, y, "out")
        b.layer_outputs.append(x)
    b.leave()
    b.logits(b.rms_norm(x, "output_norm.weight"), hp.vocab)
    return b.program(hp.vocab, hp.context, len(hp.attention), hp.blocks)


def _attention(b: Builder, h: Value, layer: int, a: LayerAttention) -> Value:
    width = a.heads * a.head_dim
    kv_width = a.kv_heads * a.head_dim
    wq, wk, wv = b.attention_weights(h.width, width, kv_width, kv_width)
    q = _rotated(b, b.linear(h, wq, "q"), "attn_q_norm", a.heads, a)
    k = _rotated(b, b.linear(h, wk, "k"), "attn_k_norm", a.kv_heads, a)
    v = b.linear(h, wv, "v")
    o = b.value("attention", width)
    b.ops.append(Attention(q, k, v, o, a.heads, a.kv_heads, a.head_dim, a.scale, a.window, len(b.caches)))
    b.caches.append(KvCache(layer, a.kv_heads, a.head_dim, a.window))

    # No key says whether the gate works per head or per element: its shape does.
    rows = b.tensor("attn_gate.weight", (h.width, a.heads), (h.width, width)).shape[1]
    gate = b.linear(h, b.matrix("attn_gate.weight", h.width, rows), "attn_gate")
    gated = b.value("gated", width)
    per_head = rows == a.heads
    stride = 1 if per_head else a.head_dim
    b.ops.append(OutputGate(o, gate, gated, a.heads, a.head_dim, Gate.SOFTPLUS, per_head, stride, 0))
    return b.linear(gated, b.matrix("attn_output.weight", width, h.width), "attn_output")


def _rotated(b: Builder, x: Value, norm: str, heads: int, a: LayerAttention) -> Value:
    normed = b.value(norm, x.width)
    weight = b.vector(f"{norm}.weight", a.head_dim)
    b.ops.append(QkNorm(x, weight, normed, heads, a.head_dim, b.eps, a.head_dim, 0))
    out = b.value(f"{norm}_rope", x.width)
    b.ops.append(Rope(normed, out, heads, a.head_dim, a.rope))
    return out


def _experts(b: Builder, h: Value, layer: int, hp: Hyperparameters) -> Value:
    width = hp.expert_width[layer]
    routed = b.routed_experts(h, layer, hp.experts, hp.top_k, width, Router.SIGMOID, True, hp.weights_scale)
    return b.add(routed, b.swiglu(h, hp.shared_width, "_shexp"), "ffn")
