"""The meaning of every operation, in float64 with torch: one function per operation, no shortcuts. For tests.

Follows the formulas of `graph.ops`, not the roundings of `docs/arithmetic.md`. A sequence is run alone; its state is a
value, so a run can be continued, repeated or cut anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkd.gguf.formats import dequantise
from sparkd.gguf.model_file import ModelFile
from sparkd.graph import ops
from sparkd.graph.ops import Gate, Router, Value, Weight
from sparkd.graph.program import Program

#: The smallest sum that the weights of sigmoid-routed experts are divided by.
SMALLEST_SUM = 6.103515625e-5


#: Numbers of dequantised experts that are kept: all of a small model.
KEPT_NUMBERS = 1 << 25


class Weights:
    """The float64 weights of a model file, dequantised when used: experts one by one, embeddings row by row."""

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        self._bytes = [np.memmap(shard.path, np.uint8, mode="r") for shard in model.shards]
        self._kept: dict[Weight, Tensor] = {}
        self._experts: dict[tuple[Weight, int], Tensor] = {}

    def matrix(self, weight: Weight) -> Tensor:
        """[rows, columns]."""
        if weight not in self._kept:
            self._kept[weight] = self._rows(weight, weight.first_row, weight.rows)
        return self._kept[weight]

    def vector(self, weight: Weight) -> Tensor:
        """[columns] of a weight with one row."""
        return self.matrix(weight)[0]

    def expert(self, weight: Weight, expert: int) -> Tensor:
        """[rows, columns] of one expert's slice of a stack."""
        if (weight, expert) not in self._experts:
            if len(self._experts) * weight.rows * weight.columns > KEPT_NUMBERS:
                self._experts.clear()
            first = expert * self._model.tensors[weight.tensor].rows + weight.first_row
            self._experts[weight, expert] = self._rows(weight, first, weight.rows)
        return self._experts[weight, expert]

    def row(self, weight: Weight, row: int) -> Tensor:
        """[columns]."""
        return self._rows(weight, weight.first_row + row, 1)[0]

    def _rows(self, weight: Weight, first: int, count: int) -> Tensor:
        tensor = self._model.tensors[weight.tensor]
        # A 1-D tensor may stand for a matrix, and a depthwise convolution's rows are its channels.
        size = tensor.format.row_bytes(weight.columns)
        start = tensor.offset + first * size
        data = np.asarray(self._bytes[tensor.shard][start : start + count * size])
        return torch.from_numpy(dequantise(tensor.format, data, (count, weight.columns)).astype(np.float64))


@dataclass(frozen=True, slots=True)
class State:
    """Everything a sequence remembers after `length` positions.

    `kv[c]`: K and V, each [positions, kv_heads, head_dim] of all positions (also those behind a window). `conv[s]`:
    [taps - 1, channels]. `delta[s]`: [v_heads, head_dim (v), head_dim (k)].
    """

    length: int
    kv: tuple[tuple[Tensor, Tensor], ...]
    conv: tuple[Tensor, ...]
    delta: tuple[Tensor, ...]

    @staticmethod
    def empty(program: Program) -> State:
        """The state before the first token."""
        kv = [torch.zeros(0, c.kv_heads, c.head_dim, dtype=torch.float64) for c in program.caches]
        conv = [torch.zeros(c.rows, c.channels, dtype=torch.float64) for c in program.conv_states]
        delta = [torch.zeros(d.heads, d.head_dim, d.head_dim, dtype=torch.float64) for d in program.delta_states]
        return State(0, tuple((k, k) for k in kv), tuple(conv), tuple(delta))


@dataclass(frozen=True, slots=True)
class Run:
    """What one run computed, and the state to continue from.

    `logits` [rows wanted, vocab]; `layers` [model layers, rows, hidden]: the residual stream after each layer;
    `experts` [expert layers, rows, top_k], best first.
    """

    logits: Tensor
    layers: Tensor
    experts: Tensor
    state: State


class Reference:
    """Runs one program; `kv_type` is what K and V are rounded to before any use."""

    def __init__(self, program: Program, weights: Weights, kv_type: torch.dtype = torch.float64) -> None:
        self.program = program
        self.weights = weights
        self.kv_type = kv_type

    def run(self, tokens: Sequence[int], state: State | None = None, logits_rows: Sequence[int] | None = None) -> Run:
        """Run `tokens` after `state` (default: none before). Logits of `logits_rows` (default: all rows)."""
        state = state or State.empty(self.program)
        rows = range(len(tokens)) if logits_rows is None else logits_rows
        step = _Step(self, [int(token) for token in tokens], list(rows), state)
        for op in self.program.ops:
            step.apply(op)
        layers = torch.stack([step.values[value] for value in self.program.layer_outputs])
        after = State(state.length + len(tokens), tuple(step.kv), tuple(step.conv), tuple(step.delta))
        return Run(step.logits, layers, torch.stack(step.experts), after)

    def greedy(self, run: Run, count: int) -> tuple[list[int], Run]:
        """`count` tokens after `run`, the most probable each, and the run whose logits gave the last of them."""
        tokens = [int(run.logits[-1].argmax())]
        while len(tokens) < count:
            run = self.run(tokens[-1:], run.state)
            tokens.append(int(run.logits[-1].argmax()))
        return tokens, run


class _Step:
    """Values and state while the operations of one run are applied in order."""

    def __init__(self, reference: Reference, tokens: list[int], rows: list[int], state: State) -> None:
        self.program = reference.program
        self.weights = reference.weights
        self.kv_type = reference.kv_type
        self.tokens = tokens
        self.rows = rows
        self.start = state.length
        self.kv = list(state.kv)
        self.conv = list(state.conv)
        self.delta = list(state.delta)
        self.values: dict[Value, Tensor] = {}
        self.routings: dict[ops.Routing, tuple[Tensor, Tensor]] = {}
        self.experts: list[Tensor] = []
        self.logits = torch.empty(0)

    def apply(self, op: ops.Op) -> None:
        """Compute one operation."""
        v, w = self.values, self.weights
        match op:
            case ops.Embed():
                v[op.out] = torch.stack([w.row(op.weight, token) for token in self.tokens])
            case ops.RmsNorm():
                v[op.out] = rms_norm(v[op.x], w.vector(op.weight), op.eps)
            case ops.Linear():
                v[op.out] = v[op.x] @ w.matrix(op.weight).T
            case ops.QkNorm():
                heads = split(v[op.x], op.heads, op.head_dim, op.stride, op.offset)
                v[op.out] = rms_norm(heads, w.vector(op.weight), op.eps).flatten(1)
            case ops.Rope():
                heads = split(v[op.x], op.heads, op.head_dim, op.head_dim, 0)
                v[op.out] = rope(heads, self.start, op.table).flatten(1)
            case ops.Attention():
                v[op.out] = self._attention(op)
            case ops.OutputGate():
                heads = split(v[op.x], op.heads, op.head_dim, op.head_dim, 0)
                gate = split(v[op.gate], op.heads, 1 if op.per_head else op.head_dim, op.stride, op.offset)
                v[op.out] = output_gate(heads, gate, op.function).flatten(1)
            case ops.CausalConv():
                v[op.out], self.conv[op.state] = causal_conv(v[op.x], w.matrix(op.weight), self.conv[op.state])
            case ops.GatedDelta():
                v[op.out], self.delta[op.state] = gated_delta(
                    op, v[op.qkv], v[op.alpha], v[op.beta], w.vector(op.a), w.vector(op.dt_bias), self.delta[op.state]
                )
            case ops.GatedRmsNorm():
                heads = split(v[op.x], op.heads, op.head_dim, op.head_dim, 0)
                gate = split(v[op.gate], op.heads, op.head_dim, op.head_dim, 0)
                v[op.out] = (rms_norm(heads, w.vector(op.weight), op.eps) * silu(gate)).flatten(1)
            case ops.Route():
                bias = None if op.bias is None else w.vector(op.bias)
                chosen = route(v[op.x] @ w.matrix(op.weight).T, bias, op.function, op.out.top_k, op.scale)
                self.routings[op.out] = chosen
                self.experts.append(chosen[0])
            case ops.Experts():
                v[op.out] = self._experts(op)
            case ops.SwiGlu():
                v[op.out] = silu(v[op.gate]) * v[op.up]
            case ops.Add():
                v[op.out] = v[op.x] + v[op.y]
            case ops.Logits():
                self.logits = v[op.x][self.rows] @ w.matrix(op.weight).T

    def _attention(self, op: ops.Attention) -> Tensor:
        """Appends this run's K and V to the cache, then attends to all of it."""
        k, v = (
            split(self.values[x], op.kv_heads, op.head_dim, op.head_dim, 0).to(self.kv_type).to(torch.float64)
            for x in (op.k, op.v)
        )
        old_k, old_v = self.kv[op.cache]
        k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.kv[op.cache] = k, v
        q = split(self.values[op.q], op.heads, op.head_dim, op.head_dim, 0)
        return attention(q, k, v, self.start, op.scale, op.window).flatten(1)

    def _experts(self, op: ops.Experts) -> Tensor:
        """Each expert computes all rows that chose it; their weighted results are then added by rank."""
        layer = self.program.expert_layers[op.layer]
        ids, weights = self.routings[op.routing]
        x = self.values[op.x]
        results = torch.zeros(*ids.shape, op.out.width, dtype=torch.float64)
        for expert in sorted(set(ids.flatten().tolist())):
            gate, up, down = (self.weights.expert(weight, expert) for weight in (layer.gate, layer.up, layer.down))
            rows, ranks = torch.nonzero(ids == expert, as_tuple=True)
            results[rows, ranks] = (silu(x[rows] @ gate.T) * (x[rows] @ up.T)) @ down.T
        return (results * weights[..., None]).sum(1)


def split(x: Tensor, heads: int, head_dim: int, stride: int, offset: int) -> Tensor:
    """Head h of each row at x[offset + h*stride : ... + head_dim], as [rows, heads, head_dim]."""
    return x[:, offset:].unfold(1, head_dim, stride)[:, :heads]


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, start: int, table: ops.RopeTable) -> Tensor:
    """Rotate pairs (i, i + n/2) of x [rows, heads, head_dim], whose first row stands at position `start`."""
    half = len(table.inv_freq)
    positions = torch.arange(start, start + len(x), dtype=torch.float64)
    angles = positions[:, None, None] * torch.tensor(table.inv_freq, dtype=torch.float64)
    cos, sin = angles.cos() * table.magnitude, angles.sin() * table.magnitude
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int) -> Tensor:
    """Causal softmax(q·k * scale)·v; q [rows, heads, d] from position `start`, k and v [positions, kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    ahead = torch.arange(start, start + len(q))[:, None] - torch.arange(len(k))
    visible = (ahead >= 0) & (ahead < window) if window else ahead >= 0
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def output_gate(x: Tensor, gate: Tensor, function: Gate) -> Tensor:
    """x * f(gate)."""
    match function:
        case Gate.SIGMOID:
            return x * torch.sigmoid(gate)
        case Gate.SOFTPLUS:
            return x * softplus(gate)


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), without overflow."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def causal_conv(x: Tensor, weight: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """silu of the depthwise convolution with taps `weight` [channels, taps], and the rows to remember."""
    rows = torch.cat([past, x])
    windows = rows.unfold(0, weight.shape[1], 1)  # [rows, channels, taps]
    return silu((windows * weight).sum(-1)), rows[len(rows) - len(past) :]


def gated_delta(
    op: ops.GatedDelta, qkv: Tensor, alpha: Tensor, beta: Tensor, a: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token, all heads at once; and S after the last."""
    heads = split(qkv, 2 * op.k_heads + op.v_heads, op.head_dim, op.head_dim, 0)
    q, k, v = heads.tensor_split([op.k_heads, 2 * op.k_heads], 1)
    tiles = op.v_heads // op.k_heads
    q = l2_norm(q, op.eps).repeat(1, tiles, 1) / op.head_dim**0.5
    k = l2_norm(k, op.eps).repeat(1, tiles, 1)
    b = torch.sigmoid(beta)
    decay = torch.exp(softplus(alpha + dt_bias) * a)
    out = torch.empty_like(v)
    for t in range(len(qkv)):
        state = state * decay[t, :, None, None]
        d = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * b[t, :, None]
        state = state + d[:, :, None] * k[t, :, None, :]
        out[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return out.flatten(1), state


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum x^2 + eps), over the last dimension."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)


def route(logits: Tensor, bias: Tensor | None, function: Router, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """ids [rows, top_k], best first (ties: lowest id), and their weights."""
    match function:
        case Router.SOFTMAX:
            ids = top(logits if bias is None else logits + bias, top_k)
            weights = logits.gather(1, ids).softmax(-1)
        case Router.SIGMOID:
            p = torch.sigmoid(logits)
            ids = top(p if bias is None else p + bias, top_k)
            chosen = p.gather(1, ids)
            weights = chosen / chosen.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
    return ids, weights * scale


def top(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest scores of each row, largest first, ties by lowest column."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
