"""How a card's memory is divided: to the byte, and never more than there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.residency.budget import GIB
from sparkd.residency.device_budget import (
    CARD_MARGIN,
    ROWS,
    ROWS_SHARE,
    DeviceNeeds,
    Stack,
    allowance,
    choose_step,
    divide,
    slab_sizes,
    step_rows,
    usable,
)

MIB = 1 << 20
stacks = st.lists(st.builds(Stack, st.integers(1, 64), st.integers(1, 4 * MIB)), max_size=6).map(tuple)
needs = st.builds(DeviceNeeds, *[st.integers(0, 64 * MIB)] * 5, stacks)


@given(needs, st.integers(0, 512 * MIB), st.integers(0, 48), st.integers(0, 16))
def test_every_byte_of_a_card_is_accounted_for_and_none_twice(needs, limit, ring_slots, reserve_slots):
    made = divide(needs, limit, ring_slots, reserve_slots)
    assert made.used == needs.fixed + made.reserve + made.ring + made.hot_bytes
    assert made.used + made.slack == limit + made.missing
    assert all(0 <= hot <= stack.experts for hot, stack in zip(made.hot, needs.stacks, strict=True))
    assert made.ring_slots <= ring_slots and made.ring == made.ring_slots * sum(s.record_bytes for s in needs.stacks)
    if made.missing:
        assert not made.hot_bytes and not made.ring


@given(needs, st.integers(0, 512 * MIB), st.integers(0, 48), st.integers(0, 16))
def test_no_expert_that_would_still_fit_is_left_cold(needs, limit, ring_slots, reserve_slots):
    made = divide(needs, limit, ring_slots, reserve_slots)
    cold = [s.record_bytes for s, hot in zip(needs.stacks, made.hot, strict=True) if hot < s.experts]
    if cold and not made.missing:
        assert made.slack < max(cold)


@given(st.data(), st.integers(0, 512 * MIB), st.integers(0, 48), st.integers(1, 16))
def test_the_slots_of_a_card_take_no_more_than_was_divided(data, limit, ring_slots, reserve_slots):
    sizes = data.draw(st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=3, unique=True))
    slabs = list(range(len(sizes))) + data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=4))
    layers = tuple(Stack(data.draw(st.integers(1, 64)), sizes[slab]) for slab in slabs)
    made = divide(DeviceNeeds(0, MIB, 0, 0, 0, layers), limit, ring_slots, reserve_slots)
    slots = slab_sizes(made, slabs)
    for number, size in enumerate(slots):
        records = sum(stack.experts for stack, slab in zip(layers, slabs, strict=True) if slab == number)
        full = size.holds(records)
        assert size.reserve == (0 if full else reserve_slots)
        assert full or size.ordinary == sum(
            hot + made.ring_slots for hot, slab in zip(made.hot, slabs, strict=True) if slab == number
        )
    if not made.missing:
        assert sum(size.slots * record for size, record in zip(slots, sizes, strict=True)) <= limit - MIB


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [
        (16 * GIB, 0, 16 * GIB - int(16 * GIB * CARD_MARGIN)),
        (4 * GIB, 0, 4 * GIB - int(16 * GIB * CARD_MARGIN)),
        (16 * GIB, 8 * GIB, 8 * GIB - MIB),
        (4 * GIB, 8 * GIB, 4 * GIB - int(16 * GIB * CARD_MARGIN)),
        (16 * GIB, MIB // 2, 0),
        (0, 0, 0),
    ],
)
def test_a_worker_may_use_what_is_free_but_a_margin_and_no_more_than_it_is_given(free, wanted, expected):
    assert allowance(free, 16 * GIB, wanted, MIB)[0] == expected


def _needs(experts: int = 256, record: int = 2 * MIB, layers: int = 4) -> DeviceNeeds:
    return DeviceNeeds(100 * MIB, 500 * MIB, 50 * MIB, 10 * MIB, 40 * MIB, (Stack(experts, record),) * layers)


def test_all_experts_are_hot_from_the_very_byte_on_and_take_neither_ring_nor_reserve():
    needs = _needs()
    exact = divide(needs, needs.fixed + needs.records, 32, 16)
    assert (exact.residency, exact.ring, exact.reserve, exact.slack) == (1.0, 0, 0, 0)
    short = divide(needs, needs.fixed + needs.records - 1, 32, 16)
    assert short.residency < 1 and (short.ring_slots, short.reserve) == (32, 32 * MIB)


def test_the_exact_fixed_need_fits_and_one_byte_less_does_not():
    needs = _needs()
    least = needs.fixed + 16 * 2 * MIB
    assert divide(needs, least, 32, 16).missing == 0
    assert divide(needs, least - 1, 32, 16).missing == 1


def test_a_ring_never_takes_more_than_the_hot_set():
    needs = _needs()
    limit = needs.fixed + 32 * MIB + 20 * 4 * 2 * MIB
    made = divide(needs, limit, 32, 16)
    assert made.ring_slots == 10 and set(made.hot) == {10}


def test_a_card_without_experts_to_hold_holds_all_of_them():
    assert divide(DeviceNeeds(0, 5, 0, 0, 0, ()), 5, 32, 16).residency == 1.0


@pytest.mark.parametrize(
    ("free", "total", "margin", "expected", "said"),
    [
        (20 * GIB, 24 * GIB, 0, 20 * GIB, ""),
        (24 * GIB, 24 * GIB, GIB, 23 * GIB, ""),
        (25 * GIB, 24 * GIB, GIB, 23 * GIB, "25.00 GiB are more than the card has (24.00 GiB): 23.00 count"),
        (0, 24 * GIB, GIB, 0, "none of the card's 24.00 GiB is free"),
        (-1, 24 * GIB, 0, 0, "none of the card's 24.00 GiB is free"),
        (0, 0, 0, 0, "the card reports 0 bytes of memory: there is nothing to plan with"),
        (1 << 64, 0, GIB, 0, "the card reports 0 bytes of memory: there is nothing to plan with"),
        (GIB, GIB // 2, GIB, 0, "1.00 GiB are more than the card has (0.50 GiB): 0.00 count"),
    ],
)
def test_a_card_that_reports_more_free_memory_than_it_has_or_none_is_clamped_and_explained(
    free, total, margin, expected, said
):
    assert usable(free, total, margin) == (expected, said)


@given(st.integers(0, 3000), st.integers(0, 40), st.integers(0, 40))
def test_a_longer_step_takes_few_slots_and_never_the_last_expert(limit, workspace, window):
    """All in MiB: 500 of core, 2048 of experts; `workspace` and `window` for 512 rows each."""

    def divided(rows):
        taken, kv = (part * MIB * rows // ROWS[0] for part in (workspace, window))
        needs = DeviceNeeds(0, 500 * MIB, kv, 0, taken, (Stack(256, 2 * MIB),) * 4, rows)
        return divide(needs, limit * MIB, 32, 16)

    shortest, chosen = divided(ROWS[0]), choose_step(map(divided, ROWS))
    if shortest.missing:
        assert chosen == shortest
    assert chosen.slots_bytes >= shortest.slots_bytes * (1 - ROWS_SHARE)
    assert (chosen.residency == 1) == (shortest.residency == 1)
    for rows in ROWS[ROWS.index(chosen.needs.rows) + 1 :]:
        longer = divided(rows)
        lost = shortest.slots_bytes - longer.slots_bytes
        assert longer.missing or lost > shortest.slots_bytes * ROWS_SHARE or (lost and shortest.residency == 1)


def test_no_step_is_longer_than_a_sequence():
    assert step_rows(64) == step_rows(1000) == ROWS[:1]
    assert step_rows(2047) == ROWS[:2] and step_rows(1 << 20) == ROWS
