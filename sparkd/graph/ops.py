"""The operations a program is made of, and what each of them means.

Every operation works on the rows of a step (one row per token). A `Value` is `width` float32 numbers per row; a
`Weight` is a slice of rows of one tensor of the model file, named, not loaded. Formulas are mathematics; the order of
every rounding is `docs/arithmetic.md`. Below, x[h] is the part of a row that belongs to head h.

An operation that takes `stride` and `offset` reads head h at x[offset + h*stride : ... + head_dim]: some files
interleave two things per head in one projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Value:
    """An activation: `width` float32 numbers per row. Written by exactly one operation."""

    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Weight:
    """Rows `first_row : first_row + rows` of a tensor whose rows have `columns` elements (1-D tensors: one row)."""

    tensor: str
    rows: int
    columns: int
    first_row: int = 0


class Gate(Enum):
    """Function of an output gate."""

    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"


class Router(Enum):
    """How router logits become weights.

    SOFTMAX: choose the k largest logits, w = softmax over the chosen. SIGMOID: p = sigmoid(logit), choose the k largest
    p + bias, w = p / max(sum of chosen p, 6.103515625e-5).
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Embed:
    """out = row `token` of the weight, dequantised."""

    weight: Weight
    out: Value


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight."""

    x: Value
    weight: Weight
    out: Value
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out = weight · x, with weight [out.width, x.width]."""

    x: Value
    weight: Weight
    out: Value


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norm of each head by itself with one weight of `head_dim` elements; out is dense [heads, head_dim]."""

    x: Value
    weight: Weight
    out: Value
    heads: int
    head_dim: int
    eps: float
    stride: int
    offset: int


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Angles of rotary embedding: pair i of `len(inv_freq)` turns by position * inv_freq[i] (float64).

    cos and sin are multiplied by `magnitude` (YaRN) and rounded to float32 once.
    """

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate dims (i, i + n/2) for i < n/2 of each head, n = 2 * len(table.inv_freq); the other dims pass unchanged."""

    x: Value
    out: Value
    heads: int
    head_dim: int
    table: RopeTable


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal softmax(q·k * scale)·v over the sequence's KV cache `cache` (an index into `Program.caches`).

    First writes k and v of this step's rows into the cache, rounded to `kv.type`. Query head h reads KV head
    h // (heads // kv_heads). With `window` w a query at position p sees keys p-w+1 .. p; 0 means all.
    """

    q: Value
    k: Value
    v: Value
    out: Value
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    cache: int


@dataclass(frozen=True, slots=True)
class OutputGate:
    """out = x * f(gate), x dense [heads, head_dim].

    `per_head` false: gate[offset + h*stride + j] gates x[h, j]. `per_head` true: gate[offset + h*stride] gates all of
    x[h]. (heads = 1 and per_head gives one scalar per row: the shared expert's gate.)
    """

    x: Value
    gate: Value
    out: Value
    heads: int
    head_dim: int
    function: Gate
    per_head: bool
    stride: int
    offset: int


@dataclass(frozen=True, slots=True)
class CausalConv:
    """Depthwise causal convolution and SiLU: out[t, c] = silu(sum_j weight[c, j] * x[t - taps + 1 + j, c]).

    Rows before this step come from the sequence's conv state `state` (an index into `Program.conv_states`), zeros at
    the start; the last taps - 1 raw rows of x are kept there.
    """

    x: Value
    weight: Weight
    out: Value
    taps: int
    state: int


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The gated delta rule, one exact step per row and V head.

    qkv holds q [k_heads, head_dim], k [k_heads, head_dim], v [v_heads, head_dim]. V head g uses q and k of head
    g % k_heads. q and k are l2-normalised (x / sqrt(sum x^2 + eps)), q then times 1/sqrt(head_dim). With
    beta_g = sigmoid(beta[g]) and decay = exp(softplus(alpha[g] + dt_bias[g]) * a[g]):

        S = S * decay;  d = (v - S k) * beta_g;  S = S + d k^T;  out[g] = S q

    S is [v_heads, head_dim (v), head_dim (k)] float32, delta state `state` (an index into `Program.delta_states`).
    """

    qkv: Value
    alpha: Value
    beta: Value
    a: Weight
    dt_bias: Weight
    out: Value
    k_heads: int
    v_heads: int
    head_dim: int
    eps: float
    state: int


@dataclass(frozen=True, slots=True)
class GatedRmsNorm:
    """out[h] = RMS norm of x[h] with `weight` [head_dim], times silu(gate[h])."""

    x: Value
    gate: Value
    weight: Weight
    out: Value
    heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of experts for each row: top_k ids, best first (ties: lowest id), and their weights."""

    name: str
    top_k: int


@dataclass(frozen=True, slots=True)
class Route:
    """Router: logits = weight · x; `function` chooses and weighs; weights are multiplied by `scale` last."""

    x: Value
    weight: Weight
    bias: Weight | None
    out: Routing
    experts: int
    function: Router
    scale: float


@dataclass(frozen=True, slots=True)
class Experts:
    """out = sum over rank r of w_r * down_e(silu(gate_e x) * (up_e x)), e = id of rank r, added in rank order.

    `layer` is an index into `Program.expert_layers`, which holds the weights of the stack.
    """

    x: Value
    routing: Routing
    out: Value
    layer: int


@dataclass(frozen=True, slots=True)
class SwiGlu:
    """out = silu(gate) * up."""

    gate: Value
    up: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y."""

    x: Value
    y: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Logits:
    """logits = weight · x, for the rows whose logits are wanted only."""

    x: Value
    weight: Weight


Op = (
    Embed
    | RmsNorm
    | Linear
    | QkNorm
    | Rope
    | Attention
    | OutputGate
    | CausalConv
    | GatedDelta
    | GatedRmsNorm
    | Route
    | Experts
    | SwiGlu
    | Add
    | Logits
)
