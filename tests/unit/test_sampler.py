"""The sampler: fixed order of filters, draws that depend on seed and output index alone, values refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.errors import RequestError
from sparkd.worker.sampler import Sampling, sample

VOCABULARY = 1000


def logits(seed: int, spread: float = 3.0, vocabulary: int = VOCABULARY) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocabulary) * spread).astype(np.float32)


def draws(x: np.ndarray, n: int, **options: float) -> np.ndarray:
    sampling = Sampling(**options)
    return np.array([sample(x, sampling, index) for index in range(n)])


def test_temperature_zero_takes_the_best_token_and_of_equals_the_lowest():
    x = logits(1)
    assert sample(x, Sampling(top_k=3, top_p=0.1, seed=9), 4) == x.argmax()
    x[[17, 40, 900]] = 99.0
    assert sample(x, Sampling(), 0) == 17


def test_equal_logits_are_kept_in_order_of_their_ids():
    x = np.zeros(VOCABULARY, dtype=np.float32)
    assert set(draws(x, 200, temperature=1.0, top_k=3, seed=2)) == {0, 1, 2}
    assert set(draws(x, 200, temperature=1.0, top_p=0.003, seed=2)) == {0, 1, 2}


def test_draws_follow_the_softmax_of_the_logits():
    x = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float64)).astype(np.float32)
    share = np.bincount(draws(x, 20000, temperature=1.0, seed=3), minlength=4) / 20000
    assert share == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.015)
    share = np.bincount(draws(x, 20000, temperature=0.5, seed=3), minlength=4) / 20000
    assert share == pytest.approx(np.array([16, 4, 1, 1]) / 22, abs=0.015)


def test_top_p_judges_the_distribution_before_temperature():
    x = np.log(np.array([0.6, 0.3, 0.1])).astype(np.float32)
    assert set(draws(x, 300, temperature=50.0, top_p=0.85, seed=4)) == {0, 1}
    assert set(draws(x, 300, temperature=50.0, top_p=0.5, seed=4)) == {0}


def test_top_p_counts_among_those_that_top_k_left():
    x = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    # of 0.7, 0.4 is more than half; of 1.0 it is not
    assert set(draws(x, 300, temperature=1.0, top_k=2, top_p=0.5, seed=5)) == {0}
    assert set(draws(x, 300, temperature=1.0, top_p=0.5, seed=5)) == {0, 1}


@given(
    st.integers(0, 2**32),
    st.floats(0.01, 100),
    st.integers(0, 2 * VOCABULARY),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
)
def test_a_draw_is_one_of_the_candidates_that_the_filters_keep(noise, temperature, top_k, top_p, seed):
    x = logits(noise)
    order = np.lexsort((np.arange(VOCABULARY), -x))
    kept = order[:top_k] if top_k else order
    share = np.cumsum(np.exp(x[kept].astype(np.float64) - x[kept[0]]))
    kept = kept[: int(np.searchsorted(share, top_p * share[-1] * (1 + 1e-6))) + 1]
    assert sample(x, Sampling(temperature, top_k, top_p, seed), 0) in kept


def test_a_draw_depends_on_seed_and_output_index_alone():
    x = logits(6)
    sampling = Sampling(1.0, 50, 0.95, 7)
    first = [sample(x, sampling, index) for index in range(20)]
    assert [sample(x, sampling, index) for index in reversed(range(20))] == first[::-1]
    assert [sample(x, Sampling(1.0, 50, 0.95, 8), index) for index in range(20)] != first
    assert len(set(first)) > 1


def test_the_largest_seed_and_index_are_taken():
    assert 0 <= sample(logits(7), Sampling(1.0, 0, 1.0, 2**64 - 1), 2**64 - 1) < VOCABULARY


def test_extreme_logits_and_temperatures_still_choose():
    x = np.array([-3e38, 3e38, 1.0], dtype=np.float32)
    assert sample(x, Sampling(temperature=1.0), 0) == 1
    assert sample(x, Sampling(temperature=1e-40), 0) == 1
    assert sample(x, Sampling(temperature=1e-300), 0) == 1
    assert sample(np.zeros(1, dtype=np.float32), Sampling(temperature=100.0, top_k=5, top_p=0.0), 0) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_the_request_and_name_the_token(value, temperature):
    x = logits(8)
    x[[123, 321]] = value
    with pytest.raises(RequestError, match="token 123 is not finite"):
        sample(x, Sampling(temperature), 0)


@pytest.mark.parametrize(
    "option, value, range_",
    [
        ("temperature", -0.1, "0 to 100"),
        ("temperature", 101, "0 to 100"),
        ("temperature", float("nan"), "0 to 100"),
        ("temperature", "hot", "0 to 100"),
        ("top_k", -1, r"0 to 2\^31 - 1"),
        ("top_k", 2.5, r"0 to 2\^31 - 1"),
        ("top_k", True, r"0 to 2\^31 - 1"),
        ("top_p", 1.01, "0 to 1"),
        ("top_p", -1, "0 to 1"),
        ("seed", -1, r"0 to 2\^64 - 1"),
        ("seed", 2**64, r"0 to 2\^64 - 1"),
        ("seed", None, r"0 to 2\^64 - 1"),
    ],
)
def test_an_impossible_option_is_refused_with_name_value_and_range(option, value, range_):
    with pytest.raises(RequestError, match=f"{option} is {value!r}; .* from {range_}"):
        Sampling(**{option: value})
