"""What the state pool promises: no page and no record has two owners, and everything comes back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from described_models import Description, laguna, qwen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sparkd.graph.program import ConvState, DeltaState, KvCache, Program
from sparkd.graph.state import PAGE, StateLayout
from sparkd.worker.state import Holding, PoolSize, StatePool

CHUNK = 100
CONTEXT = 1000
SEQUENCES = 3


def layout(caches: tuple[KvCache, ...], conv: tuple[ConvState, ...] = ()) -> StateLayout:
    delta = tuple(DeltaState(c.layer, 2, 4) for c in conv)
    program = Program("test", 8, 16, CONTEXT, (), caches, conv, delta, (), ())
    return StateLayout.of(program, 4)


MIXED = layout((KvCache(0, 1, 4, 0), KvCache(1, 1, 4, 130), KvCache(2, 2, 4, 130)), (ConvState(3, 3, 8),))


class Pool(RuleBasedStateMachine):
    """Random sequences are admitted, stepped and released; a model of who owns what is compared after each rule."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.size = PoolSize.worst_case(MIXED, SEQUENCES, CONTEXT, CHUNK)
        self.pool = StatePool(MIXED, self.size, CHUNK)
        self.position: dict[int, int] = {}
        self.longest: dict[int, int] = {}
        self.live: dict[int, Holding] = {}

    @rule(target=holdings, positions=st.integers(1, CONTEXT))
    def admit(self, positions: int) -> Holding | None:
        holding = self.pool.admit(positions)
        assert (holding is None) == (len(self.live) == SEQUENCES)
        if holding is not None:
            self.live[id(holding)] = holding
            self.position[id(holding)] = 0
            self.longest[id(holding)] = positions
        return holding

    @rule(holding=holdings, rows=st.integers(1, CHUNK))
    def step(self, holding: Holding | None, rows: int) -> None:
        if holding is None or id(holding) not in self.live:
            return
        start = self.position[id(holding)]
        end = min(start + rows, self.longest[id(holding)])
        if end == start:
            return
        self.pool.extend(holding, end)
        for group, table in zip(MIXED.groups, holding.tables, strict=True):
            assert (table[group.first_page(start) : (end - 1) // PAGE + 1] >= 0).all()
        self.pool.trim(holding, end)
        self.position[id(holding)] = end

    @rule(holding=consumes(holdings))
    def release(self, holding: Holding | None) -> None:
        if holding is not None and self.live.pop(id(holding), None) is not None:
            self.pool.release(holding)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        for group in range(len(MIXED.groups)):
            held = [int(page) for h in self.live.values() for page in h.tables[group] if page >= 0]
            assert len(held) == len(set(held))
            assert all(0 <= page < self.size.pages[group] for page in held)
        records = [h.record for h in self.live.values()]
        assert len(records) == len(set(records))

    @invariant()
    def pages_behind_the_window_are_given_back(self) -> None:
        for key, holding in self.live.items():
            for group, table in zip(MIXED.groups, holding.tables, strict=True):
                assert (table[: min(group.first_page(self.position[key]), len(table))] == -1).all()

    def teardown(self) -> None:
        for holding in self.live.values():
            self.pool.release(holding)
        assert self.pool.used_bytes() == 0
        assert all(self.pool.admit(CONTEXT) is not None for _ in range(SEQUENCES))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_refused_admission_changes_nothing() -> None:
    pool = StatePool(MIXED, PoolSize((4, 4), 2), CHUNK)
    first = pool.admit(4 * PAGE)
    assert first is not None
    assert pool.admit(1) is None
    pool.release(first)
    assert pool.admit(4 * PAGE) is not None


def test_memory_counts_only_layers_that_have_a_cache() -> None:
    cached = tuple(KvCache(layer, 2, 256, 0) for layer in range(3, 40, 4))
    conv = tuple(ConvState(layer, 3, 8192) for layer in range(40) if layer % 4 != 3)
    size = PoolSize.worst_case(layout(cached), 1, CONTEXT, CHUNK)
    assert size.bytes(layout(cached)) == 10 * 2 * 2 * 256 * 4 * PAGE * 16
    recurrent = layout((), conv)
    assert PoolSize.worst_case(recurrent, 2, CONTEXT, CHUNK).bytes(recurrent) == 2 * recurrent.record_bytes


@pytest.mark.parametrize("positions", [1, 200, CONTEXT])
def test_a_window_bounds_what_a_long_sequence_holds(positions: int) -> None:
    windowed = layout((KvCache(0, 1, 4, 130),))
    pool = StatePool(windowed, PoolSize.worst_case(windowed, 1, positions, CHUNK), CHUNK)
    holding = pool.admit(positions)
    assert holding is not None
    most = 0
    for start in range(0, positions, CHUNK):
        pool.extend(holding, min(start + CHUNK, positions))
        most = max(most, int(np.count_nonzero(holding.tables[0] >= 0)))
        pool.trim(holding, min(start + CHUNK, positions))
    assert most <= (130 + CHUNK) // PAGE + 2


def kv_bytes(describe: Callable[[], Description], positions: int, element: int = 2) -> int:
    """State of one sequence of so many positions, in steps of up to 512 rows."""
    state = StateLayout.of(describe().build(), element)
    return PoolSize.worst_case(state, 1, positions, 512).bytes(state)


def test_qwen_keeps_keys_and_values_of_ten_layers_and_one_record_of_state() -> None:
    record = 65_863_680
    for positions in (64, 8192, 262_144):
        per_layer = positions * 2 * 2 * 256 * 2
        assert kv_bytes(qwen, positions) == 10 * per_layer + record
        assert kv_bytes(qwen, positions, element=4) == 2 * 10 * per_layer + record


def test_laguna_keeps_all_positions_of_ten_layers_and_a_window_of_thirty() -> None:
    per_layer = 8 * 128 * 2 * 2
    window = (-(-(512 + 512 - 1) // PAGE) + 1) * PAGE
    for positions in (2048, 8192, 262_144):
        assert kv_bytes(laguna, positions) == per_layer * (10 * positions + 30 * window)
    assert kv_bytes(laguna, 64) == per_layer * 40 * 64
    all_layers = per_layer * 40 * 262_144
    assert kv_bytes(laguna, 262_144) < 0.26 * all_layers


@pytest.mark.parametrize("describe", [qwen, laguna])
@pytest.mark.parametrize("positions", [1024, 8192])
def test_as_many_sequences_are_admitted_as_were_budgeted_and_not_one_more(
    describe: Callable[[], Description], positions: int
) -> None:
    state = StateLayout.of(describe().build(), 2)
    pool = StatePool(state, PoolSize.worst_case(state, 3, 8192, 512), 512)
    admitted = []
    while (holding := pool.admit(positions)) is not None:
        admitted.append(holding)
        assert len(admitted) <= 3
    assert len(admitted) == 3
    pool.release(admitted.pop())
    assert pool.admit(8192) is not None and pool.admit(1) is None
