"""Rotary frequencies are the published ones, the same bits everywhere, and each reading of YaRN is what it says."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import ConfigError, ModelFileError, UnsupportedError
from sparkd.gguf.metadata import Metadata
from sparkd.models.rope import Reading, Yarn, derived_magnitude, read_yarn, rope_table

#: Inverse frequencies of 64 rotated dimensions, base 500000, original context 8192, factor 32, betas 64 and 1.
GOLDEN = """
1            0.6636012    0.4403666    0.2922278    0.1939227    0.1286874    8.539710e-2  5.666962e-2
3.429414e-2  2.055985e-2  1.218510e-2  7.118217e-3  4.081406e-3  2.282227e-3  1.231663e-3  6.296490e-4
2.932886e-4  1.119770e-4  1.946164e-5  1.291477e-5  8.570255e-6  5.687232e-6  3.774054e-6  2.504467e-6
1.661967e-6  1.102884e-6  7.318750e-7  4.856731e-7  3.222933e-7  2.138742e-7  1.419272e-7  9.418307e-8
"""
#: (original context, beta_fast): what differs from GOLDEN, as {first pair: frequencies from there on}.
DIFFERENT = {
    (8192, 64.0): {},
    (8192, 32.0): {
        8: "3.760603e-2  2.495541e-2  1.477789e-2  8.623727e-3  4.937742e-3  2.755782e-3  1.483064e-3  7.547715e-4",
        16: "3.486429e-4  1.303436e-4",
    },
    (4096, 64.0): {
        6: "7.787633e-2  4.668804e-2  2.767035e-2  1.616430e-2  9.268201e-3  5.182562e-3  2.796903e-3  1.429829e-3",
        14: "6.660101e-4  2.542813e-4  4.419417e-5  2.932731e-5",
    },
    (4096, 32.0): {
        8: "3.355816e-2  1.958306e-2  1.121280e-2  6.257926e-3  3.367793e-3  1.713962e-3  7.917106e-4  2.959888e-4",
        16: "4.419417e-5  2.932731e-5",
    },
}
YARN = {"type": "yarn", "factor": 32.0, "original_context_length": 8192}


def metadata(**scaling: object) -> Metadata:
    keys = {f"laguna.rope.scaling.{key}": value for key, value in scaling.items()}
    return Metadata({"general.architecture": "laguna", **keys}, "model.gguf")  # type: ignore[dict-item]


def read(reading: Reading = Reading.KEYS, **scaling: object) -> tuple[Yarn | None, list[str]]:
    notes: list[str] = []
    return read_yarn(metadata(**scaling), 262144, reading, notes), notes


@pytest.mark.parametrize(("original", "beta_fast"), DIFFERENT)
def test_yarn_frequencies_are_the_published_ones(original: int, beta_fast: float) -> None:
    expected = [float(x) for x in GOLDEN.split()]
    for first, text in DIFFERENT[original, beta_fast].items():
        values = [float(x) for x in text.split()]
        expected[first : first + len(values)] = values
    table = rope_table(500000.0, 64, Yarn(32.0, original, beta_fast, 1.0, derived_magnitude(32.0)))
    assert table.inv_freq == pytest.approx(expected, rel=1e-6)
    assert table.magnitude == 1.3465735902799727


@pytest.mark.parametrize(
    ("original", "beta_fast", "n_rot", "expected"),
    [
        (8192, 64, 64, (7, 18)),
        (8192, 32, 64, (9, 18)),
        (4096, 64, 64, (5, 16)),
        (4096, 32, 64, (7, 16)),
        (4096, 64, 128, (11, 32)),
        (4096, 32, 128, (14, 32)),
    ],
)
def test_yarn_interpolates_between_the_published_pairs(
    original: int, beta_fast: float, n_rot: int, expected: tuple[int, int]
) -> None:
    assert Yarn(32.0, original, beta_fast, 1.0, 1.0).range(500000.0, n_rot) == expected


def test_plain_frequencies_are_the_published_ones() -> None:
    inv_freq = rope_table(1e7, 64).inv_freq
    assert [inv_freq[i] for i in (0, 1, 2, 15, 31)] == pytest.approx(
        [1.0, 0.6042964, 0.3651741, 5.232991e-4, 1.654817e-7], rel=1e-6
    )
    assert rope_table(1e7, 64).magnitude == 1.0


@settings(deadline=None)
@given(base=st.floats(1.001, 1e12), n_rot=st.integers(1, 64).map(lambda half: 2 * half))
def test_every_frequency_is_the_correctly_rounded_one(base: float, n_rot: int) -> None:
    with mpmath.workdps(60):
        exact = [float(mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / n_rot)) for i in range(n_rot // 2)]
    assert list(rope_table(base, n_rot).inv_freq) == exact


@settings(deadline=None)
@given(
    factor=st.floats(1.0, 1e4),
    original=st.integers(1, 1 << 20),
    beta_fast=st.floats(0.01, 1000.0),
    beta_slow=st.floats(0.01, 1000.0),
)
def test_yarn_only_slows_pairs_down_and_never_below_plain_interpolation(
    factor: float, original: int, beta_fast: float, beta_slow: float
) -> None:
    plain = rope_table(500000.0, 32).inv_freq
    scaled = rope_table(500000.0, 32, Yarn(factor, original, beta_fast, beta_slow, 1.0)).inv_freq
    for a, b in zip(plain, scaled, strict=True):
        assert a / factor * (1 - 1e-15) <= b <= a


def test_magnitudes_are_the_published_ones() -> None:
    assert [derived_magnitude(s) for s in (32.0, 64.0, 128.0)] == [
        1.3465735902799727,
        1.4158883083359672,
        1.4852030263919618,
    ]
    assert derived_magnitude(1.0, 2.0) == 2.0


@pytest.mark.parametrize("scaling", [{}, {"type": "none", "factor": 8.0}, {"type": "linear"}, {"factor": 0.0}])
def test_files_without_scaling_have_none(scaling: dict[str, object]) -> None:
    assert read(**scaling) == (None, [])


def test_the_three_readings_of_a_file_whose_keys_disagree() -> None:
    early = {**YARN, "yarn_beta_fast": 64.0, "yarn_beta_slow": 1.0, "yarn_attn_factor": 1.0}
    derived = derived_magnitude(32.0)
    expected = {Reading.KEYS: (64.0, derived), Reading.LLAMA: (32.0, derived), Reading.FINAL: (64.0, 1.0)}
    for reading, (beta_fast, magnitude) in expected.items():
        yarn, notes = read(reading, **early)
        assert yarn == Yarn(32.0, 8192, beta_fast, 1.0, magnitude)
        assert len(notes) == 2
        assert f"{beta_fast:g} and 1 are used (numerics.yarn = {reading.value})" in notes[0]
        assert f"{magnitude:g} is used (numerics.yarn = {reading.value})" in notes[1]


def test_all_readings_agree_without_a_note_where_the_keys_state_the_conventional_values() -> None:
    # As a writer stores it: the derived magnitude in float32.
    keys = {**YARN, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_attn_factor": 1.3465735912322998}
    results = [read(reading, **keys) for reading in Reading]
    assert all(notes == [] for _, notes in results)
    for yarn, _ in results:
        assert yarn is not None
        assert (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0)
        assert math.isclose(yarn.magnitude, derived_magnitude(32.0), rel_tol=1e-8)


def test_attn_factor_multiplies_the_derived_magnitude_unless_the_final_one_is_given() -> None:
    keys = {**YARN, "attn_factor": 0.5, "yarn_attn_factor": 1.25}
    magnitudes = [yarn.magnitude for yarn, _ in (read(reading, **keys) for reading in Reading) if yarn]
    assert magnitudes == [0.5 * derived_magnitude(32.0), 0.5 * derived_magnitude(32.0), 1.25]


def test_the_original_context_defaults_to_the_trained_one() -> None:
    yarn, _ = read(type="yarn", factor=4.0)
    assert yarn is not None
    assert yarn.original_context == 262144


@pytest.mark.parametrize(
    ("scaling", "error", "word"),
    [
        ({"type": "longrope", "factor": 4.0}, UnsupportedError, "longrope"),
        ({"type": "linear", "factor": 4.0}, UnsupportedError, "linear"),
        ({"factor": 4.0}, UnsupportedError, "linear"),
        ({**YARN, "yarn_ext_factor": 0.0}, UnsupportedError, "yarn_ext_factor"),
        ({**YARN, "factor": 0.5}, ModelFileError, "scaling.factor"),
        ({**YARN, "factor": -1.0}, ModelFileError, "scaling.factor"),
        ({**YARN, "factor": math.inf}, ModelFileError, "scaling.factor"),
        ({**YARN, "original_context_length": 0}, ModelFileError, "original_context_length"),
        ({**YARN, "yarn_beta_fast": 0.0}, ModelFileError, "yarn_beta_fast"),
        ({**YARN, "yarn_beta_slow": math.nan}, ModelFileError, "yarn_beta_slow"),
        ({**YARN, "attn_factor": -1.0}, ModelFileError, "attn_factor"),
        ({**YARN, "type": 3}, ModelFileError, "scaling.type"),
    ],
)
def test_impossible_scaling_is_refused_naming_the_key(
    scaling: dict[str, object], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word) as caught:
        read(**scaling)
    assert str(caught.value).startswith("model.gguf: ")


def test_an_unknown_reading_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"numerics\.yarn: 'yes' is no reading of YaRN; use keys, llama, final"):
        Reading.of("yes")
