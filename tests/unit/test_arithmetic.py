"""docs/arithmetic.md is what the native modules compute, bit for bit, and what exact rationals say."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.gguf.formats import FORMATS, Arithmetic, dequantise
from sparkd.kernels import available, native

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import exact_arithmetic as exact  # noqa: E402
import exact_weights  # noqa: E402
import make_arithmetic_vectors as vectors  # noqa: E402
import make_grids  # noqa: E402

FUNCTIONS = ("exp", "sigmoid", "silu", "softplus")
COMPUTED = [format for format in FORMATS.values() if format.arithmetic is not None]
finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: The exact evaluation takes its time, and more on a busy machine.
patient = settings(deadline=None, max_examples=60)


@pytest.fixture(params=available())
def arithmetic(request: pytest.FixtureRequest) -> ModuleType:
    return native(request.param).arithmetic


def best() -> ModuleType:
    return native().arithmetic


def array(values, dtype=np.float32) -> np.ndarray:
    return np.array(values, dtype=dtype)


def random_number(seed: int, spread: float) -> float:
    """A float32 number with all its bits in use, which a search for simple examples does not come to."""
    return float(np.float32(np.random.default_rng(seed).normal(0, spread)))


def bits(x) -> np.ndarray:
    """Bits of float32 numbers, every NaN the canonical one."""
    x = np.asarray(x, dtype=np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))


def any_floats(seed: int, n: int) -> np.ndarray:
    """Random bit patterns: every exponent, denormals, infinities and NaN."""
    return np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)


# The vectors of the document


def documented(name: str) -> list[tuple[list[str], list[str]]]:
    """Inputs and outputs of every line of a block of vectors."""
    text = vectors.DOC.read_text()
    title = next(line for line in text.splitlines() if line.startswith(f"`{name}") and line[len(name) + 1] in " `")
    block = text.split(f"{title}\n\n```vectors\n")[1].split("```")[0]
    lines = [line.split(" -> ") for line in block.splitlines()]
    assert lines
    return [(left.split(), right.split()) for left, right in lines]


def word(text: str) -> float:
    return exact.from_bits(int(text, 16))


def float64(text: str) -> float:
    return struct.unpack(">d", bytes.fromhex(text))[0]


def words(*values: float) -> list[str]:
    return [f"{exact.bits(float(v)):08x}" for v in values]


def noise(seed: int, n: int) -> np.ndarray:
    return array(vectors.noise(seed, n))


def test_the_documented_vectors_are_those_of_the_exact_evaluation():
    assert vectors.section() in vectors.DOC.read_text()


def test_functions_give_the_documented_bits(arithmetic):
    for (x,), results in documented("functions"):
        assert words(*(getattr(arithmetic, name)(array([word(x)]))[0] for name in FUNCTIONS)) == results, x


def test_conversions_give_the_documented_bits(arithmetic):
    for name in ("f16_to_f32", "bf16_to_f32"):
        for (h,), result in documented(name):
            assert words(*getattr(arithmetic, name)(array([int(h, 16)], np.uint16))) == result
    for (x,), result in documented("f32_to_f16"):
        assert [f"{arithmetic.f32_to_f16(array([word(x)]))[0]:04x}"] == result
    for (x,), result in documented("round_even"):
        assert words(*arithmetic.round_even(array([word(x)]))) == result


def test_sums_give_the_documented_bits(arithmetic):
    for (n, x, w), result in documented("dot32"):
        assert words(arithmetic.dot32(noise(int(x), int(n)), noise(int(w), int(n)))) == result
    for name in ("rms_factor", "l2_factor"):
        for (n, seed, eps), result in documented(name):
            assert words(getattr(arithmetic, name)(noise(int(seed), int(n)), word(eps))) == result


def test_quantised_activations_have_the_documented_bits(arithmetic):
    for (form, seed, factor), (a, q) in documented("quantise"):
        got = arithmetic.quantise_row(noise(int(seed), int(form)) * np.float32(word(factor)), int(form))
        assert (got[0].tobytes().hex(), words(*got[1])) == (q, [a])


def test_products_have_the_documented_bits_for_every_integer_type(arithmetic):
    seen = set()
    for (name, columns, seed), result in documented("product"):
        id_, block, *_ = vectors.TYPES[name]
        row = np.frombuffer(vectors.weight_row(name, int(seed), int(columns)), np.uint8)
        q, a = arithmetic.quantise_row(noise(int(seed) + 1000, int(columns)), block)
        assert words(arithmetic.product(id_, row, q, a)) == result, name
        seen.add(id_)
    assert seen == {format.id for format in COMPUTED if format.arithmetic is not Arithmetic.FLOAT}


def test_products_with_dequantised_blocks_have_the_documented_bits(arithmetic):
    seen = set()
    for (name, columns, seed), result in documented("float_product"):
        row = np.frombuffer(vectors.weight_row(name, int(seed), int(columns)), np.uint8)
        weights = arithmetic.dequantise_row(vectors.FLOAT_TYPES[name][0], row)
        assert words(arithmetic.dot32(noise(int(seed) + 1000, int(columns)), weights)) == result, name
        seen.add(name)
    assert seen == {f.name for f in COMPUTED if f.arithmetic is Arithmetic.FLOAT and f.block > 1}


def test_attention_pages_and_merges_give_the_documented_bits(arithmetic):
    for (positions, seed), result in documented("page"):
        scores = noise(int(seed), int(positions)) * np.float32(8)
        state = (scores.max(), 0.0, np.zeros(2, np.float32))
        for p, score in enumerate(scores):
            state = arithmetic.accumulate(score, state[0], noise(1000 * int(seed) + p, 2), state[1], state[2])
        assert words(state[0], state[1], *state[2]) == result
    for inputs, result in documented("merge"):
        v = [word(w) for w in inputs]
        m, total, o = arithmetic.merge(v[0], v[1], array(v[2:4]), v[4], v[5], array(v[6:8]))
        assert words(m, total, *o) == result


def test_rotary_tables_and_rotations_give_the_documented_bits(arithmetic):
    for (position, inv_freq, magnitude), result in documented("rope"):
        cosine, sine = arithmetic.rope_row(int(position), array([float64(inv_freq)], np.float64), float64(magnitude))
        assert words(cosine[0], sine[0]) == result
    for inputs, result in documented("rotate"):
        assert words(*arithmetic.rotate(*map(word, inputs))) == result


def test_philox_and_the_sampler_give_the_documented_choices(arithmetic):
    for inputs, result in documented("philox"):
        assert [f"{w:08x}" for w in arithmetic.philox(*map(int, inputs))] == result
    for isa in available():
        for (vocabulary, logits_seed, temperature, top_k, top_p, seed), result in documented("sample"):
            logits = noise(int(logits_seed), int(vocabulary)) * np.float32(16)
            options = (word(temperature), int(top_k), float64(top_p))
            ids = [choose(isa, logits, *options, seed=int(seed), index=index) for index in range(6)]
            assert ids == list(map(int, result))


def test_what_changes_and_filters_logits_gives_the_documented_choices():
    def ids_of(listed: str) -> list[int]:
        return [] if listed == "-" else [int(i) for i in listed.split(",")]

    for isa in available():
        for inputs, result in documented("options"):
            vocabulary, logits_seed, temperature, top_k, min_p, *penalties, biases, prompt, output, seed = inputs
            logits = noise(int(logits_seed), int(vocabulary)) * np.float32(16)
            options = (word(temperature), int(top_k), 1.0, float64(min_p), *map(word, penalties))
            bias = [(int(i), word(w)) for i, w in (b.split(":") for b in biases.split(",") if b != "-")]
            history = ids_of(prompt) + ids_of(output)
            for index, token in enumerate(result):
                past = {"bias": bias, "history": history, "prompt": len(ids_of(prompt))}
                made = choose(isa, logits, *options, **past, seed=int(seed), index=index)
                assert made == int(token), inputs


def test_log_probabilities_have_the_documented_bits():
    for isa in available():
        for (vocabulary, seed, token, best), result in documented("logprobs"):
            logits = noise(int(seed), int(vocabulary)) * np.float32(16)
            ids, values = native(isa).logprobs(logits, int(token), int(best))
            assert [f"{i}:{w}" for i, w in zip(ids, words(*values), strict=True)] == result


def choose(isa, logits, temperature, top_k, top_p, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, *,
           bias=(), history=(), prompt=0, seed, index) -> int:  # fmt: skip
    """The native sampler with every option."""
    bias_ids, bias_values = array([i for i, _ in bias], np.int32), array([value for _, value in bias])
    return native(isa).sample(
        logits, temperature, top_k, top_p, min_p, repetition, presence, frequency,
        bias_ids, bias_values, array(history, np.int32), prompt, seed, index,
    )  # fmt: skip


# Functions


def step_of(x: float) -> mpmath.mpf:
    """Distance of neighbouring float32 numbers at x."""
    return mpmath.ldexp(1, max(int(mpmath.floor(mpmath.log(abs(x), 2))), -126) - 23)


@pytest.mark.parametrize(
    "name, truth, low, bound",
    [
        ("exp", mpmath.exp, -87.33, 0.9),
        ("sigmoid", lambda x: 1 / (1 + mpmath.exp(-x)), -87, 2.5),
        ("silu", lambda x: x / (1 + mpmath.exp(-x)), -87, 2.9),
        ("softplus", lambda x: mpmath.log1p(mpmath.exp(x)), -87, 2.8),
    ],
)
def test_functions_are_as_close_to_the_true_ones_as_documented(name, truth, low, bound):
    random = np.random.default_rng(1)
    x = np.concatenate([random.uniform(low, 88, 800), random.normal(0, 2, 800)]).astype(np.float32)
    got = getattr(best(), name)(x)
    with mpmath.workprec(100):
        for a, b in zip(x, got, strict=True):
            expected = truth(mpmath.mpf(float(a)))
            assert abs(mpmath.mpf(float(b)) - expected) <= bound * step_of(expected), a


@given(st.one_of(finite_floats, st.integers(0, 1 << 32).map(lambda seed: random_number(seed, 20))))
@patient
def test_functions_equal_their_exact_evaluation(x):
    assert [words(getattr(best(), name)(array([x]))[0]) for name in FUNCTIONS] == [
        words(getattr(exact, name)(x)) for name in FUNCTIONS
    ]


@given(st.integers(0, 1 << 22), st.floats(1e-9, 1), st.floats(0.5, 2))
@patient
def test_rotary_tables_are_the_rounded_cosine_and_sine(position, inv_freq, magnitude):
    cosine, sine = best().rope_row(position, array([inv_freq], np.float64), magnitude)
    with mpmath.workprec(150):
        angle = mpmath.mpf(position * inv_freq)
        for got, truth in ((cosine[0], mpmath.cos(angle)), (sine[0], mpmath.sin(angle))):
            expected = magnitude * truth
            error = abs(mpmath.mpf(float(got)) - expected)
            assert error <= (0.5 * step_of(expected) * (1 + 1e-5) if expected else 0) + 1e-15
    assert words(cosine[0], sine[0]) == words(*exact.rope(position, inv_freq, magnitude))


def test_every_instruction_set_computes_equal_bits():
    modules = [native(isa).arithmetic for isa in available()]
    x, y, z = (any_floats(seed, 1 << 18) for seed in range(3))
    normal = np.random.default_rng(3).normal(0, 8, 1 << 18).astype(np.float32)

    def everything(m: ModuleType) -> list[np.ndarray]:
        results = [getattr(m, name)(v) for name in FUNCTIONS for v in (x, normal)]
        results += [m.f32_to_f16(x).astype(np.float32), m.fma(x, y, z), m.fma(normal, normal[::-1].copy(), z)]
        results += [array([m.dot32(normal[:n], normal[n : 2 * n])]) for n in range(1, 200)]
        results += [m.rope_row(p, 0.7 ** np.arange(64), 1.3)[0] for p in (0, 1, 77, 131071, 4194304)]
        return [bits(r) for r in results]

    for module in modules[1:]:
        for a, b in zip(everything(modules[0]), everything(module), strict=True):
            np.testing.assert_array_equal(a, b)


# Conversions and sums


def test_every_float16_converts_as_ieee_says(arithmetic):
    h = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(bits(arithmetic.f16_to_f32(h)), bits(h.view(np.float16).astype(np.float32)))
    finite = np.isfinite(h.view(np.float16))
    np.testing.assert_array_equal(arithmetic.f32_to_f16(arithmetic.f16_to_f32(h[finite])), h[finite])


def test_float32_to_float16_rounds_to_even_and_saturates(arithmetic):
    x = np.concatenate([any_floats(4, 1 << 18), np.random.default_rng(4).normal(0, 1e-5, 1 << 16).astype(np.float32)])
    expected = np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(arithmetic.f32_to_f16(x), np.where(np.isnan(x), np.uint16(0x7E00), expected))


@given(st.lists(st.tuples(finite_floats, finite_floats), max_size=70))
@patient
def test_dot32_equals_its_exact_evaluation(pairs):
    x, w = array([p[0] for p in pairs]), array([p[1] for p in pairs])
    assert words(best().dot32(x, w)) == words(exact.dot32(x.tolist(), w.tolist()))


def test_merged_softmaxes_equal_their_exact_evaluation():
    random = np.random.default_rng(5)
    for _ in range(300):
        v = random.normal(0, 1, 6).astype(np.float32).tolist()
        l1, l2 = random.uniform(1, 64, 2).astype(np.float32).tolist()
        m, total, o = best().merge(v[0], l1, array(v[2:4]), v[1], l2, array(v[4:6]))
        expected = exact.merge(v[0], l1, v[2:4], v[1], l2, v[4:6])
        assert words(m, total, *o) == words(expected[0], expected[1], *expected[2])


# Weights


def test_the_table_of_block_formats_is_the_reader_s(arithmetic):
    expected = {(f.id, f.block, f.bytes, f.arithmetic.name) for f in COMPUTED}
    assert set(arithmetic.formats()) == expected


@pytest.mark.parametrize("format", COMPUTED, ids=lambda f: f.name)
def test_dequantised_blocks_are_those_of_the_gguf_package(arithmetic, format):
    every_byte = np.repeat(np.arange(256, dtype=np.uint8), format.bytes)
    random = np.random.default_rng(format.id).integers(0, 256, 1000 * format.bytes, dtype=np.uint8)
    row = np.concatenate([every_byte, random])
    with np.errstate(all="ignore"):
        expected = dequantise(format, row, (1, row.size // format.bytes * format.block))[0]
    np.testing.assert_array_equal(bits(arithmetic.dequantise_row(format.id, row)), bits(expected))


@pytest.mark.parametrize("name", vectors.TYPES)
def test_the_exact_evaluation_unpacks_as_the_gguf_package(name):
    id_, block, size, sub, _ = vectors.TYPES[name]
    row = vectors.weight_row(name, 7, 2 * block)
    expected = dequantise(FORMATS[id_], np.frombuffer(row, np.uint8), (1, 2 * block))[0]
    assert words(*exact_weights.unpack(name, row, size, sub).values()) == words(*expected)


@pytest.mark.parametrize("name", vectors.FLOAT_TYPES)
def test_the_exact_evaluation_decodes_as_the_gguf_package(name):
    id_, block, size, _ = vectors.FLOAT_TYPES[name]
    row = vectors.weight_row(name, 7, 2 * block)
    expected = dequantise(FORMATS[id_], np.frombuffer(row, np.uint8), (1, 2 * block))[0]
    assert words(*exact_weights.float_values(name, row, block, size)) == words(*expected)


def test_the_grids_of_the_kernels_are_those_of_the_gguf_package():
    assert make_grids.HEADER.read_text() == make_grids.header()


@pytest.mark.parametrize("name", vectors.TYPES)
@given(data=st.data())
@settings(patient, max_examples=8)
def test_products_equal_their_exact_evaluation(name, data):
    """Uniform bytes reach the largest sums: all ones, sign bits, zeros."""
    id_, block, size, sub, _ = vectors.TYPES[name]
    blocks = data.draw(st.sampled_from([1, 2, 9]))
    fill = data.draw(st.sampled_from([None, 0x00, 0x7F, 0x80, 0xFF, 0x0F, 0xF0]))
    seed = data.draw(st.integers(0, 1 << 32))
    random = np.random.default_rng(seed)
    row = random.integers(0, 256, blocks * size, dtype=np.uint8)
    if fill is not None:
        row[random.random(row.size) < 0.9] = fill
    q = random.integers(-127, 128, blocks * block).astype(np.int8)
    if data.draw(st.booleans()):
        q[:] = random.choice([-127, 127])
    a = (random.random(blocks) * 2.0 ** data.draw(st.integers(-100, 20))).astype(np.float32)
    w = exact_weights.unpack(name, row.tobytes(), size, sub)
    assert words(best().product(id_, row, q, a)) == words(w.product(q.tolist(), a.tolist()))


def test_integer_products_reach_the_largest_sums_without_overflow(arithmetic):
    row = np.full(210, 0xFF, dtype=np.uint8)
    row[:192] = 0  # q = -32
    row[192:208] = 0x80  # scales -128
    row[208:] = (0x00, 0x3C)  # d = 1
    q = np.full(256, 127, dtype=np.int8)
    assert arithmetic.product(14, row, q, array([1.0])) == 256 * 32 * 127 * 128


# Activations


@given(
    st.sampled_from([32, 256]), st.integers(0, 1 << 32), st.integers(-140, 120), st.sampled_from(["", "zero", "one"])
)
@patient
def test_quantised_activations_equal_their_exact_evaluation(form, seed, exponent, special):
    random = np.random.default_rng(seed)
    x = (random.normal(0, 1, form) * 2.0**exponent).astype(np.float32)
    if special:
        x[1:] = 0
    if special == "zero":
        x[0] = 0
    q, a = best().quantise_row(x, form)
    assert (q.tolist(), words(*a)) == (exact.quantise(x.tolist())[0], words(exact.quantise(x.tolist())[1]))


@pytest.mark.parametrize("form", [32, 256])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_activation_that_is_not_finite_makes_its_block_s_products_nan(arithmetic, form, value):
    x = np.ones(2 * form, dtype=np.float32)
    x[form + 3] = value
    q, a = arithmetic.quantise_row(x, form)
    assert q.tolist() == [127] * form + [0] * form
    assert a[0] == np.float32(1) / np.float32(127) and np.isnan(a[1])
    format = next(f for f in COMPUTED if f.block == form)
    row = np.zeros(2 * format.bytes, dtype=np.uint8)
    assert np.isnan(arithmetic.product(format.id, row, q, a))


def test_largest_activations_quantise_without_overflow(arithmetic):
    largest = np.finfo(np.float32).max
    x = np.linspace(-1, 1, 256).astype(np.float32) * largest
    q, a = arithmetic.quantise_row(x, 256)
    assert (q[0], q[-1]) == (-127, 127) and np.isfinite(a[0])
    np.testing.assert_allclose(q * a[0].astype(np.float64), x, atol=a[0] / 2 * 1.0001)
