"""Steps that pause for absent records: equal bits wherever the records were, however they came, whoever waits too."""

from __future__ import annotations

import numpy as np
import pytest
from fake_stager import FakeStager

from sparkd.executors.base import RecordRefused
from sparkd.kernels import available

MODELS = ("laguna-tiny-s1-q4_k_m", "qwen35moe-tiny-s1-bf16", "laguna-tinyk-s1-iq4_xs", "qwen35moe-tinyk-s1-q4_k_m")
PROMPT = np.random.default_rng(3).integers(5, 200, 100).tolist()


def assert_same(run, expected) -> None:
    assert run.all_logits.tobytes() == expected.all_logits.tobytes()
    assert run.all_experts.tobytes() == expected.all_experts.tobytes()


def decode(native, run, count: int) -> None:
    for token in PROMPT[:count]:
        native.step((run, [token]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("residency", [0.0, 0.25, 0.7])
def test_output_is_identical_at_every_residency(load, machine, name: str, residency: float) -> None:
    loaded = load(name)
    full = machine(loaded, threads=2)
    expected = full.prefill(PROMPT)
    decode(full, expected, 8)
    for number, isa in enumerate(available()):
        stager = FakeStager(loaded.weights.arrays, residency, number)
        native = machine(loaded, threads=1 + number % 2, isa=isa, stager=stager)
        run = native.prefill(PROMPT, 37)
        decode(native, run, 8)
        assert_same(run, expected)
        assert stager.parts > 0


@pytest.mark.parametrize("name", MODELS)
def test_a_chunk_beside_those_who_decode_asks_for_each_record_once_and_for_decode_first(
    load, machine, name: str
) -> None:
    loaded = load(name)
    alone = machine(loaded)
    prompts = [PROMPT[:40], PROMPT[40:41], PROMPT[30:95]]
    expected = []
    for prompt in prompts:
        run = alone.prefill(prompt)
        decode(alone, run, 6)
        expected.append(run)
    native = machine(loaded, threads=2, stager=FakeStager(loaded.weights.arrays, 0.4))
    a, b, c = native.start(), native.start(), native.start()
    native.step((a, prompts[0]))
    native.step((a, PROMPT[:1]), (b, prompts[1]))
    native.step((a, PROMPT[1:2]), (b, PROMPT[:1]), (c, prompts[2][:33]))
    native.step((a, PROMPT[2:3]), (b, PROMPT[1:2]), (c, prompts[2][33:]))
    for token in range(3, 6):
        native.step((a, PROMPT[token : token + 1]), (b, PROMPT[token - 1 : token]))
    native.step((b, PROMPT[5:6]))
    decode(native, c, 6)
    for run, other in zip((a, b, c), expected, strict=True):
        assert_same(run, other)


def test_a_record_that_cannot_be_had_ends_the_step_naming_the_rows_that_need_it_and_the_next_step_works(
    load, machine
) -> None:
    loaded = load(MODELS[0])
    expected = machine(loaded).prefill(PROMPT)
    stager = FakeStager(loaded.weights.arrays, 0.0)
    native = machine(loaded, stager=stager)
    layer, expert = 1, int(expected.all_experts[1, 10, 0])
    stager.refuse = layer, expert
    run = native.start()
    with pytest.raises(RecordRefused, match="the disk is broken") as caught:
        native.step((run, PROMPT))
    assert caught.value.rows == tuple(np.flatnonzero((expected.all_experts[1] == expert).any(-1)).tolist())
    stager.refuse = None
    native.step((run, PROMPT))
    assert_same(run, expected)
