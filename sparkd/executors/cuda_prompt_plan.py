"""How a program is cut and where its values lie for the rows of a prompt. Pure: the forecast asks here too.

A prompt has many rows, so what a layer needs for itself (results of each chosen expert, inner rows) shares memory with
values that live at other times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sparkd.executors.cuda_batch import MAX_ROWS
from sparkd.executors.cuda_groups import Group, Heads, Linears, Mixture, Single, groups_of
from sparkd.graph import ops
from sparkd.graph.plan import Plan, plan
from sparkd.graph.program import Program

#: An expert for which so many rows are expected is brought before the rows of a layer have chosen: seldom in vain
#: (bench/README.md has what other figures would do).
LIKELY_ROWS = 16


@dataclass(frozen=True, slots=True)
class Room:
    """What an expert layer needs for each row beside values, in float32 numbers, all ranks together.

    `ranked`: a result for each; `inner`: an inner row for each.
    """

    ranked: int
    inner: int

    @property
    def width(self) -> int:
        """All of it: results, the products with gate and with up, and both quantised forms."""
        return self.ranked + 2 * self.inner + forms_width(self.inner)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that steps take beside weights and state: `row` for each row of a prompt, `graphs` with their logits."""

    row: int
    graphs: int

    def bytes(self, rows: int) -> int:
        """For prompts of at most `rows` rows in a step, and for graphs."""
        return rows * self.row + self.graphs


def forms_width(elements: int) -> int:
    """Float32 numbers that both quantised forms of as many elements fill: bytes, and a factor for each 256 and 32."""
    return -(-elements * (64 + 1 + 8) // 128)


def prompt_groups(program: Program, keep: Collection[ops.Value] = ()) -> list[Group]:
    """All operations, each in one group; no mixtures."""
    return [part for group in groups_of(program, keep) for part in _parts(group)]


def prompt_plan(program: Program, groups: list[Group], keep: Collection[ops.Value] = ()) -> Plan:
    """Where values lie, and by the number of a group what it needs for itself."""
    hidden = [value for group in groups if isinstance(group, Heads) for value in group.hidden]
    rooms = {number: room for number, group in enumerate(groups) if (room := _room(program, group))}
    return plan(program, keep, [group.members for group in groups], hidden, rooms)


def experts_room(program: Program, op: ops.Experts) -> Room:
    """What an expert layer needs."""
    layer = program.expert_layers[op.layer]
    return Room(layer.top_k * op.out.width, layer.top_k * layer.gate.rows)


def multiplied_width(program: Program) -> int:
    """The widest value that is multiplied with weights."""
    return max(op.x.width for op in program.ops if isinstance(op, ops.Linear | ops.Route | ops.Experts | ops.Logits))


def row_width(program: Program) -> int:
    """Memory that a row of a prompt takes, in float32 numbers."""
    return prompt_plan(program, prompt_groups(program)).width + forms_width(multiplied_width(program))


def workspace_of(program: Program) -> Workspace:
    """What steps of `program` take."""
    return Workspace(4 * row_width(program), 4 * MAX_ROWS * (program.vocab + graph_width(program)))


def graph_width(program: Program) -> int:
    """Memory that a row of a graph takes beside logits, in float32 numbers: values, and the forms of each of them."""
    multiplied = {op.x for op in program.ops if isinstance(op, ops.Linear | ops.Route | ops.Experts | ops.Logits)}
    values = plan(program, groups=[group.members for group in groups_of(program)]).width
    return values + sum(forms_width(value.width) for value in multiplied)


def _room(program: Program, group: Group) -> int:
    match group:
        case Single(ops.Experts() as op):
            return experts_room(program, op).width
        case Single(ops.Route() as op):
            return op.experts
        case Single(ops.GatedDelta() as op):
            return 2 * op.k_heads * op.head_dim + 2 * op.v_heads
        case _:
            return 0


def _parts(group: Group) -> Iterator[Group]:
    """A mixture as groups of its own, the shared expert first: it is computed while the host looks at the choice."""
    if not isinstance(group, Mixture):
        yield group
        return
    shared = group.shared
    yield Linears([op for op in (shared.gate, shared.up, shared.scalar) if op is not None])
    yield Single(shared.swiglu)
    yield Linears([shared.down])
    yield Single(group.experts)
    for op in (shared.gated, group.both, group.residual, group.norm):
        if op is not None:
            yield Single(op)
