"""Qwen3.5/3.6 MoE (`qwen35moe`): gated delta rule in most layers, full attention in the others, softmax-routed experts.

A layer is x + Mixer(norm x), then x + MoE(norm x). The file's V heads are in tiled order (V head g goes with K head g
modulo the K heads), its norm weights already contain the +1 of the checkpoint, and `ssm_a` is already -exp(A_log).
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.gguf.model_file import ModelFile
from sparkd.graph.ops import (
    Attention,
    CausalConv,
    Gate,
    GatedDelta,
    GatedRmsNorm,
    OutputGate,
    QkNorm,
    Rope,
    RopeTable,
    Router,
    Value,
    Weight,
)
from sparkd.graph.program import ConvState, DeltaState, KvCache, Program
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
from sparkd.models.rope import Reading, read_yarn, rope_table


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Everything the program depends on besides the tensors. `recurrent`, `heads`, `kv_heads`: one value per layer."""

    hidden: int
    vocab: int
    context: int
    eps: float
    blocks: int
    recurrent: tuple[bool, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    scale: float
    rope: RopeTable
    delta_k_heads: int
    delta_v_heads: int
    delta_dim: int
    conv_taps: int
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
        hidden = keys.integer("embedding_length", 1, 1 << 20)
        context = keys.integer("context_length", 1, 1 << 30)
        recurrent = _recurrent_layers(keys, layers, blocks)
        heads = keys.integers("attention.head_count", blocks, 0, 65536)
        kv_heads = keys.integers("attention.head_count_kv", blocks, 0, 65536, default=0)
        kv_heads = tuple(kv or q for q, kv in zip(heads, kv_heads, strict=True))
        for layer in range(layers):
            if not recurrent[layer]:
                if not heads[layer]:
                    raise keys.wrong("attention.head_count", f"of layer {layer} is 0")
                check_heads(keys, heads[layer], kv_heads[layer], layer)
        head_dim = keys.integer("attention.key_length", 2, MOST_DIMS, default=max(2, hidden // max(1, *heads)))
        check_value_length(keys, "", head_dim)
        n_rot = keys.integer("rope.dimension_count", 2, MOST_DIMS, default=head_dim)
        check_rotated(keys, "rope.dimension_count", n_rot, head_dim)
        base = keys.number("rope.freq_base", 1.001, 1e15, default=10000.0)
        yarn = read_yarn(keys.metadata, context, reading, notes)

        k_heads = keys.integer("ssm.group_count", 1, 65536)
        v_heads = keys.integer("ssm.time_step_rank", 1, 65536)
        delta_dim = keys.integer("ssm.state_size", 1, MOST_DIMS)
        if v_heads % k_heads:
            raise keys.wrong("ssm.time_step_rank", f"is {v_heads}, no multiple of ssm.group_count {k_heads}")
        inner = keys.integer("ssm.inner_size", 1, 1 << 32)
        if inner != v_heads * delta_dim:
            raise keys.wrong("ssm.inner_size", f"is {inner}, not {v_heads} V heads of {delta_dim}")

        experts = keys.integer("expert_count", 1, MOST_EXPERTS)
        if keys.integer("expert_gating_func", 0, 255, default=0) not in (0, 1):
            raise keys.unsupported("expert_gating_func", "is not softmax (1)")
        if not keys.metadata.boolean("qwen35moe.expert_weights_norm", True):
            notes.append("qwen35moe.expert_weights_norm is false: the experts' weights are normalised nevertheless")
        return Hyperparameters(
            hidden=hidden,
            vocab=count_vocab(model, keys),
            context=context,
            eps=keys.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
            blocks=blocks,
            recurrent=recurrent,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=read_attention_scale(keys, head_dim),
            rope=rope_table(base, n_rot, yarn),
            delta_k_heads=k_heads,
            delta_v_heads=v_heads,
            delta_dim=delta_dim,
            conv_taps=keys.integer("ssm.conv_kernel", 2, 64),
            experts=experts,
            top_k=keys.integer("expert_used_count", 1, experts),
            expert_width=keys.integers("expert_feed_forward_length", blocks, 0, 1 << 24),
            shared_width=keys.integer("expert_shared_feed_forward_length", 1, 1 << 24),
            weights_scale=read_weights_scale(keys),
        )


def _recurrent_layers(keys: Keys, layers: int, blocks: int) -> tuple[bool, ...]:
    """Layers with the delta rule: as the array says, else all but every full_attention_interval-th."""
    flags = "qwen35moe.attention.recurrent_layers"
    if flags in keys.metadata:
        return keys.metadata.booleans(flags, blocks)[:layers]
    interval = keys.integer("full_attention_interval", 1, 1024, default=4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def build(model: ModelFile, reading: Reading) -> Program:
    """The program of a Qwen3.5/3.6 MoE file."""
    notes: list[str] = []
    hp = Hyperparameters.read(model, reading, notes)
    b = Builder(model, hp.hidden, hp.eps, notes)

    x = b.embed(hp.vocab)
    for layer, recurrent in enumerate(hp.recurrent):
        b.enter(layer)
        h = b.rms_norm(x, "attn_norm.weight")
        y = _gated_delta_net(b, h, layer, hp) if recurrent else _attention(b, h, layer, hp)
        x = b.add(x, y, "attn_residual")
        # The norm before the FFN, in spite of its name.
        x = b.add(x, _experts(b, b.rms_norm(x, "post_attention_norm.weight"), layer, hp), "out")
        b.layer_outputs.append(x)
    b.leave()
    b.logits(b.rms_norm(x, "output_norm.weight"), hp.vocab)
    return b.program(hp.vocab, hp.context, len(hp.recurrent), hp.blocks)


def _attention(b: Builder, h: Value, layer: int, hp: Hyperparameters) -> Value:
    heads, kv_heads, d = hp.heads[layer], hp.kv_heads[layer], hp.head_dim
    # Of each head's 2d rows the first d are q, the others the output gate.
    wq, wk, wv = b.attention_weights(h.width, heads * 2 * d, kv_heads * d, kv_heads * d)
    qg = b.linear(h, wq, "q_gate")
    q = _rotated(b, qg, "attn_q_norm", heads, 2 * d, hp)
    k = _rotated(b, b.linear(h, wk, "k"), "attn_k_norm", kv_heads, d, hp)
    v = b.linear(h, wv, "v")
    o = b.value("attention", heads * d)
    b.ops.append(Attention(q, k, v, o, heads, kv_heads, d, hp.scale, 0, len(b.caches)))
    b.caches.append(KvCache(layer, kv_heads, d, 0))
    gated = b.value("gated", heads * d)
    b.ops.append(OutputGate(o, qg, gated, heads, d, Gate.SIGMOID, per_head=False, stride=2 * d, offset=d))
    return b.linear(gated, b.matrix("attn_output.weight", heads * d, h.width), "attn_output")


def _rotated(b: Builder, x: Value, norm: str, heads: int, stride: int, hp: Hyperparameters) -> Value:
    d = hp.head_dim
    normed = b.value(norm, heads * d)
    b.ops.append(QkNorm(x, b.vector(f"{norm}.weight", d), normed, heads, d, b.eps, stride, 0))
    out = b.value(f"{norm}_rope", heads * d)
    b.ops.append(Rope(normed, out, heads, d, hp.rope))
    return out


def _gated_delta_net(b: Builder, h: Value, layer: int, hp: Hyperparameters) -> Value:
    k_heads, v_heads, d = hp.delta_k_heads, hp.delta_v_heads, hp.delta_dim
    channels, inner = (2 * k_heads + v_heads) * d, v_heads * d
    qkv = b.linear(h, b.matrix("attn_qkv.weight", h.width, channels), "qkv")
    z = b.linear(h, b.matrix("attn_gate.weight", h.width, inner), "z")
    alpha = b.linear(h, b.matrix("ssm_alpha.weight", h.width, v_heads), "alpha")
    beta = b.linear(h, b.matrix("ssm_beta.weight", h.width, v_heads), "beta")

    mixed = b.value("conv", channels)
    taps = b.taps("ssm_conv1d.weight", hp.conv_taps, channels)
    b.ops.append(CausalConv(qkv, taps, mixed, hp.conv_taps, len(b.conv_states)))
    b.conv_states.append(ConvState(layer, hp.conv_taps - 1, channels))

    o = b.value("delta", inner)
    a, dt_bias = b.vector("ssm_a", v_heads), b.vector("ssm_dt.bias", v_heads)
    b.ops.append(GatedDelta(mixed, alpha, beta, a, dt_bias, o, k_heads, v_heads, d, b.eps, len(b.delta_states)))
    b.delta_states.append(DeltaState(layer, v_heads, d))

    normed = b.value("ssm_norm", inner)
    b.ops.append(GatedRmsNorm(o, z, b.vector("ssm_norm.weight", d), normed, v_heads, d, b.eps))
    return b.linear(normed, b.matrix("ssm_out.weight", inner, h.width), "ssm_out")


def _experts(b: Builder, h: Value, layer: int, hp: Hyperparameters) -> Value:
    width = hp.expert_width[layer]
    routed = b.routed_experts(h, layer, hp.experts, hp.top_k, width, Router.SOFTMAX, False, hp.weights_scale)
    shared = b.swiglu(h, hp.shared_width, "_shexp")
    # One number per row gates the shared expert; files hold its weight as {hidden} or {hidden, 1}.
    name = b.tensor("ffn_gate_inp_shexp.weight", (h.width,), (h.width, 1)).name
    gate = b.linear(h, Weight(name, 1, h.width), "shared_gate")
    gated = b.value("shared", h.width)
    b.ops.append(OutputGate(shared, gate, gated, 1, h.width, Gate.SIGMOID, per_head=True, stride=1, offset=0))
    return b.add(routed, gated, "ffn")
