"""A host tier smaller than the model, with real memory and a fake disk: in whatever order copies end, fail or are given
up, a word leads to its record's bytes, a lease to what was asked for, and nobody's memory is written under him."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from fake_disk import FakeDisk
from filled_arena import Filled, adopting, empty, expert_bytes, regions_closed
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparkd.ipc.directory import Entry, State, StepCounter
from sparkd.residency.commands import Grant, Lend, Refuse
from sparkd.residency.leases import Use
from sparkd.residency.placement import Placement, PlacementError
from sparkd.residency.slabs import SlabSize
from sparkd.residency.slots import Place, Record

NAME = "laguna-tiny-s1-q4_k_m"
PICK = st.integers(0, 1 << 16)


@pytest.fixture(autouse=True)
def _close_regions():
    with regions_closed():
        yield


def small(path: Path, ordinary: int = 12, reserve: int = 3, spare: int = 2) -> tuple[Filled, FakeDisk]:
    disk = FakeDisk()
    slabs = empty(path).arena.layout.slabs
    disk.one = one = empty(path, [SlabSize(ordinary + reserve, reserve, spare) for _ in slabs], disk)
    return one, disk


def file_record(one: Filled, record: Record) -> bytes:
    layer = one.program.expert_layers[record.layer]
    return b"".join(expert_bytes(one.model, weight, record.expert) for weight in (layer.gate, layer.up, layer.down))


def arena_record(one: Filled, record: Record, slot: int) -> bytes:
    layer, records = one.program.expert_layers[record.layer], one.arena.layout.layers[record.layer]
    start = one.arena.layout.record(record.layer, slot)
    parts = []
    for weight, piece in zip((layer.gate, layer.up, layer.down), records.pieces, strict=True):
        size = weight.rows * one.model.tensors[weight.tensor].row_bytes
        parts.append(bytes(one.region.view(start + piece.offset, size)))
    return b"".join(parts)


def residents(one: Filled) -> dict[Record, Place]:
    """What the directory's words say."""
    words = one.arena.directory.snapshot()
    there = np.argwhere(words >> np.uint64(62) == State.RESIDENT).tolist()
    entries = {Record(layer, expert): Entry.of(int(words[layer, expert])) for layer, expert in there}
    return {record: Place(entry.slot, entry.generation) for record, entry in entries.items()}


def check(one: Filled) -> None:
    for record, place in residents(one).items():
        assert arena_record(one, record, place.slot) == file_record(one, record)


def fill(one: Filled, disk: FakeDisk) -> None:
    one.residents.fill()
    disk.finish_all()


def granted(one: Filled) -> dict[int, tuple[Place, ...]]:
    return {answer.lease: answer.places for answer in one.residents.answers() if isinstance(answer, Grant)}


def test_a_small_tier_is_filled_evenly_over_the_layers_and_its_words_lead_to_the_right_bytes(model_path):
    one, disk = small(model_path(NAME), ordinary=16, spare=2)
    fill(one, disk)
    by_slab: dict[int, list[int]] = {}
    for layer, count in enumerate(one.residents.residents()):
        by_slab.setdefault(one.arena.layout.layers[layer].slab, []).append(count)
    for counts in by_slab.values():
        assert sum(counts) == 14
        assert max(counts) - min(counts) <= 1
    check(one)


def test_what_a_placement_wants_is_loaded_first_when_it_comes_before_the_load(model_path):
    one, disk = small(model_path(NAME))
    hot = [[7, 6] if layer < 2 else [] for layer in range(len(one.arena.layout.layers))]
    one.residents.place(Placement(3, hot, 0.5))
    fill(one, disk)
    assert {Record(layer, expert) for layer in (0, 1) for expert in (6, 7)} <= set(residents(one))
    assert sum(use.hot for use in one.residents.slabs()) == 4
    assert one.residents.placement().version == 3
    assert one.residents.placement().swaps_left == 0


def test_a_placement_is_reached_a_few_swaps_at_a_time_and_only_when_the_disk_has_nothing_else_to_do(model_path):
    one, disk = small(model_path(NAME))
    fill(one, disk)
    hot = [[5, 6, 7] for _ in one.arena.layout.layers]
    assert len(one.arena.layout.slabs) > 1
    with pytest.raises(PlacementError, match="beside the ring there is room"):
        one.residents.place(Placement(1, hot, 0.99))
    assert one.residents.placement().version is None
    one.residents.place(Placement(2, [[5]] * len(hot), 0.2))
    for _ in range(100):
        one.residents.advance()
        begun = set(disk.jobs)
        assert len(begun) <= 2
        one.residents.advance()
        assert set(disk.jobs) == begun or not begun, "more is begun while something waits"
        if not begun and not one.residents.placement().swaps_left:
            break
        if begun:
            disk.finish(next(iter(begun)))
    assert {Record(layer, 5) for layer in range(len(hot))} <= set(residents(one))
    assert sum(use.hot for use in one.residents.slabs()) == len(hot)
    check(one)


def test_a_placement_that_cannot_be_read_is_not_tried_again_and_again(model_path):
    one, disk = small(model_path(NAME))
    fill(one, disk)
    one.residents.place(Placement(1, [[7]] * len(one.arena.layout.layers), 0.2))
    assert one.residents.advance()
    while disk.jobs:
        disk.fail(next(iter(disk.jobs)))
    assert not one.residents.advance()
    assert one.residents.placement().swaps_left > 0
    check(one)


def test_what_decode_missed_is_read_once_and_joins_the_ring_from_the_reserve(model_path):
    one, disk = small(model_path(NAME), spare=0)
    fill(one, disk)
    absent = next(Record(0, e) for e in range(one.arena.layout.layers[0].experts) if Record(0, e) not in residents(one))
    steps = one.arena.directory.step_counter(0)
    one.residents.attach(0)
    disk.reads.clear()
    with steps:
        lease = one.residents.stage(0, [absent], Use.DECODE)
        assert [job.urgent for job in disk.jobs.values()] == [True]
        disk.finish_all()
        (place,) = granted(one)[lease]
        assert arena_record(one, absent, place.slot) == file_record(one, absent)
        assert absent not in residents(one)
        one.residents.release(lease)
    one.residents.used(0, [absent], Use.DECODE)
    disk.finish_all()
    assert absent in residents(one)
    assert (len(disk.reads), disk.moves) == (3, 1)
    check(one)
    counts = one.residents.counts()
    assert (counts[Use.DECODE].uses, counts[Use.DECODE].misses, counts[Use.PREFILL].uses) == (1, 1, 0)


def test_a_prompt_leaves_the_ring_and_the_counts_of_decode_alone(model_path):
    one, disk = small(model_path(NAME))
    fill(one, disk)
    before = residents(one)
    one.residents.attach(0)
    everything = [[Record(layer, e) for e in range(r.experts)] for layer, r in enumerate(one.arena.layout.layers)]
    for _ in range(3):
        with one.arena.directory.step_counter(0):
            for records in everything:
                for record in records:
                    if record not in before:
                        lease = one.residents.stage(0, [record], Use.PREFILL)
                        disk.finish_all()
                        assert lease in granted(one)
                        one.residents.release(lease)
        one.residents.used(0, [record for records in everything for record in records], Use.PREFILL)
    assert residents(one) == before
    assert one.residents.counts()[Use.DECODE].uses == 0


def test_a_store_that_begins_again_adopts_a_small_tier_and_reads_nothing_of_it_again(model_path):
    one, disk = small(model_path(NAME))
    fill(one, disk)
    before = residents(one)
    other = FakeDisk()
    other.one = again = adopting(one.region, copies=other)
    again.residents.fill()
    assert other.jobs == {}
    assert residents(again) == before
    again.residents.attach(0)
    lease = again.residents.stage(0, [Record(6, 7)], Use.DECODE)
    other.finish_all()
    assert lease in granted(again)
    check(again)


def test_a_store_that_begins_again_waits_for_steps_that_may_read_what_the_one_before_had_staged(model_path):
    one, disk = small(model_path(NAME), reserve=1, spare=0)
    fill(one, disk)
    absent = [record for record in map(Record._make, [(0, 6), (0, 7)]) if record not in residents(one)]
    one.residents.attach(0)
    steps = one.arena.directory.step_counter(0)
    with steps:
        one.residents.stage(0, absent[:1], Use.PREFILL)
        disk.finish_all()
        other = FakeDisk()
        other.one = again = adopting(one.region, copies=other)
        again.residents.stage(0, absent[1:], Use.PREFILL)
        again.residents.advance()
        assert other.jobs == {}, "the step may still read the only slot of the reserve"
    again.residents.advance()
    other.finish_all()
    assert len(granted(again)) == 1
    assert not again.residents.advance(), "nothing drains any more"


@dataclass
class _Step:
    counter: StepCounter
    running: bool = False
    #: What it saw when it began, and may read until it ends.
    seen: dict[Record, Place] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    """Two workers, any order of things."""

    path: Path

    @initialize(name=st.sampled_from(["scarce", "spare", "tiny"]))
    def start(self, name):
        sizes = {"scarce": (6, 2, 0), "spare": (12, 4, 2), "tiny": (1, 1, 0)}[name]
        self.one, self.disk = small(self.path, *sizes)
        self.reserve = sizes[1]
        self.expected = {
            Record(layer, expert): file_record(self.one, Record(layer, expert))
            for layer, records in enumerate(self.one.arena.layout.layers)
            for expert in range(records.experts)
        }
        self.steps = [_Step(self.one.arena.directory.step_counter(worker)) for worker in (0, 1)]
        self.asked: dict[int, list[Record]] = {}
        self.leased: dict[int, list[tuple[Record, Place]]] = {}
        self.lent: dict[int, list[tuple[Record, Place]]] = {}
        self.worker_of: dict[int, int] = {}
        self.one.residents.fill()

    def pick(self, number, items):
        items = list(items)
        assume(items)
        return items[number % len(items)]

    def hear(self):
        for answer in self.one.residents.answers():
            if isinstance(answer, Lend):
                records = self.asked[answer.lease]
                self.lent[answer.lease] = list(zip(records, answer.places, strict=True))
                continue
            records = self.asked.pop(answer.lease)
            self.lent.pop(answer.lease, None)
            if isinstance(answer, Refuse):
                assert answer.reason == "cannot read 100 bytes"
                assert answer.record in records
            else:
                assert len(answer.places) == len(records)
                self.leased[answer.lease] = list(zip(records, answer.places, strict=True))

    @rule(worker=st.integers(0, 1), layer=PICK, picks=st.lists(PICK, min_size=1, max_size=4), use=st.sampled_from(Use))
    def stage(self, worker, layer, picks, use):
        layer %= len(self.one.arena.layout.layers)
        experts = dict.fromkeys(number % self.one.arena.layout.layers[layer].experts for number in picks)
        records = [Record(layer, expert) for expert in experts][: self.reserve]
        lease = self.one.residents.stage(worker, records, use)
        self.asked[lease], self.worker_of[lease] = records, worker

    @rule(worker=st.integers(0, 1), layer=PICK, picks=st.lists(PICK, min_size=1, max_size=4))
    def foresee(self, worker, layer, picks):
        layer %= len(self.one.arena.layout.layers)
        experts = dict.fromkeys(number % self.one.arena.layout.layers[layer].experts for number in picks)
        self.one.residents.foresee(worker, [Record(layer, expert) for expert in experts])

    @precondition(lambda self: self.leased)
    @rule(number=PICK)
    def release(self, number):
        lease = self.pick(number, self.leased)
        del self.leased[lease]
        self.one.residents.release(lease)

    @rule(worker=st.integers(0, 1))
    def begin(self, worker):
        step = self.steps[worker]
        assume(not step.running)
        step.counter.__enter__()
        step.running, step.seen = True, residents(self.one)

    @rule(worker=st.integers(0, 1), use=st.sampled_from(Use))
    def end(self, worker, use):
        step = self.steps[worker]
        assume(step.running)
        step.counter.__exit__(None, None, None)
        step.running = False
        self.one.residents.used(worker, list(step.seen)[:5], use)
        step.seen = {}

    @precondition(lambda self: self.disk.jobs)
    @rule(number=PICK)
    def begin_copy(self, number):
        self.disk.jobs[self.pick(number, self.disk.jobs)].begun = True

    @precondition(lambda self: self.disk.jobs)
    @rule(number=PICK)
    def finish(self, number):
        self.disk.finish(self.pick(number, self.disk.jobs))

    @precondition(lambda self: self.disk.jobs)
    @rule(number=PICK)
    def fail(self, number):
        self.disk.fail(self.pick(number, self.disk.jobs))

    @rule(number=PICK)
    def place(self, number):
        hot = [[number % records.experts] if layer % 3 == 0 else [] for layer, records in self.layers()]
        try:
            self.one.residents.place(Placement(number, hot, 0.3))
        except PlacementError:
            assert self.reserve == 1

    @rule()
    def advance(self):
        self.one.residents.advance()

    @rule(worker=st.integers(0, 1))
    def attach(self, worker):
        self.one.residents.attach(worker)
        for leases in (self.leased, self.lent, self.asked):
            for lease in [lease for lease in leases if self.worker_of[lease] == worker]:
                del leases[lease]

    def layers(self):
        return enumerate(self.one.arena.layout.layers)

    @invariant()
    def check(self):
        if not hasattr(self, "one"):
            return
        self.hear()
        readable = [*residents(self.one).items(), *(pair for lease in self.leased.values() for pair in lease)]
        holds, layout = self.one.arena.directory.holds, self.one.arena.layout
        for record, place in (pair for lease in self.lent.values() for pair in lease):
            if holds(layout.slot_number(layout.layers[record.layer].slab, place.slot), place.generation):
                readable.append((record, place))
        readable += [pair for step in self.steps for pair in step.seen.items()]
        for record, place in readable:
            assert arena_record(self.one, record, place.slot) == self.expected[record]

    def teardown(self):
        if hasattr(self, "one"):
            for worker, step in enumerate(self.steps):
                if step.running:
                    self.end(worker, Use.DECODE)
            for _ in range(200):
                self.disk.finish_all()
                self.hear()
                while self.leased:
                    self.release(0)
                if not self.one.residents.advance() and not self.disk.jobs and not self.asked:
                    break
            assert not self.asked, "a lease that is never answered"
            assert not self.disk.jobs
            self.check()


def test_any_order_of_things_with_real_memory(model_path, request):
    from hypothesis.stateful import run_state_machine_as_test

    class WithModel(Machine):
        path = model_path(NAME)

    run_state_machine_as_test(
        WithModel,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
