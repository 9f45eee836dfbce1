"""Which operations of a program share launches. Pure: from a program's order to groups in an order of their own.

A group is what one launch does, or a few that follow each other. Its operations may have been apart in the program; all
that they read was written before the group, so moving them together changes nothing. A value that only exists inside a
group is never written to memory; where `keep` names such a value, the group does not form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from sparkd.graph import ops
from sparkd.graph.plan import reads, written
from sparkd.graph.program import Program


@dataclass(frozen=True, slots=True)
class Single:
    """One operation by itself."""

    op: ops.Op

    @property
    def members(self) -> tuple[ops.Op, ...]:
        """The operations of the group, in order."""
        return (self.op,)


@dataclass(slots=True)
class Linears:
    """Linear maps of one value; the result of some goes to a sum, and only there."""

    maps: list[ops.Linear]
    adds: dict[int, ops.Add] = field(default_factory=dict)

    @property
    def members(self) -> tuple[ops.Op, ...]:
        """The operations of the group, in order."""
        return (*self.maps, *self.adds.values())


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention with the norms and rotations of its q and k, and the gate of its result."""

    q_norm: ops.QkNorm
    q_rope: ops.Rope
    k_norm: ops.QkNorm
    k_rope: ops.Rope
    attention: ops.Attention
    gate: ops.OutputGate

    @property
    def members(self) -> tuple[ops.Op, ...]:
        """The operations of the group, in order."""
        return self.q_norm, self.q_rope, self.k_norm, self.k_rope, self.attention, self.gate

    @property
    def hidden(self) -> tuple[ops.Value, ...]:
        """What is never written to memory."""
        return self.q_norm.out, self.k_norm.out, self.k_rope.out, self.attention.out


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared expert of a layer; `scalar` and `gated`: what its result is multiplied with, in some models."""

    gate: ops.Linear
    up: ops.Linear
    swiglu: ops.SwiGlu
    down: ops.Linear
    scalar: ops.Linear | None
    gated: ops.OutputGate | None

    @property
    def out(self) -> ops.Value:
        """What the routed experts' sum is added to."""
        return self.down.out if self.gated is None else self.gated.out


@dataclass(frozen=True, slots=True)
class Mixture:
    """Routed experts and the shared one, their sum, the residual, and the norm that the next layer begins with."""

    experts: ops.Experts
    shared: Shared
    both: ops.Add
    residual: ops.Add
    norm: ops.RmsNorm

    @property
    def members(self) -> tuple[ops.Op, ...]:
        """The operations of the group, in order."""
        s = self.shared
        optional = [op for op in (s.scalar, s.gated) if op is not None]
        return self.experts, s.gate, s.up, s.swiglu, s.down, *optional, self.both, self.residual, self.norm


Group = Single | Linears | Heads | Mixture


def groups_of(program: Program, keep: Collection[ops.Value] = ()) -> list[Group]:
    """All operations of a program, each in one group."""
    return list(_Grouping(program, keep).groups())


class _Grouping:
    def __init__(self, program: Program, keep: Collection[ops.Value]) -> None:
        self._ops = program.ops
        self._keep = frozenset(keep)
        self._taken: set[int] = set()
        self._written: set[ops.Value] = set()
        self._readers: dict[ops.Value, list[int]] = {}
        self._writer: dict[ops.Value, int] = {}
        for index, op in enumerate(program.ops):
            for value in set(reads(op)):
                self._readers.setdefault(value, []).append(index)
            out = written(op)
            if out is not None:
                self._writer[out] = index

    def groups(self) -> Iterator[Group]:
        for index, op in enumerate(self._ops):
            if index not in self._taken:
                group = self._group(op)
                inside = {id(member) for member in group.members}
                self._taken.update(i for i, other in enumerate(self._ops) if id(other) in inside)
                self._written.update(out for member in group.members if (out := written(member)) is not None)
                yield group

    def _group(self, op: ops.Op) -> Group:
        found: Heads | Mixture | None = None
        match op:
            case ops.Linear():
                return self._linears(op)
            case ops.QkNorm():
                found = self._heads(op)
            case ops.Experts():
                found = self._mixture(op)
        return found if found is not None and self._forms(found) else Single(op)

    def _forms(self, group: Heads | Mixture) -> bool:
        """Whether everything is there that the group reads, and nobody else reads what it does not write to memory."""
        inside = {id(member) for member in group.members}
        outs = [written(member) for member in group.members]
        if any(value not in self._written and value not in outs for member in group.members for value in reads(member)):
            return False
        visible = {group.gate.out} if isinstance(group, Heads) else {group.residual.out, group.norm.out}
        hidden = [out for out in outs if out is not None and out not in visible]
        readers = [self._ops[i] for value in hidden for i in self._readers.get(value, [])]
        return not self._keep.intersection(hidden) and all(id(reader) in inside for reader in readers)

    # ---- the patterns ----

    def _linears(self, first: ops.Linear) -> Linears:
        same = [self._ops[i] for i in self._readers[first.x] if i not in self._taken]
        group = Linears([op for op in same if isinstance(op, ops.Linear)])
        for number, linear in enumerate(group.maps):
            add = self._only_reader(linear.out)
            if isinstance(add, ops.Add) and linear.out not in self._keep and add.x != add.y:
                other = add.y if add.x == linear.out else add.x
                if other in self._written:
                    group.adds[number] = add
        return group

    def _heads(self, q_norm: ops.QkNorm) -> Heads | None:
        q_rope = self._only_reader(q_norm.out)
        attention = self._only_reader(q_rope.out) if isinstance(q_rope, ops.Rope) else None
        if not isinstance(q_rope, ops.Rope) or not isinstance(attention, ops.Attention) or attention.q != q_rope.out:
            return None
        k_rope = self._write_of(attention.k)
        k_norm = self._write_of(k_rope.x) if isinstance(k_rope, ops.Rope) else None
        gate = self._only_reader(attention.out)
        if not (isinstance(k_rope, ops.Rope) and isinstance(k_norm, ops.QkNorm) and isinstance(gate, ops.OutputGate)):
            return None
        if k_rope.table != q_rope.table or k_norm.eps != q_norm.eps or gate.x != attention.out:
            return None
        return Heads(q_norm, q_rope, k_norm, k_rope, attention, gate)

    def _mixture(self, experts: ops.Experts) -> Mixture | None:
        both = self._only_reader(experts.out)
        residual = self._only_reader(both.out) if isinstance(both, ops.Add) else None
        if not isinstance(both, ops.Add) or not isinstance(residual, ops.Add):
            return None
        shared = self._shared(both.y if both.x == experts.out else both.x, experts.x)
        after = [self._ops[i] for i in self._readers.get(residual.out, [])]
        norm = next((op for op in after if isinstance(op, ops.RmsNorm)), None)
        return None if shared is None or norm is None else Mixture(experts, shared, both, residual, norm)

    def _shared(self, out: ops.Value, x: ops.Value) -> Shared | None:
        last = self._write_of(out)
        gated = last if isinstance(last, ops.OutputGate) else None
        scalar = self._write_of(gated.gate) if gated is not None else None
        if gated is not None and not (gated.per_head and gated.heads == 1 and isinstance(scalar, ops.Linear)):
            return None
        down = self._write_of(gated.x) if gated is not None else last
        swiglu = self._write_of(down.x) if isinstance(down, ops.Linear) else None
        if not isinstance(down, ops.Linear) or not isinstance(swiglu, ops.SwiGlu):
            return None
        gate, up = self._write_of(swiglu.gate), self._write_of(swiglu.up)
        if not (isinstance(gate, ops.Linear) and isinstance(up, ops.Linear) and gate.x == up.x == x):
            return None
        if scalar is not None and not (isinstance(scalar, ops.Linear) and scalar.x == x and scalar.out.width == 1):
            return None
        return Shared(gate, up, swiglu, down, scalar if isinstance(scalar, ops.Linear) else None, gated)

    # ---- the program as a graph ----

    def _only_reader(self, value: ops.Value) -> ops.Op | None:
        readers = self._readers.get(value, [])
        return self._ops[readers[0]] if len(readers) == 1 else None

    def _write_of(self, value: ops.Value) -> ops.Op | None:
        index = self._writer.get(value)
        return None if index is None or index in self._taken else self._ops[index]
