"""Operations with state and the router give the bits of docs/arithmetic.md, in a plan, with every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_arithmetic import documented, noise, vectors, word, words

from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.formats import FORMATS_BY_NAME
from sparkd.graph import ops
from sparkd.graph.ops import Value, Weight
from sparkd.graph.program import ConvState, DeltaState, ExpertLayer, KvCache, Program
from sparkd.graph.state import StateLayout
from sparkd.kernels import available

F32 = FORMATS_BY_NAME["F32"]


class Small:
    """A program of one operation whose inputs are rows of tables, run in chunks."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[np.float32]] = {}
        self.built: list[ops.Op] = []
        self.state: dict[str, tuple] = {"caches": (), "conv_states": (), "delta_states": (), "expert_layers": ()}

    def weight(self, name: str, rows: NDArray[np.float32]) -> Weight:
        self.arrays[name] = np.ascontiguousarray(np.atleast_2d(rows), np.float32)
        return Weight(name, *self.arrays[name].shape)

    def rows(self, name: str, rows: list[NDArray[np.float32]]) -> Value:
        """A value with one of these rows for each position."""
        weight = self.weight(name, np.array(rows))
        value = Value(name, weight.columns)
        self.built.append(ops.Embed(weight, value))
        return value

    def tensor(self, name: str) -> Stored:
        return Stored(self.arrays[name].ctypes.data, F32)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        sizes = np.cumsum([0] + [self.arrays[name][0].nbytes for name in ("gate", "up")])
        return tuple(Piece(int(size), F32) for size in sizes)

    def records(self) -> list[NDArray[np.uint64]]:
        if not self.state["expert_layers"]:
            return []
        parts = [self.arrays[name] for name in ("gate", "up", "down")]
        self.kept = [np.concatenate([part[e].ravel() for part in parts]) for e in range(len(parts[0]))]
        return [np.array([record.ctypes.data for record in self.kept], np.uint64)]

    def run(self, out: Value, positions: int, isa: str, chunk: int) -> NDArray[np.float32]:
        """`out` of every position."""
        head = self.weight("head", np.zeros((positions, out.width)))
        built = (*self.built, ops.Logits(out, head))
        program = Program("test", out.width, positions, positions, built, layer_outputs=(), **self.state)
        layout = StateLayout.of(program, 2)
        pages = -(-positions // 64)
        memory = StateMemory.allocate(layout, [pages] * len(layout.groups), 1)
        executor = NativeExecutor(program, self, layout, memory, max_rows=chunk, threads=2, isa=isa, keep=[out])
        tables = tuple(np.arange(pages, dtype=np.int32)[::-1] for _ in layout.groups)
        made = []
        for start in range(0, positions, chunk):
            tokens = np.arange(start, min(start + chunk, positions), dtype=np.int32)
            segment = Segment(start, len(tokens), tables, 0, RowKind.PREFILL)
            executor.step(Batch(tokens, (segment,), np.empty(0, np.int32)))
            made.append(executor.trace(out).copy())
        return np.concatenate(made)


@pytest.fixture(params=available())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_convolutions_give_the_documented_bits(isa, chunk):
    for (channels, taps, rows, seed), result in documented("causal_conv"):
        channels, taps, rows, seed = map(int, (channels, taps, rows, seed))
        small = Small()
        small.state["conv_states"] = (ConvState(0, taps - 1, channels),)
        x = small.rows("x", [noise(seed + t, channels) for t in range(rows)])
        weight = small.weight("weight", np.array([noise(seed + 1000 + c, taps) for c in range(channels)]))
        out = Value("out", channels)
        small.built.append(ops.CausalConv(x, weight, out, taps, 0))
        assert words(*small.run(out, rows, isa, chunk)[-1]) == result


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_delta_rules_give_the_documented_bits(isa, chunk):
    for (n, rows, seed), result in documented("gated_delta"):
        n, rows, seed = map(int, (n, rows, seed))
        small = Small()
        small.state["delta_states"] = (DeltaState(0, 2, n),)
        qkv = small.rows("qkv", [noise(seed + t, 4 * n) for t in range(rows)])
        gates = [np.float32(4) * noise(seed + 1000 + t, 4) for t in range(rows)]
        alpha, beta = small.rows("alpha", [g[:2] for g in gates]), small.rows("beta", [g[2:] for g in gates])
        a = small.weight("a", noise(seed + 2000, 2) - np.float32(1))
        dt = small.weight("dt", noise(seed + 2001, 2))
        out = Value("out", 2 * n)
        small.built.append(ops.GatedDelta(qkv, alpha, beta, a, dt, out, 1, 2, n, vectors.EPS, 0))
        made = small.run(out, rows, isa, chunk)[-1]
        assert words(*made[:2], *made[n : n + 2]) == result


def test_routers_choose_and_weigh_as_documented(isa):
    """Expert e answers with 1 in place e: silu(32) = 32, times 1/32. So the sum of all is the row of weights."""
    for (function, experts, top_k, scale, bias, seed), result in documented("route"):
        experts, top_k, seed = int(experts), int(top_k), int(seed)
        small = Small()
        one = np.zeros(experts + 1, np.float32)
        one[-1] = 1
        logits = np.append(vectors.router_logits(seed, experts), np.float32(1))
        x = small.rows("x", [logits])
        router = small.weight("router", np.eye(experts, experts + 1))
        biases = small.weight("bias", noise(seed + 1000, experts)) if bias == "bias" else None
        routing = ops.Routing("r", top_k)
        out = Value("out", experts)
        kind = ops.Router[function.upper()]
        small.built += [
            ops.Route(x, router, biases, routing, experts, kind, word(scale)),
            ops.Experts(x, routing, out, 0),
        ]
        small.arrays["gate"] = np.array([32 * one] * experts)
        small.arrays["up"] = np.array([one / 32] * experts)
        small.arrays["down"] = np.eye(experts, dtype=np.float32)
        gate, down = Weight("gate", 1, experts + 1), Weight("down", experts, 1)
        small.state["expert_layers"] = (ExpertLayer(0, experts, top_k, gate, gate, down),)
        made = small.run(out, 1, isa, 1)[-1]
        expected = dict(pair.split(":") for pair in result)
        assert {i: words(w)[0] for i, w in enumerate(made) if w} == {int(i): w for i, w in expected.items()}
        assert len(expected) == top_k


@pytest.mark.parametrize("chunk", [17, 2000])
def test_attention_gives_the_documented_bits(isa, chunk):
    for (positions, window, n, seed), result in documented("attention"):
        positions, window, n, seed = map(int, (positions, window, n, seed))
        small = Small()
        small.state["caches"] = (KvCache(0, 1, n, window),)
        # Only the last query counts.
        q = small.rows("q", [np.float32(4) * noise(seed, n)] * positions)
        k = small.rows("k", [np.float32(4) * noise(seed + 1000 + t, n) for t in range(positions)])
        v = small.rows("v", [noise(seed + 3000 + t, n) for t in range(positions)])
        out = Value("out", n)
        small.built.append(ops.Attention(q, k, v, out, 1, 1, n, 0.5, window, 0))
        assert words(*small.run(out, positions, isa, chunk)[-1][:4]) == result


@st.composite
def attention(draw: st.DrawFn) -> tuple[Small, Value, int]:
    """Attention of some heads to positions that fill a few pages, small numbers and extreme ones."""
    positions = draw(st.integers(1, 260))
    n = draw(st.sampled_from([16, 32, 64, 96, 128, 256]))
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 9))
    window = draw(st.sampled_from([0, 1, 40, 64, 150]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([1e-30, 1.0, 30.0, 1e4, 1e30]))

    def table(width: int) -> list[NDArray[np.float32]]:
        rows = random.standard_normal((positions, width)).astype(np.float32)
        rows[random.random(rows.shape) < 0.1] *= np.float32(size)
        rows[random.random(rows.shape) < 0.1] *= np.float32(-0.0)
        return list(rows)

    small = Small()
    small.state["caches"] = (KvCache(0, kv_heads, n, window),)
    q, k, v = (small.rows(name, table(n * h)) for name, h in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    out = Value("out", n * heads)
    small.built.append(ops.Attention(q, k, v, out, heads, kv_heads, n, n**-0.5, window, 0))
    return small, out, positions


@settings(max_examples=40, deadline=None)
@given(attention(), st.integers(1, 260))
def test_attention_of_many_queries_gives_the_bits_of_one(case, chunk):
    """Queries go through a page together or one by one, as their number and the registers allow."""
    small, out, positions = case
    defined = small.run(out, positions, available()[-1], 1)
    for isa in available():
        assert np.array_equal(small.run(out, positions, isa, chunk).view(np.uint32), defined.view(np.uint32)), isa
