"""The ring's order: the coldest first, whatever happened before, and never more memory than its members need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.residency.ring import Heats, Ring

RECORD = st.integers(0, 9)
DEED = st.one_of(
    st.tuples(st.just("use"), st.sets(RECORD, max_size=4)),
    st.tuples(st.just("add"), RECORD),
    st.tuples(st.just("remove"), RECORD),
    st.tuples(st.just("half-life"), st.sampled_from([1.0, 1.5, 16.0, 1024.0])),
)


@given(st.lists(DEED, max_size=60), st.sets(RECORD))
def test_the_coldest_that_is_not_busy_is_found_after_anything(deeds, busy):
    half_life = 16.0
    heats: Heats[int] = Heats(half_life)
    ring = Ring(heats)
    uses = dict.fromkeys(range(10), 0.0)
    welcome: dict[int, float] = {}
    for deed, what in deeds:
        if deed == "use":
            uses = {record: heat * 0.5 ** (1 / half_life) + (record in what) for record, heat in uses.items()}
            welcome = {record: heat * 0.5 ** (1 / half_life) for record, heat in welcome.items()}
            heats.use(what)
        elif deed == "add" and what not in ring:
            ring.add(what)
            welcome[what] = 1.0
        elif deed == "remove" and what in ring:
            ring.remove(what)
            del welcome[what]
        elif deed == "half-life":
            half_life = what
            heats.set_half_life(what)
        assert set(ring) == set(welcome)
        for record, heat in uses.items():
            assert heats.heat(record) == pytest.approx(heat, rel=1e-9, abs=1e-300)
        warmth = {record: max(uses[record], heat) for record, heat in welcome.items() if record not in busy}
        found = ring.coldest(busy.__contains__)
        if found is None:
            assert not warmth
        else:
            assert warmth[found] <= min(warmth.values()) * (1 + 1e-9)


def test_of_equals_the_one_that_came_first_goes_first():
    heats: Heats[str] = Heats()
    ring = Ring(heats)
    for record in "cab":
        ring.add(record)
    heats.use("bac")
    gone = []
    while (record := ring.coldest()) is not None:
        gone.append(record)
        ring.remove(record)
    assert gone == ["c", "a", "b"]


def test_members_that_come_and_go_leave_nothing_behind():
    ring: Ring[int] = Ring(Heats())
    for number in range(10_000):
        ring.add(number % 50)
        ring.remove(number % 50)
    assert len(ring) == 0
    assert len(ring._heap) < 100


@pytest.mark.parametrize("half_life", [0.0, 0.9, -3.0, float("inf"), float("nan")])
def test_an_impossible_half_life_is_refused(half_life):
    with pytest.raises(ValueError, match="half-life"):
        Heats(half_life)
