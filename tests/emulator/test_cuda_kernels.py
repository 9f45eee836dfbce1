"""Each kernel against the native executor: random shapes, extreme values, every order of threads, equal bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from pairs import F32, MadeWeights, Pair, card

from sparkd.errors import RequestError
from sparkd.executors.base import Batch
from sparkd.executors.cuda_source import TYPES as KNOWN
from sparkd.executors.weights import Piece
from sparkd.gguf.formats import FORMATS_BY_NAME, Format
from sparkd.graph import ops
from sparkd.graph.ops import Value, Weight
from sparkd.graph.program import ConvState, DeltaState, ExpertLayer, KvCache, Program
from sparkd.ipc.messages import Sampling
from sparkd.worker.sampler import best, sample

pytestmark = pytest.mark.usefixtures("every_type")
TYPES = [FORMATS_BY_NAME[name] for name in sorted(KNOWN)]
ROWS = 8
SIGMOID, SOFTPLUS = ops.Gate.SIGMOID, ops.Gate.SOFTPLUS
Tensors = dict[str, tuple[NDArray, Format]]


def blocks_of(rng: np.random.Generator, format: Format, rows: int, columns: int) -> NDArray[np.uint8]:
    """Random rows of a type: any bytes are blocks; floats by themselves are made finite."""
    raw = rng.integers(0, 256, (rows, format.row_bytes(columns)), np.uint8)
    if format.block == 1:
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        if format.name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16).view(np.uint8) if format.name == "F16" else values.view(np.uint8)
    return raw


def activations(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    """Rows of very different sizes: ordinary, tiny, huge, denormal, all zero, with an infinity, with a NaN."""
    x = (rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-20, 20, (rows, 1))).astype(np.float32)
    x[1 % rows] *= np.float32(2.0**-100)
    x[2 % rows] = np.float32(1e-41)
    if rows > 3:
        x[3] = 0.0
    if rows > 5:
        x[4, columns // 2] = np.inf
        x[5, 0] = np.nan
    return x


def program(built: list[ops.Op], last: Value, *, vocab: int, caches=(), convs=(), deltas=(), layers=()) -> Program:
    """The operations, then logits of `last` through F32 rows "head"."""
    built = [*built, ops.Logits(last, Weight("head", vocab, last.width))]
    return Program("test", last.width, vocab, 4096, tuple(built), caches, convs, deltas, layers, ())


def run(
    made: Program, tensors: Tensors, keep: list[Value], seed: int, steps: list[list[int]], order: str, **options
) -> None:
    """Steps of one sequence through both executors; their values and logits are compared."""
    logits = made.ops[-1]
    assert isinstance(logits, ops.Logits)
    rng = np.random.default_rng(seed)
    head = rng.normal(size=(logits.weight.rows, logits.weight.columns)).astype(np.float32)
    weights = MadeWeights({"head": (head, F32), **tensors}, *options.pop("records", ((), ())))
    pair = Pair(made, weights, card(seed=seed, order=order), counts=(8,), keep=keep, **options)
    sequence = pair.start()
    for tokens in steps:
        pair.step((sequence, tokens))


@pytest.mark.parametrize("format", TYPES, ids=lambda f: f.name)
def test_products_of_every_type_have_the_bits_of_the_native_ones(format: Format, seed: int) -> None:
    rng = np.random.default_rng(seed)
    orders = ["forward", "reverse", "random"]
    small = [32, 96, 288, 544] if format.block == 32 else [33, 31, 520] if format.block == 1 else []
    for number, columns in enumerate([256, 512, 768, 2304, *small]):
        order = orders[number % 3]
        count = int(rng.integers(1, ROWS + 1))
        rows = int(rng.integers(1, 40))
        x, first, second = Value("x", columns), Value("first", rows), Value("second", 5)
        built = [
            ops.Embed(Weight("x", count, columns), x),
            ops.Linear(x, Weight("w", rows, columns), first),
            ops.Linear(x, Weight("w", 5, columns, first_row=2), second),
        ]
        tensors: Tensors = {
            "x": (activations(rng, count, columns), F32),
            "w": (blocks_of(rng, format, max(rows, 7), columns), format),
        }
        run(program(built, second, vocab=count), tensors, [first, second], seed, [list(range(count))], order)


@pytest.mark.parametrize("format", TYPES, ids=lambda f: f.name)
def test_an_embedding_row_is_the_dequantised_one(format: Format, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = Value("x", 768)
    tensors: Tensors = {"x": (blocks_of(rng, format, 20, 768), format)}
    made = program([ops.Embed(Weight("x", 20, 768), x)], x, vocab=20)
    run(made, tensors, [x], seed, [rng.integers(0, 20, ROWS).tolist()], "random")


@pytest.mark.parametrize("function", list(ops.Router))
@pytest.mark.parametrize("experts, top_k", [(6, 2), (33, 8), (70, 10)])
def test_routing_and_experts(function: ops.Router, experts: int, top_k: int, seed: int) -> None:
    """Ties, NaNs and infinities among the keys; several rows that share experts; pieces of different types."""
    rng = np.random.default_rng(seed)
    width, inner = 512, 256
    formats = [FORMATS_BY_NAME[str(name)] for name in rng.choice([f.name for f in TYPES], 3)]
    x, y, routing = Value("x", width), Value("y", width), ops.Routing("r", top_k)
    layer = ExpertLayer(
        0, experts, top_k, Weight("g", inner, width), Weight("u", inner, width), Weight("d", width, inner)
    )
    parts, pieces, offset = [], [], 0
    for format, weight in zip(formats, (layer.gate, layer.up, layer.down), strict=True):
        data = blocks_of(rng, format, experts * weight.rows, weight.columns).reshape(experts, -1)
        if format.block > 1:
            tame(data.reshape(experts * weight.rows, -1, format.bytes), format)
        room = -data.shape[1] % 64
        pieces.append(Piece(offset, format))
        parts.append(np.pad(data, ((0, 0), (0, room))))
        offset += parts[-1].shape[1]
    router = rng.normal(size=(experts, width)).astype(np.float32)
    router[3] = router[1]  # a tie
    tensors: Tensors = {
        "x": (rng.normal(size=(ROWS, width)).astype(np.float32), F32),
        "router": (router, F32),
        "bias": (rng.normal(size=experts).astype(np.float32), F32),
    }
    tensors["x"][0][6] = tensors["x"][0][5]
    tensors["x"][0][7, 0] = np.nan
    bias = Weight("bias", 1, experts) if function is ops.Router.SIGMOID else None
    built = [
        ops.Embed(Weight("x", ROWS, width), x),
        ops.Route(x, Weight("router", experts, width), bias, routing, experts, function, 1.5),
        ops.Experts(x, routing, y, 0),
    ]
    made = program(built, y, vocab=ROWS, layers=(layer,))
    records = ([np.concatenate(parts, axis=1)], [tuple(pieces)])
    run(made, tensors, [y], seed, [list(range(ROWS)), [0], [2, 2]], "random", records=records)


def tame(blocks: NDArray[np.uint8], format: Format) -> None:
    """Make the factors of blocks moderate, so that products stay finite: bits of an exponent are cleared."""
    places = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
    }
    if format.name == "MXFP4":
        blocks[..., 0] = 118 + blocks[..., 0] % 8
        return
    for place in places.get(format.name, (0,)):
        blocks[..., place + 1] = blocks[..., place + 1] & 0x83 | 0x20


@pytest.mark.parametrize("kv_bytes", [2, 4])
@pytest.mark.parametrize(
    "window, heads, kv_heads, dim", [(0, 2, 1, 32), (70, 3, 1, 32), (0, 2, 2, 256), (130, 6, 3, 48)]
)
def test_attention_over_pages_groups_and_windows(
    window: int, heads: int, kv_heads: int, dim: int, kv_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    long = 1100 if (window, kv_bytes) == (0, 2) and dim == 32 else 200
    q, k, v, o = (
        Value("q", heads * dim),
        Value("k", kv_heads * dim),
        Value("v", kv_heads * dim),
        Value("o", heads * dim),
    )
    tensors: Tensors = {
        value.name: ((rng.normal(size=(30, value.width)) * 3).astype(np.float32), F32) for value in (q, k, v)
    }
    tensors["v"][0][7, 0] = 1e6  # saturates as f16
    built = [ops.Embed(Weight(value.name, 30, value.width), value) for value in (q, k, v)]
    built.append(ops.Attention(q, k, v, o, heads, kv_heads, dim, 0.125, window, 0))
    made = program(built, o, vocab=30, caches=(KvCache(0, kv_heads, dim, window),))
    rows = rng.integers(0, 30, long).tolist()
    cuts = [*range(0, long - 9, 150), long - 9, long - 4, long]
    steps = [rows[a:b] for a, b in pairwise(cuts)]
    run(made, tensors, [], seed, steps, "random", kv_bytes=kv_bytes, positions=long, max_rows=200, sequences=1)


def test_recurrent_state_goes_from_row_to_row_and_step_to_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k_heads, v_heads, dim, taps = 1, 3, 48, 4
    width = (2 * k_heads + v_heads) * dim
    x, c, alpha, beta = Value("x", width), Value("c", width), Value("alpha", v_heads), Value("beta", v_heads)
    out = Value("out", v_heads * dim)
    tensors: Tensors = {
        value.name: (rng.normal(size=(20, value.width)).astype(np.float32), F32) for value in (x, alpha, beta)
    }
    tensors["conv"] = rng.normal(size=(width, taps)).astype(np.float32), F32
    tensors["a"] = -np.abs(rng.normal(size=v_heads)).astype(np.float32), F32
    tensors["dt"] = rng.normal(size=v_heads).astype(np.float32), F32
    built: list[ops.Op] = [ops.Embed(Weight(value.name, 20, value.width), value) for value in (x, alpha, beta)]
    built.append(ops.CausalConv(x, Weight("conv", width, taps), c, taps, 0))
    a, dt = Weight("a", 1, v_heads), Weight("dt", 1, v_heads)
    built.append(ops.GatedDelta(c, alpha, beta, a, dt, out, k_heads, v_heads, dim, 1e-6, 0))
    states = {"convs": (ConvState(0, taps - 1, width),), "deltas": (DeltaState(0, v_heads, dim),)}
    made = program(built, out, vocab=20, **states)
    steps = [rng.integers(0, 20, n).tolist() for n in (1, 2, 8, 1, 5)]
    run(made, tensors, [c, out], seed, steps, "random")


def _elementwise() -> list[tuple[str, Callable[..., ops.Op], tuple[int, ...], int]]:
    table, two = ops.RopeTable((1.0, 0.3, 0.01, 1e-4), 1.3), (288, 288)
    return [
        ("rms_norm", lambda x, out: ops.RmsNorm(x, Weight("norm", 1, 288), out, 1e-6), (288,), 288),
        ("qk_norm", lambda x, out: ops.QkNorm(x, Weight("norm", 1, 48), out, 3, 48, 1e-6, 96, 48), (288,), 144),
        ("rope", lambda x, out: ops.Rope(x, out, 6, 48, table), (288,), 288),
        (
            "sigmoid",
            lambda x, g, out: ops.OutputGate(x, g, out, 6, 48, ops.Gate.SIGMOID, False, 48, 0),
            (288, 288),
            288,
        ),
        (
            "per_head",
            lambda x, g, out: ops.OutputGate(x, g, out, 6, 48, ops.Gate.SOFTPLUS, True, 48, 3),
            (288, 288),
            288,
        ),
        ("gated", lambda x, g, out: ops.GatedRmsNorm(x, g, Weight("norm", 1, 48), out, 6, 48, 1e-6), two, 288),
        ("swiglu", lambda x, y, out: ops.SwiGlu(x, y, out), two, 288),
        ("add", lambda x, y, out: ops.Add(x, y, out), two, 288),
    ]


@pytest.mark.parametrize("name, make, widths, width", _elementwise(), ids=[case[0] for case in _elementwise()])
def test_operations_on_rows(name: str, make, widths: tuple[int, ...], width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [Value(f"v{i}", w) for i, w in enumerate(widths)]
    out = Value("out", width)
    tensors: Tensors = {value.name: (activations(rng, ROWS, value.width), F32) for value in values}
    tensors["norm"] = rng.normal(size=288).astype(np.float32), F32
    built: list[ops.Op] = [ops.Embed(Weight(value.name, ROWS, value.width), value) for value in values]
    made = program([*built, make(*values, out)], out, vocab=ROWS)
    run(made, tensors, [out], seed, [list(range(ROWS)), [1, 3, 2]], "random")


@pytest.mark.parametrize("case", ["ties", "zeros", "lowest", "infinity", "nan"])
@pytest.mark.parametrize("vocab, best_of", [(7, 5), (300, 300), (20000, 19999)])
def test_the_best_token_is_the_one_that_the_sampler_takes(vocab: int, best_of: int, case: str, seed: int) -> None:
    """Rows of one number times weights: any logits that a test wants. Only the id leaves the device."""
    rng = np.random.default_rng(seed)
    head = np.float32(rng.normal(size=(vocab, 32)) * [[1.0] + [0.0] * 31])
    if case == "ties":
        head[:, 0] = rng.integers(-1, 2, vocab)
    elif case == "zeros":
        head[:, 0] = np.where(rng.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
    elif case == "lowest":
        head[:, 0] = -np.float32(3e38)
        head[vocab - 1] = 0  # beyond the ids that may be chosen, where those are fewer
    elif case in ("infinity", "nan"):
        head[rng.integers(0, vocab, 3), 0] = np.float32(case)
    x = Value("x", 32)
    rows = np.zeros((ROWS, 32), np.float32)
    rows[:, 0] = 1.0
    made = program([ops.Embed(Weight("x", ROWS, 32), x)], x, vocab=vocab)
    weights = MadeWeights({"head": (head, F32), "x": (rows, F32)})
    pair = Pair(made, weights, card(seed=seed, order="random"), counts=(8,))
    for length in (1, 3, ROWS + 2):
        batch = Batch(np.zeros(length, np.int32), pair.segments(length), np.arange(length, dtype=np.int32), best_of)
        logits = pair.native.step(replace(batch, best_of=0)).logits
        for executor in (pair.native, pair.cuda):
            found = executor.step(batch)
            assert found.logits.shape == (0, vocab)
            assert found.best is not None
            for row, one in zip(logits, found.best.tolist(), strict=True):
                expected = outcome(lambda row=row: sample(row[:best_of], Sampling(), 0))
                assert outcome(lambda one=one: best(one)) == expected


def outcome(choose: Callable[[], int]) -> int | str:
    """The token, or the words of the refusal."""
    try:
        return choose()
    except RequestError as error:
        return str(error)
