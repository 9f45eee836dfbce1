"""The hot set and how it is reached; slots that close; what an owner before left."""

from __future__ import annotations

import pytest
from residency_model import IDLE, Tier, kinds, one_layer, resident

from sparkd.residency.commands import Grant, Retract
from sparkd.residency.epochs import Adopted
from sparkd.residency.leases import Use
from sparkd.residency.placement import Placement, PlacementError
from sparkd.residency.slabs import LayerSize, SlabSize
from sparkd.residency.slots import Place, Record
from sparkd.residency.transfers import Residency

# ---- the hot set ----


def test_a_placement_is_reached_a_few_swaps_at_a_time_and_never_evicted():
    tier = one_layer(10, 2, experts=30)
    resident(tier, *range(8))
    tier.place([[3, 4, 20, 21, 22]], ring=0.25)
    swaps = []
    while tier.engine.swaps_left():
        swaps.append(tier.swap(2))
        tier.settle()
    assert swaps == [2, 2, 1]
    hot = {Record(0, expert) for expert in (3, 4, 20, 21, 22)}
    assert tier.engine.hot() == hot
    for expert in range(23, 30):
        tier.admit([Record(0, expert)])
        tier.settle()
        assert hot <= set(tier.words)


def test_a_record_that_becomes_hot_keeps_its_slot_and_costs_no_copy():
    tier = one_layer(5, 1)
    resident(tier, 0, 1, 2, 3)
    words = dict(tier.words)
    tier.place([[1, 2]], ring=0.5)
    tier.swap(10)
    assert not tier.copies
    assert tier.words == words
    tier.place([[3]], ring=0.5)
    tier.swap(10)
    assert (tier.words, tier.engine.hot()) == (words, {Record(0, 3)})
    assert not tier.copies


def test_a_record_that_is_no_longer_hot_counts_as_just_used_in_the_ring():
    tier = one_layer(4, 1)
    resident(tier, 0, 1, 2)
    tier.place([[0]], ring=0.5)
    tier.swap(1)
    tier.place([[]], ring=0.5)
    tier.swap(1)
    for expert, left in ((5, {0, 2}), (6, {0}), (7, set())):
        tier.admit([Record(0, expert)])
        assert set(tier.words) == {Record(0, e) for e in left}


def test_the_bound_on_swaps_is_for_all_slabs_together():
    tier = Tier([LayerSize(0, 9), LayerSize(1, 9)], [SlabSize(5, 1), SlabSize(5, 1)])
    tier.place([[0, 1], [0, 1]], ring=0.5)
    assert [tier.swap(3), tier.swap(3), tier.swap(3)] == [3, 1, 0]


def test_hot_copies_that_fail_are_tried_again_by_a_later_swap():
    tier = one_layer(4, 1)
    tier.place([[5]], ring=0.5)
    tier.swap(1)
    tier.failed(tier.copies[0])
    assert (tier.engine.hot(), tier.engine.swaps_left(), tier.copies) == (frozenset(), 1, [])
    tier.swap(1)
    tier.settle()
    assert set(tier.words) == {Record(0, 5)}


def test_a_new_placement_drops_what_still_waits_for_the_old_one():
    tier = one_layer(4, 1)
    resident(tier, 0, 1, 2)
    tier.begin(0)
    tier.place([[7, 8]], ring=0.3)
    tier.swap(2)
    tier.place([[9]], ring=0.3)
    tier.swap(2)
    tier.settle()
    assert tier.engine.hot() == {Record(0, 9)}
    assert not {Record(0, 7), Record(0, 8)} & set(tier.words)


@pytest.mark.parametrize(
    ("hot", "ring", "said"),
    [
        ([[1], [2]], 0.5, "placement for 2 expert layers, the model has 1"),
        ([[1, 1]], 0.5, "names an expert of expert layer 0 twice"),
        ([[20]], 0.5, "outside expert layer 0: it has 20"),
        ([[-1]], 0.5, "outside expert layer 0"),
        ([[0, 1, 2]], 0.5, "3 hot records of one size, beside the ring there is room for 2"),
        ([[0]], 1.5, "share 1.5"),
        ([[0]], float("nan"), "share nan"),
    ],
)
def test_an_impossible_placement_is_refused_and_changes_nothing(hot, ring, said):
    tier = one_layer(5, 1)
    resident(tier, 0, 1, 2, 3)
    tier.place([[1]], 0.5)
    with pytest.raises(PlacementError, match=said):
        tier.engine.place(Placement(2, hot, ring))
    tier.swap(10)
    assert tier.engine.hot() == {Record(0, 1)}


# ---- sizes, adoption ----


@pytest.mark.parametrize(
    ("size", "records", "fits"),
    [
        (SlabSize(2, 1), 20, True),
        (SlabSize(1, 1), 20, True),
        (SlabSize(1, 2), 20, False),
        (SlabSize(1, 0), 20, False),
        (SlabSize(19, 0), 20, False),
        (SlabSize(20, 0), 20, True),
        (SlabSize(21, 1), 20, True),
        (SlabSize(20, 1, spare=18), 20, True),
        (SlabSize(20, 1, spare=19), 20, False),
        (SlabSize(20, 0, spare=1), 20, False),
        (SlabSize(20, -1), 20, False),
        (SlabSize(0, 0), 0, True),
    ],
)
def test_a_slab_has_a_reserve_or_a_slot_for_every_record(size, records, fits):
    if fits:
        Residency([LayerSize(0, records)], [size])
    else:
        with pytest.raises(ValueError, match=f"{records} records cannot be served"):
            Residency([LayerSize(0, records)], [size])


def test_with_a_slot_for_every_record_nothing_moves_once_it_is_there():
    layers = [LayerSize(0, 5), LayerSize(1, 3), LayerSize(0, 4)]
    tier = Tier(layers, [SlabSize(9, 0), SlabSize(3, 0)])
    tier.admit(tier.records)
    slots = [(copy.slab, copy.place) for copy in sorted(tier.copies, key=lambda copy: copy.record)]
    assert slots[:5] == [(0, Place(n, 1)) for n in range(5)]
    assert slots[5:8] == [(1, Place(n, 1)) for n in range(3)]
    assert slots[8:] == [(0, Place(n, 1)) for n in range(5, 9)]
    lease = tier.stage(0, tier.records, Use.DECODE)
    for copy in list(tier.copies):
        assert tier.asked[lease].places is None
        tier.copied(copy)
    assert len(tier.asked[lease].places) == 12
    tier.publish()
    assert tier.engine.residents() == [5, 3, 4]
    for use in Use:
        number, commands = tier.engine.stage(0, tier.records, use)
        assert kinds(commands) == [Grant]
        assert tier.engine.release(number) == []
    assert tier.engine.admit(tier.records) == []


def test_a_slab_without_ordinary_slots_serves_parts_alone():
    tier = one_layer(2, 2)
    tier.admit(tier.records[:3])
    assert tier.copies == []
    lease = tier.stage(0, tier.part(0, [1, 4]), Use.DECODE)
    for copy in list(tier.copies):
        tier.copied(copy)
    assert len(tier.asked[lease].places) == 2
    tier.release(lease)
    tier.settle()


def test_closed_slots_are_given_up_by_whoever_is_in_them_and_the_hot_come_back_at_the_cost_of_the_ring():
    tier = one_layer(9, 1)
    resident(tier, 0, 1, 2, 3, 4, 5, 6, 7)
    tier.place([[6, 7]], 0.5)
    tier.swap(2)
    places = {tier.engine.place_of(Record(0, expert)).slot for expert in (6, 7)}
    tier.begin(0)
    assert not tier.close(0, places), "a step may read them"
    assert tier.engine.hot() == frozenset()
    tier.end(0)
    tier.observe()
    assert tier.close(0, places)
    assert sum(tier.engine.residents()) == 6
    assert tier.engine.swaps_left() == 2
    tier.swap(2)
    tier.settle()
    assert {Record(0, 6), Record(0, 7)} == tier.engine.hot() <= set(tier.words)
    assert sum(tier.engine.residents()) == 6
    assert not places & {place.slot for place in tier.words.values()}
    use = tier.engine.slab_use()[0]
    assert (use.slots, use.hot, use.ring) == (7, 2, 4)


def test_slots_that_were_given_up_are_filled_again_once_they_are_opened():
    tier = one_layer(9, 1)
    resident(tier, 0, 1, 2, 3, 4, 5, 6, 7)
    places = {tier.engine.place_of(Record(0, expert)).slot for expert in (6, 7)}
    tier.close(0, places)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        tier.engine.open(0, places)
    tier.observe()
    assert tier.close(0, places)
    tier.reopen(0, places)
    assert tier.engine.rooms() == [2]
    resident(tier, 8, 9)
    assert sum(tier.engine.residents()) == 8
    assert {tier.engine.place_of(Record(0, expert)).slot for expert in (8, 9)} == places
    with pytest.raises(RuntimeError, match="cannot be opened"):
        tier.engine.open(0, places)


def test_a_hot_set_that_closed_slots_have_no_room_for_gives_up_the_least_wanted():
    tier = one_layer(5, 1)
    tier.place([[3, 1, 7, 5]], 0.0)
    tier.swap(4)
    tier.settle()
    places = [tier.engine.place_of(Record(0, expert)).slot for expert in (3, 7)]
    tier.close(0, places)
    tier.observe()
    assert tier.close(0, places)
    tier.swap(4)
    tier.settle()
    assert tier.engine.hot() == {Record(0, 1), Record(0, 5)}
    assert tier.engine.swaps_left() == 0


def test_what_an_owner_before_left_is_adopted_where_it_is():
    residents = {Record(0, 5): Place(2, 7), Record(0, 1): Place(0, 9)}
    engine = Residency([LayerSize(0, 9)], [SlabSize(5, 1)], Adopted(residents, 9, IDLE))
    assert {record: engine.place_of(record) for record in residents} == residents
    copies = engine.observe(IDLE) + engine.admit([Record(0, 2), Record(0, 3)])
    assert [copy.place for copy in copies] == [Place(1, 10), Place(3, 10)]
    assert engine.admit([Record(0, 4)]) == [Retract(Record(0, 5), Place(2, 7))]


@pytest.mark.parametrize("places", [{0: Place(4, 1)}, {0: Place(-1, 1)}, {0: Place(1, 1), 3: Place(1, 2)}])
def test_residents_that_cannot_be_where_they_are_said_to_be_are_not_adopted(places):
    with pytest.raises(ValueError, match="cannot be resident"):
        Residency([LayerSize(0, 9)], [SlabSize(5, 1)], Adopted({Record(0, e): p for e, p in places.items()}, 2, IDLE))


def test_slots_that_the_readers_of_an_owner_before_may_read_are_not_written_until_these_have_passed():
    tier = one_layer(4, 2)
    resident(tier, 0)
    tier.begin(0)
    tier.begin(1)
    tier.stage(0, tier.part(0, [8, 9]), Use.PREFILL)
    for copy in list(tier.copies):
        tier.copied(copy)
    tier.restart_owner()
    tier.observe()
    lease = tier.stage(1, tier.part(0, [3]), Use.PREFILL)
    tier.admit([Record(0, 4)])
    assert not tier.copies
    tier.attach(0)
    tier.observe()
    assert not tier.copies
    tier.attach(1)  # gives up its lease in the reserve, and its place in the queue
    tier.observe()
    assert lease not in tier.engine.leases()
    tier.stage(1, tier.part(0, [3]), Use.PREFILL)
    assert [copy.record.expert for copy in tier.copies] == [3], "the reserve is free, the rest waits for the steps"
    tier.end(0)
    tier.end(1)
    tier.observe()
    assert [copy.record.expert for copy in tier.copies] == [3, 4]
    tier.settle()


@pytest.mark.parametrize("half_life", [0.0, 0.5, -1.0, float("inf"), float("nan")])
def test_a_ring_without_a_possible_half_life_is_refused(half_life):
    tier = one_layer(5, 1)
    with pytest.raises(PlacementError, match="half-life"):
        tier.engine.place(Placement(1, [[0]], 0.5, half_life))
    assert tier.engine.hot() == frozenset()
