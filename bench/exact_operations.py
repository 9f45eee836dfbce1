"""Operations with state and the router (docs/arithmetic.md, "Operations of a program"), with exact rationals."""

from __future__ import annotations

from collections.abc import Sequence

from exact_arithmetic import (
    add,
    div,
    dot32,
    exp,
    f16_to_f32,
    f32_to_f16,
    fma,
    l2_factor,
    merge,
    mul,
    page,
    sigmoid,
    silu,
    softplus,
    sqrt,
    sub,
)

Vector = Sequence[float]


def causal_conv(x: Sequence[Vector], weight: Sequence[Vector]) -> list[float]:
    """The outputs of the last row of x [rows][channels], for weight [channels][taps]."""
    out = []
    for channel, taps in enumerate(weight):
        acc = 0.0
        for j, w in enumerate(taps):
            t = len(x) - len(taps) + j
            acc = fma(w, x[t][channel] if t >= 0 else 0.0, acc)
        out.append(silu(acc))
    return out


def gated_delta(
    state: list[list[float]],
    q: Vector,
    k: Vector,
    v: Vector,
    alpha: float,
    beta: float,
    a: float,
    dt: float,
    eps: float,
) -> list[float]:
    """One row of one V head; changes the state [v][k]."""
    q_factor, k_factor = l2_factor(q, eps), l2_factor(k, eps)
    q_scale = div(1.0, sqrt(float(len(q))))
    q = [mul(mul(x, q_factor), q_scale) for x in q]
    k = [mul(x, k_factor) for x in k]
    b = sigmoid(beta)
    decay = exp(mul(softplus(add(alpha, dt)), a))
    out = []
    for i, row in enumerate(state):
        decayed = [mul(s, decay) for s in row]
        d = mul(sub(v[i], dot32(decayed, k)), b)
        state[i] = [fma(d, kj, s) for kj, s in zip(k, decayed, strict=True)]
        out.append(dot32(state[i], q))
    return out


def route(logits: Vector, bias: Vector | None, is_sigmoid: bool, top_k: int, scale: float) -> list[tuple[int, float]]:
    """The chosen, best first, and their weights."""
    value = [sigmoid(x) for x in logits] if is_sigmoid else list(logits)
    key = value if bias is None else [add(p, b) for p, b in zip(value, bias, strict=True)]
    chosen = sorted(range(len(key)), key=lambda i: (-key[i], i))[:top_k]
    parts = [value[i] if is_sigmoid else exp(sub(value[i], value[chosen[0]])) for i in chosen]
    total = 0.0
    for part in parts:
        total = add(total, part)
    if is_sigmoid:
        total = max(total, 6.103515625e-5)
    return [(i, mul(div(part, total), scale)) for i, part in zip(chosen, parts, strict=True)]


def attention(q: Vector, keys: Sequence[Vector], values: Sequence[Vector], window: int, scale: float) -> list[float]:
    """Of the query at the last position, over a cache of f16."""
    position = len(keys) - 1
    first = max(0, position - window + 1) if window else 0
    halves = [[f16_to_f32(f32_to_f16(x)) for x in row] for row in values]
    scores = [mul(dot32(q, [f16_to_f32(f32_to_f16(x)) for x in row]), scale) for row in keys[first:]]
    groups: dict[int, tuple[float, float, list[float]]] = {}
    for number in range(first // 64, position // 64 + 1):
        begin, end = max(first, 64 * number), min(position + 1, 64 * number + 64)
        state = page(scores[begin - first : end - first], halves[begin:end])
        group = number // 16
        groups[group] = merge(*groups[group], *state) if group in groups else state
    (result, *later) = groups.values()
    for state in later:
        result = merge(*result, *state)
    inverse = div(1.0, result[1])
    return [mul(x, inverse) for x in result[2]]
