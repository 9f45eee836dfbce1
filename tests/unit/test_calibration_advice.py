"""What a tier is told: shadows that count as the tier would, rules that follow the traffic, hot sets worth a copy."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.calibration.adviser import PAUSE, Adviser, Tier
from sparkd.calibration.counts import RoutingCounts
from sparkd.calibration.shadow import FIRST, LRU, RULES, STATIC, WARM, Rule, Shadow
from sparkd.calibration.tuner import MEMORY, Tuner, top
from sparkd.residency.commands import Copy
from sparkd.residency.leases import Use
from sparkd.residency.placement import Placement, choose_hot
from sparkd.residency.slabs import LayerSize, SlabSize
from sparkd.residency.slots import Record
from sparkd.residency.transfers import Residency

LAYERS, EXPERTS = 4, 32
SIZES = (LayerSize(0, EXPERTS),) * LAYERS


def tier(slots: int = 48) -> Tier:
    return Tier("host", SIZES, (1000,), (slots,), (0,))


def heat_of(hot: dict[int, float]) -> np.ndarray:
    heat = np.zeros((LAYERS, EXPERTS))
    for number, uses in hot.items():
        heat.flat[number] = uses
    return heat


# ---- shadows ----


def test_the_shadow_of_lru_finds_what_lru_finds():
    rng = random.Random(3)
    shadow, plain = Shadow([0] * 50, [8], LRU), OrderedDict()
    for _ in range(3000):
        record = int(rng.gauss(25, 8)) % 50
        assert shadow.step([record]) == (record in plain)
        plain[record] = None
        plain.move_to_end(record)
        if len(plain) > 8:
            plain.popitem(last=False)


def test_what_is_pinned_stays_and_each_slab_has_its_own_room():
    shadow = Shadow([0] * 10 + [1] * 10, [4, 3], Rule("half", 0.5, 64.0))
    assert shadow.pins == [2, 2]
    assert shadow.pin([0, 1, 10]) == 3
    for once in range(2, 10):
        shadow.step([once, once + 10])
    assert shadow.step([0, 1, 10]) == 3
    assert shadow.step([8, 9, 18, 19]) == 4, "the last two of each slab"
    assert shadow.step([7, 17]) == 0
    assert shadow.pin([9, 19, 11]) == 1, "what was in the ring is not brought again"
    assert shadow.step([0, 1]) == 2, "what is pinned no more is in the ring"


def test_a_shadow_finds_what_the_tier_it_stands_for_finds():
    rng = random.Random(8)
    size = SlabSize(13, 1)
    engine = Residency((LayerSize(0, 40),), [size])
    engine.place(Placement(1, [[]], 1.0, 16.0))
    shadow = Shadow([0] * 40, [12], Rule("decay 16", 0.0, 16.0))
    engine_hits = shadow_hits = 0
    for _ in range(1000):
        step = list(dict.fromkeys(int(rng.paretovariate(0.8)) % 40 for _ in range(4)))
        shadow_hits += shadow.step(step)
        missed = engine.used(0, [Record(0, number) for number in step], Use.DECODE)
        engine_hits += len(step) - len(missed)
        _carry_out(engine, engine.admit(missed))
    assert abs(engine_hits - shadow_hits) <= 0.01 * engine_hits


def _carry_out(engine: Residency, commands) -> None:
    waiting = list(commands)
    while waiting:
        command = waiting.pop(0)
        if isinstance(command, Copy):
            waiting += engine.copied(command) + engine.publish()
        waiting += engine.observe([])


# ---- the choice of a rule ----


def play(tuner: Tuner, steps: int, draw) -> None:
    for _ in range(steps):
        tuner.step(np.unique(draw()))


def test_without_evidence_nothing_changes():
    tuner = Tuner(SIZES, [48])
    assert tuner.rates() == {}
    play(tuner, 100, lambda: np.arange(8))
    assert tuner.better(FIRST) is FIRST


def test_traffic_that_never_changes_is_served_by_long_memory():
    rng = np.random.default_rng(1)
    share = 1.0 / np.arange(1, 129)
    share /= share.sum()
    tuner = Tuner(SIZES, [48])
    play(tuner, 1500, lambda: rng.choice(128, 8, replace=False, p=share))
    rule = tuner.better(LRU)
    rates = tuner.rates()
    assert rates[rule] == max(rate for other, rate in rates.items() if other.pinned < 1.0)
    assert rates[rule] > rates[LRU] + 0.03
    assert rule.half_life > 64.0


def test_traffic_without_locality_gives_no_reason_to_change():
    rng = np.random.default_rng(1)
    tuner = Tuner(SIZES, [48])
    play(tuner, 1500, lambda: rng.choice(128, 8, replace=False))
    assert max(tuner.rates().values()) - tuner.rates()[LRU] < 0.03
    assert abs(tuner.rates()[LRU] - 48 / 128) < 0.05


def test_a_sample_of_the_records_tells_the_same_as_all():
    rng = np.random.default_rng(2)
    layers = (LayerSize(0, 128),) * 8
    share = 1.0 / np.arange(1, 1025) ** 0.7
    share = rng.permutation(share / share.sum())
    whole, part = Tuner(layers, [400], sample=1024), Tuner(layers, [400], sample=512)
    for _ in range(600):
        step = np.sort(rng.choice(1024, 32, replace=False, p=share))
        whole.step(step)
        part.step(step)
    for rule in RULES:
        if not rule.pinned:
            assert part.rates()[rule] == pytest.approx(whole.rates()[rule], abs=0.05)


def test_the_rates_are_those_of_late():
    tuner = Tuner(SIZES, [8])
    play(tuner, 500, lambda: np.arange(8))
    assert tuner.rates()[LRU] > 0.95
    turn = iter(range(10**6))
    play(tuner, int(3.4 * MEMORY), lambda: (np.arange(8) + 8 * next(turn)) % 128)
    assert tuner.rates()[LRU] < 0.15


# ---- the hot set ----


def test_the_hot_set_has_the_most_uses_per_byte_over_all_layers_and_the_floor_of_each():
    layers = (LayerSize(0, 4), LayerSize(1, 4), LayerSize(0, 3))
    heat = [[9.0, 8.0, 7.0, 0.0], [20.0, 16.0, 2.0, 0.0], [0.5, 0.1, 0.0, 99.0]]
    empty: list[list[int]] = [[], [], []]
    assert choose_hot(heat, layers, (10, 20), (4, 1), empty) == [[0, 1, 2], [0], [0]]
    assert choose_hot(heat, layers, (10, 20), (4, 4), empty, floor=0, budget=50) == [[0, 1, 2], [0], []]
    assert choose_hot(heat, layers, (10, 20), (0, 0), empty) == empty
    assert choose_hot(heat, layers, (10, 20), (9, 9), empty) == [[0, 1, 2], [0, 1, 2], [0, 1]]


def test_a_swap_has_to_pay():
    layers = (LayerSize(0, 4),)
    assert choose_hot([[100.0, 105.0, 0.0, 0.0]], layers, (1,), (1,), [[0]]) == [[0]]
    assert choose_hot([[100.0, 112.0, 0.0, 0.0]], layers, (1,), (1,), [[0]]) == [[1]]
    assert choose_hot([[0.0, 0.5, 0.0, 0.0]], layers, (1,), (1,), [[0]]) == [[1]], "what is used no more goes"


@given(st.data())
def test_a_hot_set_fits_and_is_a_placement_that_the_tier_takes(data):
    slabs = data.draw(st.integers(1, 3))
    layers = [
        LayerSize(data.draw(st.integers(0, slabs - 1)), data.draw(st.integers(1, 6)))
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    heat = [[data.draw(st.floats(0, 100)) for _ in range(6)] for _ in layers]
    present = [data.draw(st.lists(st.integers(0, layer.experts - 1), unique=True)) for layer in layers]
    room = [data.draw(st.integers(0, 8)) for _ in range(slabs)]
    hot = choose_hot(heat, layers, [7, 5, 9][:slabs], room, present)
    Placement(1, hot, 0.5).ranked([layer.experts for layer in layers])
    for slab in range(slabs):
        held = [len(experts) for layer, experts in zip(layers, hot, strict=True) if layer.slab == slab]
        assert sum(held) <= room[slab]
    used = all(uses > 0 for row in heat for uses in row)
    if used and all(
        room[slab] >= sum(layer.experts for layer in layers if layer.slab == slab) for slab in range(slabs)
    ):
        assert [len(experts) for experts in hot] == [layer.experts for layer in layers]


def test_the_hottest_are_taken_of_each_slab():
    assert top(np.array([1.0, 3.0, 2.0, 9.0, 0.0]), np.array([0, 0, 0, 1, 1]), [2, 2]) == [1, 2, 3]


# ---- advice ----


def test_a_profile_fills_the_tier_before_there_is_traffic():
    adviser = Adviser(tier(), version=6)
    assert adviser.warm(np.zeros((LAYERS, EXPERTS))) is None
    placement = adviser.warm(heat_of({number: 1.0 + number for number in range(128)}))
    assert placement is not None
    assert (placement.version, placement.half_life) == (7, WARM.half_life)
    assert placement.ring == pytest.approx(0.2)
    assert sum(map(len, placement.hot)) == SlabSize(48, 0).hot(placement.ring)
    assert placement.hot[3][0] == 31


def test_advice_is_rare_and_repeats_nothing():
    counts, adviser = RoutingCounts(LAYERS, EXPERTS), Adviser(tier())
    rng = np.random.default_rng(4)
    share = 1.0 / np.arange(1, EXPERTS + 1) ** 1.2
    share /= share.sum()
    said = []
    for step in range(5 * PAUSE):
        ids = np.stack([rng.choice(EXPERTS, 4, replace=False, p=share) for _ in range(LAYERS)])
        adviser.step(counts.add(ids[:, None].astype(np.int16), np.ones(1, bool)))
        if adviser.due:
            placement = adviser.advise(counts.blended())
            if placement is not None:
                said.append((step, placement))
    assert 1 <= len(said) <= 4
    assert [placement.version for _, placement in said] == list(range(1, len(said) + 1))
    assert all((step + 1) % PAUSE == 0 for step, _ in said)
    assert said[0][0] > PAUSE, "no conclusion before there is evidence"
    assert adviser.rule.half_life > FIRST.half_life or adviser.rule.pinned
    assert adviser.rule is not STATIC
