"""Slots for a number of bytes: exact, the same again for what was used, and every record can be served from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.residency.sizing import PART_BYTES, SlabNeed, size_slabs, slabs_bytes, smallest_slabs
from sparkd.residency.slabs import SlabSize

PAGE = 4096


@st.composite
def _need(draw: st.DrawFn) -> SlabNeed:
    experts = draw(st.integers(1, 300))
    layers = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, min(experts, 16)))
    return SlabNeed(64 * draw(st.integers(1, 40_000)), experts * layers, experts, top_k)


_NEEDS = st.lists(_need(), min_size=1, max_size=5)


@given(_NEEDS, st.floats(0, 1.2), st.sampled_from([1, PAGE]))
def test_slots_use_the_budget_to_the_last_record_and_serve_every_record(needs, share, page):
    least = slabs_bytes(needs, smallest_slabs(needs), page)
    whole = slabs_bytes(needs, [SlabSize(need.records, 0) for need in needs], page)
    budget = max(least, int(whole * share))
    sizes = size_slabs(needs, budget, page)
    used = slabs_bytes(needs, sizes, page)
    assert least <= used <= budget
    for number, (need, size) in enumerate(zip(needs, sizes, strict=True)):
        assert size.holds(need.records) == (size.slots == need.records)
        if size.slots < need.records:
            more = [*sizes]
            more[number] = SlabSize(size.slots + 1, size.reserve)
            assert slabs_bytes(needs, more, page) > budget
    assert size_slabs(needs, used, page) == sizes
    assert size_slabs(needs, (used + budget) // 2, page) == sizes


@given(_NEEDS, st.floats(0.05, 0.95))
def test_every_slab_gets_the_same_share_of_its_records(needs, share):
    whole = slabs_bytes(needs, [SlabSize(need.records, 0) for need in needs])
    budget = max(int(whole * share), slabs_bytes(needs, smallest_slabs(needs)))
    sizes = size_slabs(needs, budget)
    largest = max(need.record_bytes for need in needs)
    for need, size in zip(needs, sizes, strict=True):
        for other, size_of_other in zip(needs, sizes, strict=True):
            if size_of_other.slots > 2:
                # What is left over in the end goes to those whose records are small enough for it.
                extra = 2 + len(needs) * largest // other.record_bytes
                assert size.slots == need.records or (
                    (size_of_other.slots - extra) / other.records <= (size.slots + 1) / need.records
                )


def test_fewer_bytes_than_the_smallest_slabs_are_refused():
    needs = [SlabNeed(1000, 64, 8, 2), SlabNeed(500, 1, 1, 1)]
    assert smallest_slabs(needs) == [SlabSize(2, 1), SlabSize(1, 0)]
    assert size_slabs(needs, 2500) == smallest_slabs(needs)
    with pytest.raises(ValueError, match="2499 bytes are too few"):
        size_slabs(needs, 2499)


def test_the_reserve_has_two_parts_where_a_third_of_the_slab_is_enough():
    need = SlabNeed(2 << 20, 20 * 256, 256, 8)
    (size,) = size_slabs([need], 3072 * need.record_bytes)
    assert size == SlabSize(3072, reserve=2 * max(PART_BYTES // need.record_bytes, 8), spare=40)
    (small,) = size_slabs([need], 12 * need.record_bytes)
    assert small == SlabSize(12, reserve=4)


def test_small_records_are_read_many_at_a_time_but_never_more_than_a_layer_has():
    need = SlabNeed(64 << 10, 20 * 128, 128, 8)
    (size,) = size_slabs([need], 2000 * need.record_bytes)
    assert size.reserve == 2 * 128


def test_a_slab_that_holds_all_its_records_needs_no_reserve():
    need = SlabNeed(1 << 20, 512, 256, 8)
    assert size_slabs([need], 1 << 30) == [SlabSize(512, 0)]
    (short,) = size_slabs([need], (512 << 20) - 1)
    assert (short.slots, short.holds(512)) == (511, False)
