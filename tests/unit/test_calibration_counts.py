"""Counting routed experts: exact, decode and prefill apart, and impossible ids refused whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.calibration.counts import MAX_WORDS, RoutingCounts, RoutingError, busiest_share


def _step(rng: np.random.Generator, layers: int, rows: int, experts: int, top_k: int):
    ids = rng.permuted(np.tile(np.arange(experts, dtype=np.int16), (layers, rows, 1)), axis=2)[..., :top_k]
    return ids, rng.random(rows) < 0.5


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 9), st.integers(1, 8))
def test_counts_are_what_counting_one_by_one_gives(seed, layers, rows, experts):
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, experts + 1))
    counts = RoutingCounts(layers, experts)
    expected = {True: np.zeros((layers, experts), int), False: np.zeros((layers, experts), int)}
    total = {True: 0, False: 0}
    for _ in range(3):
        ids, is_decode = _step(rng, layers, rows, experts, top_k)
        counts.add(ids, is_decode)
        for row, decode in enumerate(is_decode.tolist()):
            total[decode] += 1
            for layer in range(layers):
                for expert in ids[layer, row]:
                    expected[decode][layer, expert] += 1
    assert (counts.decode == expected[True]).all()
    assert (counts.prefill == expected[False]).all()
    assert (counts.decode_rows, counts.prefill_rows) == (total[True], total[False])


def test_ids_that_lie_anyhow_in_memory_are_counted_right():
    ids = np.arange(2 * 17 * 8, dtype=np.int16).reshape(8, 17, 2).transpose(2, 1, 0) % 300
    dense, loose = RoutingCounts(2, 300), RoutingCounts(2, 300)
    loose.add(ids, np.ones(17, bool))
    dense.add(np.ascontiguousarray(ids), np.ones(17, bool))
    assert not ids.flags.c_contiguous
    assert (dense.decode == loose.decode).all()
    assert dense.decode.sum() == ids.size


@pytest.mark.parametrize(
    ("ids", "rows", "said"),
    [
        ([[[0, 4]]], 1, "expert ids from 0 to 4, the model has 4"),
        ([[[-1, 0]]], 1, "expert ids from -1"),
        ([[[2, 1], [3, 3]]], 2, "names an expert twice"),
        ([[[0, 1]], [[0, 1]]], 1, "do not fit 1 layers"),
        ([[[0, 1]]], 2, "do not fit"),
        ([[0, 1]], 1, "do not fit"),
    ],
)
def test_impossible_ids_are_refused_and_nothing_is_counted(ids, rows, said):
    counts = RoutingCounts(1, 4)
    with pytest.raises(RoutingError, match=said):
        counts.add(np.array(ids, np.int16), np.ones(rows, bool))
    assert counts.decode.sum() == counts.prefill.sum() == counts.decode_rows == 0


@pytest.mark.parametrize(("layers", "experts"), [(0, 4), (4, 0), (-1, -1), (MAX_WORDS, 2)])
def test_a_model_of_impossible_size_is_refused(layers, experts):
    with pytest.raises(RoutingError):
        RoutingCounts(layers, experts)


def test_the_busiest_share_is_that_of_the_most_used_quarter():
    counts = np.array([[1, 1, 1, 5, 0, 0, 0, 2], [0] * 8, [3] * 8], np.uint64)
    assert busiest_share(counts) == [0.7, 0.0, 0.25]
