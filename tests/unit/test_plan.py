"""The plan of a program's values: nothing that is still read is overwritten."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.graph.ops import Add, Embed, Linear, Logits, Op, RmsNorm, Value, Weight
from sparkd.graph.plan import ALIGNMENT, lifetimes, plan, reads, written
from sparkd.graph.program import Program


def program_of(*ops: Op) -> Program:
    return Program("test", 32, 10, 64, ops, (), (), (), (), ())


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, tuple[Value, ...]]:
    """Random straight-line programs, and some of their values to keep."""
    values = [Value("v0", draw(st.integers(1, 70)))]
    ops: list[Op] = [Embed(Weight("w", 10, values[0].width), values[0])]
    for index in range(1, draw(st.integers(1, 25))):
        out = Value(f"v{index}", draw(st.integers(1, 70)))
        x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        ops.append(Add(x, y, out))
        values.append(out)
    return program_of(*ops), tuple(draw(st.sets(st.sampled_from(values))))


@given(programs())
@settings(deadline=None)
def test_values_that_live_at_the_same_time_never_overlap(case: tuple[Program, tuple[Value, ...]]) -> None:
    program, keep = case
    placed = plan(program, keep)
    lives = lifetimes(program, keep)
    for i, a in enumerate(lives):
        begin = placed.offsets[a.value]
        assert begin % ALIGNMENT == 0
        assert begin + a.value.width <= placed.width
        for b in lives[:i]:
            if a.first <= b.last and b.first <= a.last:
                start = placed.offsets[b.value]
                assert begin + a.value.width <= start or start + b.value.width <= begin


@given(programs())
@settings(deadline=None)
def test_kept_values_are_not_overwritten_by_any_later_operation(case: tuple[Program, tuple[Value, ...]]) -> None:
    program, keep = case
    last = {life.value: life.last for life in lifetimes(program, keep)}
    assert all(last[value] == len(program.ops) for value in keep)


def test_a_chain_of_any_length_needs_room_for_two_values() -> None:
    values = [Value(f"v{i}", 32) for i in range(20)]
    norms = [RmsNorm(a, Weight("n", 1, 32), b, 1e-6) for a, b in itertools.pairwise(values)]
    program = program_of(Embed(Weight("e", 10, 32), values[0]), *norms, Logits(values[-1], Weight("o", 10, 32)))
    assert plan(program).width == 64
    assert plan(program, values).width == 20 * 32


def test_operands_are_told_from_results() -> None:
    x, y, z = (Value(name, 4) for name in "xyz")
    assert reads(Add(x, y, z)) == (x, y)
    assert written(Add(x, y, z)) == z
    assert reads(Logits(x, Weight("o", 10, 4))) == (x,)
    assert written(Logits(x, Weight("o", 10, 4))) is None


def test_programs_that_read_before_writing_or_write_twice_are_refused() -> None:
    x, y = Value("x", 4), Value("y", 4)
    embed = Embed(Weight("e", 10, 4), x)
    with pytest.raises(ValueError, match="operation 0 reads x before"):
        plan(program_of(Linear(x, Weight("w", 4, 4), y), embed))
    with pytest.raises(ValueError, match="operation 1 writes x, which operation 0 wrote"):
        plan(program_of(embed, embed))
    with pytest.raises(ValueError, match="y is to be kept"):
        plan(program_of(embed), keep=[y])
