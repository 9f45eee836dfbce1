"""Prompts through the emulated kernels: the bits of the native executor, in any chunking, for every type of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from host_device import HostDevice
from pairs import F32, MadeWeights, Pair, card, loaded
from test_cuda_kernels import TYPES, Tensors, activations, blocks_of, program, tame

from sparkd.demo.main import MODEL
from sparkd.executors.cuda_prompt import Likely
from sparkd.executors.weights import Piece
from sparkd.gguf.formats import FORMATS_BY_NAME, Arithmetic, Format
from sparkd.graph import ops
from sparkd.graph.ops import Value, Weight
from sparkd.graph.program import ConvState, DeltaState, ExpertLayer, KvCache, Program

pytestmark = pytest.mark.usefixtures("every_type")
#: Rows that run together at most: a full tile of rows, and a part of one.
ROWS = 45
PROMPTS = {"prompt_rows": ROWS, "prompt_from": 2, "max_rows": 64, "counts": (8,)}


def run(
    made: Program,
    tensors: Tensors,
    keep: list[Value],
    seed: int,
    steps: list[list[int]],
    order: str,
    kernels: Sequence[str],
    tensor_cores: bool = False,
    **options,
) -> None:
    """Steps of one sequence through both executors; values are compared. `kernels` are the ones that this is about."""
    logits = made.ops[-1]
    assert isinstance(logits, ops.Logits)
    rng = np.random.default_rng(seed)
    head = rng.normal(size=(logits.weight.rows, logits.weight.columns)).astype(np.float32)
    weights = MadeWeights({"head": (head, F32), **tensors}, *options.pop("records", ((), ())))
    device = card(seed=seed, order=order, tensor_cores=tensor_cores)
    pair = Pair(made, weights, device, keep=keep, **{**PROMPTS, **options})
    sequence = pair.start()
    for tokens in steps:
        pair.step((sequence, tokens))
    if isinstance(device, HostDevice):
        assert set(kernels) <= set(device.launched), f"{kernels} were not all used"


@pytest.mark.parametrize("tensor_cores", [False, True], ids=["dp4a", "mma"])
@pytest.mark.parametrize("format", TYPES, ids=lambda f: f.name)
def test_products_of_every_type_have_the_bits_of_the_native_ones(format: Format, tensor_cores: bool, seed: int) -> None:
    if tensor_cores and format.arithmetic is Arithmetic.FLOAT:
        pytest.skip("floats know no tensor cores")
    rng = np.random.default_rng(seed)
    orders = ["forward", "reverse", "random"]
    small = [96, 544] if format.block == 32 else [33] if format.block == 1 else []
    for number, columns in enumerate([256, 2304, *small]):
        count = int(rng.integers(2, ROWS + 1))
        rows = int(rng.integers(1, 90))
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
        run(
            program(built, second, vocab=count),
            tensors,
            [first, second],
            seed,
            [list(range(count))],
            orders[number % 3],
            ["prefill_linear"],
            tensor_cores,
        )


@pytest.mark.parametrize("function", list(ops.Router))
@pytest.mark.parametrize("experts, top_k", [(6, 2), (70, 10)])
def test_routing_and_experts(function: ops.Router, experts: int, top_k: int, seed: int) -> None:
    """Ties and a NaN among the keys; experts of more rows than a tile has; pieces of different types."""
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
        pieces.append(Piece(offset, format))
        parts.append(np.pad(data, ((0, 0), (0, -data.shape[1] % 64))))
        offset += parts[-1].shape[1]
    router = rng.normal(size=(experts, width)).astype(np.float32)
    router[3] = router[1]  # a tie
    vectors = rng.normal(size=(ROWS, width)).astype(np.float32)
    vectors[6:40] = vectors[5]
    vectors[41, 0] = np.nan
    tensors: Tensors = {
        "x": (vectors, F32),
        "router": (router, F32),
        "bias": (rng.normal(size=experts).astype(np.float32), F32),
    }
    bias = Weight("bias", 1, experts) if function is ops.Router.SIGMOID else None
    built = [
        ops.Embed(Weight("x", ROWS, width), x),
        ops.Route(x, Weight("router", experts, width), bias, routing, experts, function, 1.5),
        ops.Experts(x, routing, y, 0),
    ]
    made = program(built, y, vocab=ROWS, layers=(layer,))
    records = ([np.concatenate(parts, axis=1)], [tuple(pieces)])
    run(
        made,
        tensors,
        [y],
        seed,
        [list(range(ROWS)), [2, 2]],
        "random",
        ["prefill_choose", "sort_pairs", "prefill_experts", "prefill_inner"],
        records=records,
    )


@pytest.mark.parametrize("kv_bytes", [2, 4])
@pytest.mark.parametrize(
    "window, heads, kv_heads, dim", [(0, 2, 1, 32), (70, 3, 1, 32), (0, 2, 2, 256), (130, 6, 3, 48)]
)
def test_attention_over_pages_groups_and_windows(
    window: int, heads: int, kv_heads: int, dim: int, kv_bytes: int, seed: int
) -> None:
    """Chunks that begin and end anywhere on a page, single rows between them; one context of more than a group."""
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
    cuts = sorted({0, 1, long, *rng.integers(2, long, 3).tolist(), *range(150, long, 180)})
    steps = [rows[a:b] for a, b in pairwise(cuts)]
    options = {"kv_bytes": kv_bytes, "positions": long, "max_rows": 200, "prompt_rows": 70}
    run(
        made, tensors, [], seed, steps, "random", [f"prefill_attention_{2 if dim <= 64 else 8}"], sequences=1, **options
    )


def test_recurrent_state_goes_from_row_to_row_and_chunk_to_chunk(seed: int) -> None:
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
    steps = [rng.integers(0, 20, n).tolist() for n in (2, 1, 17, 2, 3, 1, 44)]
    run(
        made,
        tensors,
        [c, out],
        seed,
        steps,
        "random",
        ["prefill_conv", "prefill_conv_state", "delta_inputs", "prefill_delta"],
    )


def test_experts_are_named_before_they_are_chosen_only_where_that_is_hardly_ever_in_vain() -> None:
    layer = ExpertLayer(0, 256, 8, *[Weight("w", 1, 1)] * 3)
    likely = Likely([layer])
    assert likely.experts(0, 2048) == []
    counts = np.zeros(256, np.int32)
    counts[[7, 3, 200, 5]] = 900, 500, 300, 10
    likely.learn(0, counts, 1024)
    assert likely.experts(0, 512) == [7, 3, 200] and likely.experts(0, 4) == []
    assert likely.experts(0, 2048) == [7, 3, 200, 5]
    likely.learn(0, np.roll(counts, 1), 1024)
    # What was chosen before that counts for a few rows only.
    assert likely.experts(0, 512) == [8, 4, 201, 7]


BUILT_IN = "the built-in model"
MODELS = [
    pytest.param(BUILT_IN, marks=pytest.mark.soak),
    "qwen35moe-tinyk-s1-q4_k_m",
    "laguna-tinyk-s1-q4_k_m",
    pytest.param("qwen35moe-tiny-s1-f32", marks=pytest.mark.soak),
    pytest.param("laguna-tiny-s1-f32", marks=pytest.mark.soak),
    pytest.param("laguna-tinyk-s1-iq4_xs", marks=pytest.mark.soak),
    pytest.param("qwen35moe-tinyk-s1-mxfp4_moe", marks=pytest.mark.soak),
    pytest.param("qwen35moe-tiny-s1-bf16", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_a_prompt_in_any_chunks_beside_a_sequence_that_decodes(
    name: str, model_path: Callable[[str], Path], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with loaded(MODEL if name == BUILT_IN else model_path(name)) as arena:
        device = card(seed=seed, order="random")
        pair = Pair(arena.program, arena, device, prompt_rows=21, prompt_from=5)
        vocab = arena.program.vocab
        first, second = pair.start(), pair.start()
        result = pair.step((first, rng.integers(0, vocab, 6).tolist()))
        for length in (1, *rng.integers(2, 40, 3).tolist()):
            token = int(result.logits[0].argmax())
            result = pair.step((first, [token]), (second, rng.integers(0, vocab, length).tolist()))
        if isinstance(device, HostDevice):
            assert device.launched["prefill_experts"] > len(arena.program.expert_layers)
