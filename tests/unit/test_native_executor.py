"""The native executor on a small made-up program that has every operation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparkd.errors import RequestError, UnsupportedError
from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.formats import FORMATS_BY_NAME, Arithmetic, Format
from sparkd.graph import ops
from sparkd.graph.ops import Value, Weight
from sparkd.graph.program import ConvState, DeltaState, ExpertLayer, KvCache, Program
from sparkd.graph.state import StateLayout
from sparkd.kernels import available, native

F32 = FORMATS_BY_NAME["F32"]
WIDTH, HEADS, DIM, EXPERTS, TOP_K, INNER, VOCAB = 32, 2, 16, 6, 2, 32, 40


def make_program() -> Program:
    """Conv and delta rule, then windowed attention, then two expert layers (softmax and sigmoid routers)."""
    table = ops.RopeTable((1.0, 0.1))
    built: list[ops.Op] = []

    def emit(make, width: int = WIDTH) -> Value:
        out = Value(f"v{len(built)}", width)
        built.append(make(out))
        return out

    def linear(x: Value, name: str, width: int = WIDTH) -> Value:
        return emit(lambda out: ops.Linear(x, Weight(name, width, x.width), out), width)

    x = emit(lambda out: ops.Embed(Weight("embedding", VOCAB, WIDTH), out))
    h = emit(lambda out: ops.RmsNorm(x, Weight("norm", 1, WIDTH), out, 1e-6))
    u = linear(h, "qkv", 64)
    qkv = emit(lambda out: ops.CausalConv(u, Weight("conv", 64, 4), out, 4, 0), 64)
    alpha, beta = linear(h, "alpha", HEADS), linear(h, "beta", HEADS)
    a, dt = Weight("a", 1, HEADS), Weight("dt", 1, HEADS)
    delta = emit(lambda out: ops.GatedDelta(qkv, alpha, beta, a, dt, out, 1, HEADS, DIM, 1e-6, 0))
    z = emit(lambda out: ops.GatedRmsNorm(delta, h, Weight("head_norm", 1, DIM), out, HEADS, DIM, 1e-6))
    mixed = emit(lambda out: ops.Add(x, z, out))
    q = emit(lambda out: ops.QkNorm(mixed, Weight("head_norm", 1, DIM), out, HEADS, DIM, 1e-6, DIM, 0))
    turned = emit(lambda out: ops.Rope(q, out, HEADS, DIM, table))
    k, v = linear(mixed, "k", DIM), linear(mixed, "v", DIM)
    o = emit(lambda out: ops.Attention(turned, k, v, out, HEADS, 1, DIM, 0.25, 70, 0))
    x = emit(lambda out: ops.OutputGate(o, mixed, out, HEADS, DIM, ops.Gate.SOFTPLUS, False, DIM, 0))
    for layer, function in enumerate((ops.Router.SOFTMAX, ops.Router.SIGMOID)):
        bias = Weight("bias", 1, EXPERTS) if layer else None
        routing = ops.Routing(f"r{layer}", TOP_K)
        built.append(ops.Route(x, Weight(f"router{layer}", EXPERTS, WIDTH), bias, routing, EXPERTS, function, 1.5))
        x = emit(lambda out, x=x, routing=routing, layer=layer: ops.Experts(x, routing, out, layer))
    gated = emit(lambda out: ops.SwiGlu(x, mixed, out))
    built.append(ops.Logits(gated, Weight("head", VOCAB, WIDTH)))
    piece = Weight("experts", INNER, WIDTH)
    layers = tuple(ExpertLayer(i, EXPERTS, TOP_K, piece, piece, piece) for i in range(2))
    return Program(
        "test",
        WIDTH,
        VOCAB,
        1000,
        tuple(built),
        (KvCache(0, 1, DIM, 70),),
        (ConvState(0, 3, 64),),
        (DeltaState(0, HEADS, DIM),),
        layers,
        (mixed,),
    )


class MadeWeights:
    """Random float32 weights; `formats` pretends another format for a tensor."""

    def __init__(self, program: Program) -> None:
        rng = np.random.default_rng(1)
        self.arrays: dict[str, np.ndarray] = {}
        self.formats: dict[str, Format] = {}
        for op in program.ops:
            for weight in (getattr(op, f, None) for f in ("weight", "bias", "a", "dt_bias")):
                if weight is not None and weight.tensor not in self.arrays:
                    values = rng.normal(size=(weight.rows, weight.columns)) / np.sqrt(weight.columns)
                    self.arrays[weight.tensor] = values.astype(np.float32)
        self.arrays["a"] = -np.abs(self.arrays["a"])
        self.experts = (rng.normal(size=(2, EXPERTS, 3, INNER, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)

    def tensor(self, name: str) -> Stored:
        return Stored(self.arrays[name].ctypes.data, self.formats.get(name, F32))

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        size = INNER * WIDTH * 4
        return Piece(0, F32), Piece(size, F32), Piece(2 * size, F32)

    def records(self) -> list[np.ndarray]:
        size = 3 * INNER * WIDTH * 4
        starts = [self.experts[layer].ctypes.data for layer in range(2)]
        return [start + np.arange(EXPERTS, dtype=np.uint64) * np.uint64(size) for start in starts]


PROGRAM = make_program()
LAYOUT = StateLayout.of(PROGRAM, 2)
TOKENS = np.random.default_rng(2).integers(0, VOCAB, 100).astype(np.int32)


class Made:
    """An executor with one sequence in slot 1 and pages in reverse order."""

    def __init__(self, weights: MadeWeights | None = None, **options) -> None:
        self.weights = weights or MadeWeights(PROGRAM)
        self.memory = StateMemory.allocate(LAYOUT, (4,), 2)
        self.executor = NativeExecutor(PROGRAM, self.weights, LAYOUT, self.memory, max_rows=100, threads=2, **options)

    def step(self, tokens: np.ndarray = TOKENS, start: int = 0, table: np.ndarray | None = None, best_of: int = 0):
        table = np.array([3, 2, 1, 0], np.int32) if table is None else table
        rows = np.arange(len(tokens), dtype=np.int32)
        segment = Segment(start, len(tokens), (table,), 1, RowKind.PREFILL)
        return self.executor.step(Batch(tokens, (segment,), rows, best_of))

    def state_bytes(self) -> bytes:
        return b"".join(array.tobytes() for array in (*self.memory.pages, self.memory.records))


def test_a_refused_step_has_touched_nothing() -> None:
    made = Made()
    made.step(TOKENS[:70])
    before = made.state_bytes()
    with pytest.raises(RequestError):
        made.step(np.array([1, VOCAB], np.int32), start=70)
    with pytest.raises(ValueError):
        made.step(TOKENS[:2], start=70, table=np.array([3, -1, 1, 0], np.int32))
    assert made.state_bytes() == before
    assert made.step(TOKENS[70:], start=70).logits.tobytes() == Made().step().logits[70:].tobytes()


def test_a_sequence_at_position_0_starts_from_zeroed_state_in_a_used_slot() -> None:
    made = Made()
    first = made.step()
    made.memory.records[:] = 0xFF
    assert made.step().logits.tobytes() == first.logits.tobytes()


@pytest.mark.parametrize("best_of", [1, 7, VOCAB])
def test_the_best_tokens_alone_are_those_of_the_logits(best_of: int) -> None:
    made = Made()
    expected = made.step().logits[:, :best_of].argmax(axis=1)
    assert len(set(expected.tolist())) > 1 or best_of == 1
    for count in (100, 1, 50):  # memory of longer steps is used again
        found = made.step(TOKENS[:count], best_of=best_of)
        assert found.logits.shape == (0, VOCAB)
        assert found.best is not None
        assert found.best.tolist() == expected[:count].tolist()


def test_a_logit_that_is_not_finite_is_told_instead_of_the_best() -> None:
    weights = MadeWeights(PROGRAM)
    weights.arrays["head"][[5, 9]] = np.inf
    best = Made(weights).step(TOKENS[:3], best_of=VOCAB).best
    assert best is not None
    assert best.tolist() == [-6, -6, -6]
    best = Made(weights).step(TOKENS[:3], best_of=5).best
    assert best is not None
    assert min(best.tolist()) >= 0


def test_views_with_strides_mean_the_same() -> None:
    strided = np.repeat(TOKENS, 2)[::2]
    table = np.array([[3, 9], [2, 9], [1, 9], [0, 9]], np.int32)[:, 0]
    assert not strided.flags.c_contiguous
    assert not table.flags.c_contiguous
    expected = Made().step()
    result = Made().step(strided, table=table)
    assert result.logits.tobytes() == expected.logits.tobytes()
    assert result.experts.tobytes() == expected.experts.tobytes()


def test_kept_values_can_be_read_and_change_no_bits() -> None:
    values = [op.out for op in PROGRAM.ops if isinstance(getattr(op, "out", None), Value)]
    made = Made(keep=values)
    logits = made.step().logits
    assert logits.tobytes() == Made().step().logits.tobytes()
    assert np.array_equal(made.executor.trace(values[0]), made.weights.arrays["embedding"][TOKENS])
    x, h = values[0], values[1]
    norm = made.executor.trace(x) / np.sqrt(np.mean(made.executor.trace(x) ** 2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(made.executor.trace(h), norm * made.weights.arrays["norm"], rtol=1e-5)


def test_records_may_move_between_steps() -> None:
    made = Made()
    expected = Made().step(TOKENS).logits[50:]
    made.step(TOKENS[:50])
    made.weights.experts = made.weights.experts.copy()
    made.executor.publish(made.weights.records())
    assert made.step(TOKENS[50:], start=50).logits.tobytes() == expected.tobytes()
    with pytest.raises(ValueError, match="expert layer 0 needs 6 addresses"):
        made.executor.publish([np.ones(5, np.uint64)] * 2)
    with pytest.raises(ValueError, match="expert layer 1 needs 6 addresses"):
        made.executor.publish([made.weights.records()[0], np.zeros(6, np.uint64)])


class Brings:
    """Has the addresses of some records; gives the answers of `parts` to whatever is requested."""

    def __init__(self, weights: MadeWeights, absent: dict[int, list[int]], parts=None) -> None:
        self.addresses = np.array(weights.records())
        self.parts = parts
        self.begun = self.addresses.copy()
        for layer, experts in absent.items():
            self.begun[layer, experts] = 0

    def begin(self):
        return self.begun

    def request(self, layer, decode, prefill):
        self.layer, self.asked = layer, [*decode, *prefill]

    def arrivals(self):
        for part in [self.asked] if self.parts is None else self.parts:
            yield part, self.addresses[self.layer, part].tolist()


def test_a_step_waits_for_records_that_have_no_address() -> None:
    weights = MadeWeights(PROGRAM)
    expected = Made(weights).step()
    stager = Brings(weights, {0: [1, 2], 1: [0, 1, 2, 3, 4, 5]})
    result = Made(weights, stager=stager).step()
    assert result.logits.tobytes() == expected.logits.tobytes()
    assert result.experts.tobytes() == expected.experts.tobytes()
    first = np.isin(expected.experts[0], [1, 2]).sum(-1)
    assert expected.waited.tolist() == [0] * len(TOKENS)
    assert result.waited.tolist() == (first + TOP_K).tolist()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1, 2]], "still awaited"),
        ([[0, 1], [1, 2]], "not awaited"),
        ([[0, 1, 2, 3, 4, 5], [6 - 7]], "not awaited"),
    ],
)
def test_parts_that_are_not_what_a_step_waits_for_are_refused_and_the_plan_stays_usable(parts, message: str) -> None:
    weights = MadeWeights(PROGRAM)
    stager = Brings(weights, {0: [0, 1, 2, 3, 4, 5]}, parts)
    made = Made(weights, stager=stager)
    with pytest.raises(ValueError, match=message):
        made.step()
    stager.parts = None
    assert made.step().logits.tobytes() == Made(weights).step().logits.tobytes()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["embedding", "router0", "router1", "bias", "k", "alpha"])
def test_values_that_are_not_finite_still_choose_different_experts(tensor: str, poison: float) -> None:
    weights = MadeWeights(PROGRAM)
    weights.arrays[tensor].flat[::3] = poison
    result = Made(weights).step()  # would raise for ids that are out of range or double
    assert result.experts.shape == (2, len(TOKENS), TOP_K)


def test_ties_between_experts_go_to_the_lowest_ids_best_first() -> None:
    weights = MadeWeights(PROGRAM)
    weights.arrays["router0"][:] = weights.arrays["router0"][0]
    weights.arrays["router1"][:] = 0.0
    weights.arrays["bias"][:] = [[0.0, 0.5, 0.25, 0.5, 0.25, 0.5]]
    experts = Made(weights).step().experts
    assert (experts[0] == [0, 1]).all()
    assert (experts[1] == [1, 3]).all()


def test_a_thread_that_flushes_denormals_gets_the_same_bits_and_its_mode_back() -> None:
    weights = MadeWeights(PROGRAM)
    weights.arrays["head"] *= np.float32(1e-38)
    expected = Made(weights).step().logits
    assert (np.abs(expected) < np.finfo(np.float32).tiny).any()
    assert torch.set_flush_denormal(True)
    try:
        result = Made(weights).step().logits
        assert torch.tensor([1e-39]).mul(1.0).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert result.tobytes() == expected.tobytes()


def test_a_format_without_arithmetic_is_refused_with_the_name_of_the_tensor() -> None:
    weights = MadeWeights(PROGRAM)
    weights.formats["head"] = FORMATS_BY_NAME["F64"]
    with pytest.raises(UnsupportedError, match="head is F64"):
        Made(weights)


def test_shapes_that_contradict_each_other_are_refused_when_the_plan_is_built() -> None:
    broken = tuple(
        replace(op, weight=replace(op.weight, rows=WIDTH + 1)) if isinstance(op, ops.Linear) else op
        for op in PROGRAM.ops
    )
    with pytest.raises(ValueError, match="linear: the weight is not"):
        NativeExecutor(
            replace(PROGRAM, ops=broken),
            MadeWeights(PROGRAM),
            LAYOUT,
            StateMemory.allocate(LAYOUT, (4,), 2),
            max_rows=4,
            threads=1,
        )


def test_expert_layers_must_agree_on_how_many_experts_a_row_takes() -> None:
    layers = (PROGRAM.expert_layers[0], replace(PROGRAM.expert_layers[1], top_k=3))
    memory = StateMemory.allocate(LAYOUT, (4,), 2)
    with pytest.raises(UnsupportedError, match="different numbers of experts"):
        NativeExecutor(
            replace(PROGRAM, expert_layers=layers), MadeWeights(PROGRAM), LAYOUT, memory, max_rows=4, threads=1
        )


@pytest.mark.parametrize("name", [f.name for f in FORMATS_BY_NAME.values() if f.arithmetic is not None])
@pytest.mark.parametrize("isa", available())
def test_products_of_unaligned_rows_have_the_bits_of_their_definition(isa: str, name: str) -> None:
    format, columns, rows = FORMATS_BY_NAME[name], 9 * 256, 40
    arithmetic = native(isa).arithmetic
    rng = np.random.default_rng(format.id)
    weights = MadeWeights(PROGRAM)
    weights.arrays = {
        "embedding": rng.normal(size=(3, columns)).astype(np.float32),
        "head": rng.integers(0, 256, 1 + rows * format.row_bytes(columns), np.uint8)[1:],
    }
    # Any bytes in every second row; in the others no factor is infinite or NaN.
    table = weights.arrays["head"].reshape(rows, -1)
    table[::2] &= 0xBF
    weights.formats["head"] = format
    weights.records = list
    x = Value("x", columns)
    head = ops.Logits(x, Weight("head", rows, columns))
    program = Program("test", columns, rows, 64, (ops.Embed(Weight("embedding", 3, columns), x), head), *[()] * 5)
    layout = StateLayout.of(program, 2)
    executor = NativeExecutor(
        program, weights, layout, StateMemory.allocate(layout, (), 0), max_rows=3, threads=1, isa=isa
    )
    batch = Batch(np.arange(3, dtype=np.int32), (Segment(0, 3, (), 0, RowKind.PREFILL),), np.array([2, 0], np.int32))
    logits = executor.step(batch).logits

    for result, token in zip(logits, (2, 0), strict=True):
        activation = weights.arrays["embedding"][token]
        if format.arithmetic is Arithmetic.FLOAT:
            expected = [arithmetic.dot32(activation, arithmetic.dequantise_row(format.id, w.copy())) for w in table]
        else:
            form = 32 if format.arithmetic is Arithmetic.INT32 else 256
            expected = [
                arithmetic.product(format.id, w.copy(), *arithmetic.quantise_row(activation, form)) for w in table
            ]
        assert np.isfinite(expected).any()
        assert np.array_equal(result, np.array(expected, np.float32), equal_nan=True)
