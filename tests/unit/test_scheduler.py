"""What a step is made of: one row of everybody who decodes, at most one chunk, about as long as it may take."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.ipc.messages import Sampling
from sparkd.text.stop import StopMatcher
from sparkd.worker.scheduler import FIRST_CHUNK, Scheduler
from sparkd.worker.sequences import Clock, Sequence


class NoText:
    """A detokenizer for tests that look at no text."""

    def push(self, index: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def sequence(request: int, known: int, computed: int) -> Sequence:
    ids = array("i", [0] * known)
    made = Sequence(
        request, ids, known, 10, Sampling(), None, True, NoText(), StopMatcher([]), Clock()  # type: ignore[arg-type]
    )  # fmt: skip
    made.computed = computed
    if computed == known:
        made.tokens.append(1)
    return made


def test_every_decoding_sequence_gets_one_row_and_the_oldest_prompt_the_chunk() -> None:
    running = [sequence(1, 4, 4), sequence(2, 100, 10), sequence(3, 8, 8), sequence(4, 50, 0)]
    step = Scheduler(512, 0.25).plan(running)
    assert step is not None and step.chunk is not None
    assert [p.sequence.request for p in step.decode] == [1, 3]
    assert (step.chunk.sequence.request, step.chunk.rows) == (2, FIRST_CHUNK)
    assert [p.sequence.request for p in step.pieces] == [1, 3, 2]


def test_nothing_to_do_is_no_step() -> None:
    assert Scheduler(512, 0.25).plan([]) is None


def test_a_chunk_never_reads_beyond_its_prompt() -> None:
    step = Scheduler(512, 0.25).plan([sequence(1, 20, 15)])
    assert step is not None and step.chunk is not None and step.chunk.rows == 5


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(0, 40), st.lists(st.floats(0, 10), max_size=30))
def test_a_step_never_has_more_rows_than_the_executor_takes(known: int, decoding: int, times: list[float]) -> None:
    scheduler = Scheduler(64, 0.25)
    running = [sequence(i, 3, 3) for i in range(decoding)] + [sequence(99, known, 0)]
    for seconds in times:
        step = scheduler.plan(running)
        assert step is not None and step.chunk is not None
        assert step.chunk.rows >= 1
        assert sum(p.rows for p in step.pieces) <= 64
        scheduler.measured(step, seconds)


@settings(deadline=None)
@given(st.floats(1e-5, 0.1), st.floats(0, 0.05))
def test_chunks_settle_where_a_step_takes_as_long_as_it_may(per_row: float, fixed: float) -> None:
    scheduler = Scheduler(4096, 0.25)
    prompt = sequence(1, 10_000, 0)
    for _ in range(60):
        step = scheduler.plan([prompt])
        assert step is not None and step.chunk is not None
        scheduler.measured(step, fixed + per_row * step.chunk.rows)
    longest = fixed + per_row * scheduler.chunk_rows
    assert longest <= 0.25 + per_row
    assert longest > 0.1 or scheduler.chunk_rows == 4096


def test_a_slow_step_shrinks_the_chunk_at_once_and_a_short_rest_does_not_grow_it() -> None:
    scheduler = Scheduler(512, 0.25)
    for _ in range(3):
        step = scheduler.plan([sequence(1, 10_000, 0)])
        assert step is not None
        scheduler.measured(step, 0.05)
    grown = scheduler.chunk_rows
    assert grown == 8 * FIRST_CHUNK
    rest = scheduler.plan([sequence(1, 3, 0)])
    assert rest is not None
    scheduler.measured(rest, 0.001)
    assert scheduler.chunk_rows == grown
    step = scheduler.plan([sequence(1, 10_000, 0)])
    assert step is not None
    scheduler.measured(step, 1.0)
    assert scheduler.chunk_rows == grown // 4


def test_the_stage_of_a_sequence_follows_from_what_was_read() -> None:
    fresh = sequence(1, 5, 0)
    assert not fresh.decoding and fresh.unread == 5
    ready = sequence(2, 5, 5)
    assert ready.decoding and ready.unread == 1 and ready.outputs == 1
    assert ready.positions == 15


def test_where_experts_are_read_from_the_disk_a_chunk_that_nobody_waits_for_is_as_long_as_it_can_be():
    scheduler = Scheduler(512, 0.25, alone_whole=True)
    prompt = sequence(1, 2000, 0)
    step = scheduler.plan([prompt])
    assert step.chunk.rows == 512
    scheduler.measured(step, 30.0)
    assert scheduler.plan([prompt]).chunk.rows == 512
    mixed = scheduler.plan([sequence(2, 5, 5), prompt])
    assert (len(mixed.decode), mixed.chunk.rows) == (1, FIRST_CHUNK)
    scheduler.measured(mixed, 1.0)
    assert scheduler.plan([sequence(2, 5, 5), prompt]).chunk.rows < FIRST_CHUNK


def test_on_a_card_a_chunk_beside_others_is_never_shorter_than_what_takes_no_less_time():
    """Each brings all experts that no slot holds: half as many rows would take as long, twice as often."""
    scheduler = Scheduler(2048, 0.25, least_rows=512, alone_whole=True)
    prompt, other = sequence(1, 9000, 0), sequence(2, 5, 5)
    assert scheduler.plan([prompt]).chunk.rows == 2048
    for seconds in (1.0, 0.3, 5.0):
        step = scheduler.plan([other, prompt])
        assert step.chunk.rows == 512
        scheduler.measured(step, seconds)
    for rows in (512, 1024, 2047):
        step = scheduler.plan([other, prompt])
        assert step.chunk.rows == rows
        scheduler.measured(step, 0.1)
    scheduler.measured(scheduler.plan([other, prompt]), 0.5)
    assert 512 < scheduler.plan([other, prompt]).chunk.rows < 2047
