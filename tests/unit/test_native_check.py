"""What a step refuses before it touches anything, and what is checked of the experts it chose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparkd.errors import RequestError
from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.check import check_batch, check_experts
from sparkd.graph.program import ConvState, KvCache, Program
from sparkd.graph.state import StateLayout
from sparkd.kernels import available, native

PROGRAM = Program(
    "test", 8, 50, 400, (), (KvCache(0, 1, 4, 0), KvCache(1, 1, 4, 64)), (ConvState(2, 3, 8),), (), (), ()
)
LAYOUT = StateLayout.of(PROGRAM, 2)
PAGES = (8, 8)


def table(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def segment(start: int = 0, length: int = 3, full=(0,), window=(0,), state: int = 0) -> Segment:
    return Segment(start, length, (table(*full), table(*window)), state, RowKind.PREFILL)


def batch(*segments: Segment, tokens=None, logits=(0,)) -> Batch:
    count = sum(s.length for s in segments)
    ids = np.arange(count) % 50 if tokens is None else np.array(tokens)
    return Batch(ids.astype(np.int32), segments, np.array(logits, np.int32))


def check(b: Batch, max_rows: int = 300) -> None:
    check_batch(b, PROGRAM, LAYOUT, PAGES, 4, max_rows)


def test_good_batches_pass() -> None:
    check(batch(segment()))
    check(batch(segment(), segment(state=1, full=(1,), window=(1,)), logits=(5, 0)))
    check(batch(segment(), logits=()))
    # The pages behind the window were given back: of positions 130 to 132 the window sees 67 and later.
    check(batch(segment(130, 3, full=(3, 1, 2), window=(-1, 4, 5))))
    check(batch(segment(0, 200, full=(0, 1, 2, 3), window=(4, 5, 6, 7))))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (batch(), "a step takes 1 to 300 rows, not 0"),
        (batch(segment(0, 301, full=range(5), window=range(5))), "1 to 300 rows, not 301"),
        (replace(batch(segment()), tokens=np.zeros(4, np.int32)), "do not cover 4 rows"),
        (batch(segment(), segment(length=0)), "do not cover"),
        (batch(segment(), logits=(3,)), "logits of rows"),
        (batch(segment(), logits=(-1,)), "logits of rows"),
        (batch(segment(start=-1)), "outside the context"),
        (batch(segment(399, 2, full=range(7), window=range(7))), "positions 399 to 400 lie outside the context of 400"),
        (batch(segment(state=4)), "state slot 4"),
        (batch(segment(state=-1)), "state slot -1"),
        (batch(replace(segment(), pages=(table(0),))), "1 page tables for 2"),
        (batch(segment(62, 3)), "need logical pages 0 to 1"),
        (batch(segment(130, 3, full=(3, -1, 2), window=(-1, 4, 5))), "need logical pages 0 to 2"),
        (batch(segment(130, 3, full=(3, 1, 2), window=(-1, -1, 5))), "need logical pages 1 to 2"),
        (batch(segment(full=(8,))), "among 8 physical ones"),
        (batch(segment(), segment(full=(1,), window=(1,))), "in the batch twice"),
        (batch(segment(), segment(state=1, window=(1,))), "two places of the batch write page 0 of group 0"),
        (batch(segment(0, 100, full=(1, 1), window=(0, 1))), "write page 1 of group 0"),
    ],
)
def test_what_a_caller_cannot_mean_is_a_value_error(bad: Batch, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(bad)


@pytest.mark.parametrize("token", [-1, 50, 2**31 - 1])
def test_a_token_outside_the_vocabulary_fails_its_request(token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token} is outside the vocabulary of 50"):
        check(batch(segment(), tokens=[1, token, 2]))


def test_sequences_may_share_pages_that_none_of_them_writes() -> None:
    first = segment(64, 3, full=(0, 1), window=(0, 1))
    second = segment(64, 3, full=(0, 2), window=(0, 2), state=1)
    check(batch(first, second))


@pytest.mark.parametrize("rows", [2, 5, 17])
def test_expert_ids_are_checked_in_any_memory_order(rows: int) -> None:
    rng = np.random.default_rng(rows)
    ids = np.stack([[rng.permutation(16)[:4] for _ in range(rows)] for _ in range(3)]).astype(np.int16)
    strided = np.empty((rows, 3, 8), np.int16).transpose(1, 0, 2)[:, :, ::2]
    strided[:] = ids
    for good in (ids, strided):
        check_experts(good, (16, 16, 16))
    strided[1, -1, 0] = strided[1, -1, 3]
    with pytest.raises(ValueError, match="expert layer 1 chose one expert twice"):
        check_experts(strided, (16, 16, 16))
    for outside in (16, -1):
        ids[2, 0, 1] = outside
        with pytest.raises(ValueError, match="expert layer 2 chose an expert outside 0 to 15"):
            check_experts(ids, (16, 16, 16))


@pytest.mark.parametrize("isa", available())
def test_the_plan_checks_expert_ids_before_it_uses_them(isa: str) -> None:
    check_choice = native(isa).arithmetic.check_choice
    check_choice(np.array([3, 0, 15, 1, 2, 3], np.int32), 3, 16, 4)
    check_choice(np.empty(0, np.int32), 3, 16, 4)
    with pytest.raises(RuntimeError, match="expert layer 4 chose one expert twice"):
        check_choice(np.array([3, 0, 15, 1, 2, 1], np.int32), 3, 16, 4)
    for outside in (16, -1):
        with pytest.raises(RuntimeError, match="expert layer 4 chose an expert outside 0 to 15"):
            check_choice(np.array([3, 0, 15, 1, 2, outside], np.int32), 3, 16, 4)
