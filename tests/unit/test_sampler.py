"""The sampler: fixed order of filters, choices that depend on what is given alone, values refused by name."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import RequestError
from sparkd.ipc.messages import Bias, Sampling
from sparkd.worker.limits import MAX_BIASES, MAX_LOGPROBS, check_logprobs, check_sampling
from sparkd.worker.sampler import choice, sample

VOCABULARY = 1000


def logits(seed: int, spread: float = 3.0, vocabulary: int = VOCABULARY) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocabulary) * spread).astype(np.float32)


def draws(x: np.ndarray, n: int, **options: Any) -> np.ndarray:
    sampling = Sampling(**options)
    return np.array([sample(x, sampling, index) for index in range(n)])


def shares(x: np.ndarray, count: int = 20000, **options: Any) -> np.ndarray:
    return np.bincount(draws(x, count, temperature=1.0, seed=3, **options), minlength=len(x)) / count


def test_temperature_zero_takes_the_best_token_and_of_equals_the_lowest():
    x = logits(1)
    assert sample(x, Sampling(top_k=3, top_p=0.1, min_p=0.5, seed=9), 4) == x.argmax()
    x[[17, 40, 900]] = 99.0
    assert sample(x, Sampling(), 0) == 17


def test_equal_logits_are_kept_in_order_of_their_ids():
    x = np.zeros(VOCABULARY, dtype=np.float32)
    assert set(draws(x, 200, temperature=1.0, top_k=3, seed=2)) == {0, 1, 2}
    assert set(draws(x, 200, temperature=1.0, top_p=0.003, seed=2)) == {0, 1, 2}


def test_draws_follow_the_softmax_of_the_logits():
    x = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float64)).astype(np.float32)
    assert shares(x) == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.015)
    share = np.bincount(draws(x, 20000, temperature=0.5, seed=3), minlength=4) / 20000
    assert share == pytest.approx(np.array([16, 4, 1, 1]) / 22, abs=0.015)


def test_filters_judge_the_distribution_before_temperature():
    x = np.log(np.array([0.6, 0.3, 0.1])).astype(np.float32)
    assert set(draws(x, 300, temperature=50.0, top_p=0.85, seed=4)) == {0, 1}
    assert set(draws(x, 300, temperature=50.0, top_p=0.5, seed=4)) == {0}
    assert set(draws(x, 300, temperature=50.0, min_p=0.4, seed=4)) == {0, 1}


def test_top_p_counts_among_those_that_top_k_left():
    x = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    # of 0.7, 0.4 is more than half; of 1.0 it is not
    assert set(draws(x, 300, temperature=1.0, top_k=2, top_p=0.5, seed=5)) == {0}
    assert set(draws(x, 300, temperature=1.0, top_p=0.5, seed=5)) == {0, 1}


def test_min_p_is_measured_against_the_best_and_always_leaves_it():
    x = np.log(np.array([0.5, 0.26, 0.24])).astype(np.float32)
    assert set(draws(x, 300, temperature=1.0, min_p=0.5, seed=6)) == {0, 1}
    assert set(draws(x, 300, temperature=1.0, min_p=1.0, seed=6)) == {0}


def test_a_bias_moves_a_token_and_a_large_one_decides():
    x = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(np.float32)
    assert shares(x, logit_bias=[Bias(2, float(np.log(2)))]) == pytest.approx(np.array([4, 2, 2, 1]) / 9, abs=0.015)
    assert sample(x, Sampling(logit_bias=[Bias(3, 100.0)]), 0) == 3
    assert 0 not in draws(x, 300, temperature=1.0, logit_bias=[Bias(0, -100.0)], seed=1)


def test_repetition_is_penalised_over_prompt_and_output_the_others_over_the_output_alone():
    x = np.array([4.0, 3.0, 2.0, -1.0], dtype=np.float32)
    prompt, output = [0], [1, 1, 1]
    history = array("i", prompt + output)

    def best(**options: float) -> int:
        return sample(x, Sampling(**options), 0, history, len(prompt))

    assert best(repetition_penalty=3.0) == 2
    assert best(presence_penalty=10.0, frequency_penalty=10.0) == 0
    assert sample(x, Sampling(presence_penalty=2.5), 0, array("i", [0]), 0) == 1
    assert sample(x, Sampling(frequency_penalty=0.6), 0, array("i", [0, 0]), 0) == 1
    assert sample(x, Sampling(frequency_penalty=0.4), 0, array("i", [0, 0]), 0) == 0
    # a negative logit is multiplied: a penalty never makes a token more likely
    assert sample(-x, Sampling(repetition_penalty=5.0), 0, array("i", [3]), 1) == 3
    assert sample(np.array([-1.0, -1.5], np.float32), Sampling(repetition_penalty=2.0), 0, array("i", [0]), 1) == 1


def test_ids_of_the_prompt_beyond_the_vocabulary_are_passed_over():
    x = logits(2)
    assert sample(x, Sampling(repetition_penalty=2.0), 0, array("i", [VOCABULARY, 1 << 30]), 2) == x.argmax()


def reference(x: np.ndarray, s: Sampling, history: list[int], prompt: int) -> np.ndarray:
    """Probabilities of all tokens: docs/arithmetic.md in plain float64, without its roundings."""
    y = x.astype(np.float64)
    for b in s.logit_bias:
        y[b.token] += b.bias
    for token in set(history):
        y[token] = y[token] / s.repetition_penalty if y[token] > 0 else y[token] * s.repetition_penalty
    for token in set(history[prompt:]):
        y[token] -= history[prompt:].count(token) * s.frequency_penalty + s.presence_penalty
    order = np.lexsort((np.arange(len(y)), -y))
    p = np.exp(y[order] - y.max())
    keep = np.arange(len(y)) < (s.top_k or len(y))
    before = np.cumsum(p * keep) - p * keep
    keep &= (before < s.top_p * (p * keep).sum()) | (np.arange(len(y)) == 0)
    keep &= p >= s.min_p
    kept = np.zeros(len(y))
    kept[order] = np.exp((y[order] - y.max()) / s.temperature) * keep
    return kept / kept.sum()


OPTIONS = st.builds(
    Sampling,
    temperature=st.floats(0.3, 3),
    top_k=st.sampled_from([0, 3, 10]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    logit_bias=st.lists(st.builds(Bias, st.integers(0, 15), st.floats(-5, 5)), max_size=3, unique_by=lambda b: b.token),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), OPTIONS, st.lists(st.integers(0, 15), max_size=12), st.integers(0, 12))
def test_draws_follow_an_independent_evaluation_of_all_options_together(noise, sampling, history, prompt):
    x = logits(noise, 2.0, vocabulary=16)
    prompt = min(prompt, len(history))
    expected = reference(x, sampling, history, prompt)
    ids = array("i", history)
    drawn = np.array([sample(x, sampling, index, ids, prompt) for index in range(1500)])
    share = np.bincount(drawn, minlength=16) / len(drawn)
    # a candidate that lies within rounding of a filter's edge may fall on the other side of it
    assert share == pytest.approx(expected, abs=0.08)
    greedy = dataclasses.replace(sampling, temperature=0.0)
    best = sample(x, greedy, 0, ids, prompt)
    assert expected[best] >= expected.max() - 1e-6


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


def test_extreme_logits_and_options_still_choose():
    x = np.array([-3e38, 3e38, 1.0], dtype=np.float32)
    assert sample(x, Sampling(temperature=1.0), 0) == 1
    assert sample(x, Sampling(temperature=1e-40), 0) == 1
    assert sample(x, Sampling(temperature=1e-300), 0) == 1
    assert sample(np.zeros(1, dtype=np.float32), Sampling(temperature=100.0, top_k=5, top_p=0.0), 0) == 0
    everything = Sampling(1.0, 0, 1.0, 1, 0.0, 10.0, -10.0, -10.0, [Bias(0, -100.0), Bias(1, 100.0)])
    assert sample(x, everything, 0, array("i", [0, 1, 1]), 1) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_the_request_and_name_the_token(value, temperature):
    x = logits(8)
    x[[123, 321]] = value
    with pytest.raises(RequestError, match="token 123 is not finite"):
        sample(x, Sampling(temperature), 0)
    with pytest.raises(RequestError, match="token 123 is not finite"):
        sample(x, Sampling(temperature, logit_bias=[Bias(123, -100.0)]), 0)


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 300])
def test_the_first_of_the_best_is_found_wherever_it_lies_and_so_is_what_is_not_finite(vocabulary):
    for place in range(vocabulary):
        x = logits(9, vocabulary=vocabulary)
        x[place::3] = 50.0
        assert sample(x, Sampling(), 0) == place
        x[place:] = np.nan
        with pytest.raises(RequestError, match=f"token {place} is not finite"):
            sample(x, Sampling(), 0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0.1, 30), st.integers(0, MAX_LOGPROBS), st.data())
def test_log_probabilities_are_those_of_the_softmax_best_first(noise, vocabulary, spread, best, data):
    x = logits(noise, spread, vocabulary)
    token = data.draw(st.integers(0, vocabulary - 1))
    expected = x.astype(np.float64) - x.max() - np.log(np.exp(x.astype(np.float64) - x.max()).sum())
    made = choice(x, token, best)
    assert made.logprob == pytest.approx(expected[token], rel=1e-5, abs=1e-5)
    order = np.lexsort((np.arange(vocabulary), -x))[:best]
    assert [entry.token for entry in made.best] == order.tolist()
    assert [entry.logprob for entry in made.best] == pytest.approx(expected[order], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "option, value, range_",
    [
        ("temperature", -0.1, "0 to 100"),
        ("temperature", 101.0, "0 to 100"),
        ("temperature", float("nan"), "0 to 100"),
        ("top_k", -1, r"0 to 2\^31 - 1"),
        ("top_p", 1.01, "0 to 1"),
        ("top_p", -1.0, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("min_p", float("nan"), "0 to 1"),
        ("repetition_penalty", 0.0, "0.1 to 10"),
        ("repetition_penalty", float("inf"), "0.1 to 10"),
        ("presence_penalty", -10.5, "-10 to 10"),
        ("frequency_penalty", 11.0, "-10 to 10"),
        ("seed", -1, r"0 to 2\^64 - 1"),
        ("seed", 2**64, r"0 to 2\^64 - 1"),
    ],
)
def test_an_impossible_option_is_refused_with_name_value_and_range(option, value, range_):
    with pytest.raises(RequestError, match=f"{option} is {value!r}; .* from {range_}"):
        check_sampling(Sampling(**{option: value}), VOCABULARY)


@pytest.mark.parametrize(
    "bias, said",
    [
        ([Bias(VOCABULARY, 1.0)], f"token {VOCABULARY} is not in the vocabulary; ids are 0 to {VOCABULARY - 1}"),
        ([Bias(-1, 1.0)], "token -1"),
        ([Bias(3, 101.0)], "logit_bias of token 3 is 101.0; give a number from -100 to 100"),
        ([Bias(3, float("nan"))], "logit_bias of token 3 is nan"),
        ([Bias(3, 1.0), Bias(3, 2.0)], "token 3 twice"),
        ([Bias(i, 1.0) for i in range(MAX_BIASES + 1)], f"{MAX_BIASES + 1} tokens; name at most {MAX_BIASES}"),
    ],
)
def test_an_impossible_bias_is_refused_by_name(bias, said):
    with pytest.raises(RequestError, match=said):
        check_sampling(Sampling(logit_bias=bias), 10_000 if len(bias) > 2 else VOCABULARY)


def test_more_log_probabilities_than_the_limit_are_refused_with_it():
    check_logprobs(MAX_LOGPROBS)
    with pytest.raises(RequestError, match=f"logprobs is {MAX_LOGPROBS + 1}; .* 0 to {MAX_LOGPROBS}"):
        check_logprobs(MAX_LOGPROBS + 1)
