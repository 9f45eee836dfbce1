"""Counting routed experts: exact, decode and prefill apart, and impossible ids refused whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.calibration.counts import MAX_TAGS, MAX_WORDS, Decayed, RoutingCounts, RoutingError, busiest_share
from sparkd.calibration.worth import Drift, coverage, worth


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


# ---- decayed counts and tags ----


def test_decayed_counts_are_what_decaying_row_by_row_gives():
    rng = np.random.default_rng(3)
    decayed, table, rows = Decayed(2, 8, half_life=10.0), np.zeros((2, 8)), 0.0
    for _ in range(60):
        ids = np.array([[rng.integers(0, 8), 8 + rng.integers(0, 8)] for _ in range(rng.choice([1, 1, 2, 300]))])
        decayed.add(ids)
        for row in ids:
            table *= 0.5**0.1
            rows = rows * 0.5**0.1 + 1.0
            table.flat[row] += 1.0
    np.testing.assert_allclose(decayed.table, table, rtol=1e-9)
    assert decayed.rows == pytest.approx(rows) == pytest.approx(1 / (1 - 0.5**0.1))


def one(*experts: int) -> np.ndarray:
    return np.array(experts, np.int16)[None, None]


def test_each_tag_is_counted_by_itself_and_prompts_apart_from_output():
    counts = RoutingCounts(1, 8)
    ids = np.array([[[0, 1], [2, 3], [4, 5]]], np.int16)
    numbers = counts.add(ids, np.array([True, True, False]), ["", "coding", "coding"])
    assert numbers.tolist() == [[0, 1], [2, 3]]
    assert set(counts.tags) == {"", "coding"}
    assert counts.tags[""].decode.table[0].round().tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert counts.tags["coding"].decode.table[0].round().tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert counts.tags["coding"].prefill.table[0].round().tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert counts.decode[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_a_long_prompt_changes_nothing_of_what_decode_wants():
    counts = RoutingCounts(1, 8)
    for _ in range(100):
        counts.add(one(0, 1), np.ones(1, bool))
    before = counts.blended().copy()
    counts.add(np.tile(one(6, 7), (1, 20_000, 1)), np.zeros(20_000, bool))
    assert (counts.blended() == before).all()
    assert (counts.recent.table > 0).sum() == 2


def test_what_is_wanted_follows_the_tags_that_are_in_use():
    counts = RoutingCounts(1, 8)

    def decode(tag: str, expert: int, rows: int) -> float:
        """The share of the rows in which `expert` is wanted now."""
        for _ in range(rows):
            counts.add(one(expert, expert + 1), np.ones(1, bool), [tag])
        return float(counts.blended()[0, expert] / counts.blended_rows)

    assert decode("a", 0, 2000) == pytest.approx(1.0)
    assert 0.3 < decode("b", 4, 400) < 0.8
    assert decode("b", 4, 3000) > 0.95
    assert counts.tags["a"].decode.table[0, 0] > 1500, "what a tag has learned is kept while others are in use"
    assert decode("a", 0, 800) > 0.5


def test_a_tag_too_many_takes_the_place_of_the_one_that_is_used_least():
    counts = RoutingCounts(1, 8)
    for number in range(MAX_TAGS):
        for _ in range(2 if number == 3 else 9):
            counts.add(one(0, 1), np.ones(1, bool), [f"t{number}"])
    counts.add(one(0, 1), np.ones(1, bool), ["new"])
    assert len(counts.tags) == MAX_TAGS
    assert "new" in counts.tags and "t3" not in counts.tags


# ---- what it is worth ----


def test_traffic_that_turns_away_from_the_profile_is_said_to_have_drifted():
    rng = np.random.default_rng(5)
    counts = RoutingCounts(2, 32)
    share = 1.0 / np.arange(1, 33) ** 1.3

    def decode(steps: int, shift: int) -> None:
        p = np.roll(share / share.sum(), shift)
        for _ in range(steps):
            ids = np.stack([rng.choice(32, 4, replace=False, p=p) for _ in range(2)])
            counts.add(ids[:, None].astype(np.int16), np.ones(1, bool))

    decode(200, 0)
    assert worth(counts).drift is Drift.UNKNOWN
    decode(1500, 0)
    found = worth(counts)
    assert found.drift is Drift.NONE and found.having
    assert list(found.profile) == sorted(found.profile) and found.profile[0] > 0.6
    decode(700, 16)
    assert worth(counts).drift is Drift.DRIFTED


def test_a_profile_of_traffic_without_locality_is_not_worth_having():
    rng = np.random.default_rng(6)
    counts = RoutingCounts(2, 16)
    for _ in range(1500):
        ids = np.stack([rng.choice(16, 4, replace=False) for _ in range(2)])
        counts.add(ids[:, None].astype(np.int16), np.ones(1, bool))
    found = worth(counts)
    assert not found.having and found.drift is Drift.NONE
    assert found.profile[0] == pytest.approx(0.25, abs=0.04)


def test_coverage_is_the_part_of_the_work_that_the_chosen_records_do():
    choice, work = np.array([[3.0, 1.0], [2.0, 0.0]]), np.array([[1.0, 5.0], [2.0, 2.0]])
    assert coverage(choice, work, 0.5) == pytest.approx(0.3)
    assert coverage(choice, np.zeros((2, 2)), 0.5) == 0.0
