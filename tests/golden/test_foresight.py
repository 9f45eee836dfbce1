"""Guesses of what the next layer chooses: they change no bit, and are followed only while more are right than wrong."""

from __future__ import annotations

import pytest
from fake_stager import FakeStager
from test_pause import MODELS, PROMPT, assert_same, decode

from sparkd.executors.foresight import MOST_ROWS, Foresight


class Telling(FakeStager):
    """Also notes what is foreseen."""

    told: list[tuple[int, list[int]]]

    def absent(self, layer: int, experts: list[int]) -> list[int]:
        return [expert for expert in experts if not self.present[layer, expert]]

    def foresee(self, layer: int, experts: list[int]) -> None:
        self.told.append((layer, experts))


@pytest.mark.parametrize("name", MODELS)
def test_guesses_change_no_bit_and_name_what_is_absent_in_the_next_layer(load, machine, name: str) -> None:
    loaded = load(name)
    full = machine(loaded)
    expected = full.prefill(PROMPT[:40])
    decode(full, expected, 12)
    stager = Telling(loaded.weights.arrays, 0.4, 1)
    stager.told = []
    foresight = Foresight(loaded.program, loaded.weights)
    foresight.on = True
    native = machine(loaded, threads=2, stager=stager, foresight=foresight)
    run = native.prefill(PROMPT[:40])
    assert not stager.told, "a prompt needs them all"
    decode(native, run, 12)
    assert_same(run, expected)
    assert stager.told
    layers = len(loaded.program.expert_layers)
    assert all(0 < layer < layers and experts for layer, experts in stager.told)
    assert foresight.wanted(layers - 1, 1) is None
    assert foresight.wanted(0, MOST_ROWS + 1) is None


def test_guesses_are_followed_while_more_are_right_than_wrong(load) -> None:
    loaded = load(MODELS[0])
    foresight = Foresight(loaded.program, loaded.weights)
    assert foresight.status() == {"on": False, "why": "too few guesses yet", "right": 0.0}

    def guess(right: int, times: int) -> None:
        for _ in range(times):
            foresight.begin()
            foresight.guessed(1, [0, 1, 2, 3])
            foresight.missed(1, [*range(right), 7])

    guess(3, 20)
    foresight.begin()
    assert foresight.status() == {"on": True, "why": "75% of what would be read is used", "right": 0.75}
    guess(1, 1000)
    assert not foresight.on
    foresight.guessed(1, [0])
    foresight.missed(2, [0])
    asked = 0
    for _ in range(160):
        foresight.begin()
        asked += foresight.wanted(0, 1) is not None
    assert asked == 10, "it still looks now and then"
