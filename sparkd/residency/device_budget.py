"""How the memory of a graphics card is divided: what every token needs first, then slots for experts. Pure.

    limit = context + core + KV + state + workspace  |  reserve + ring + hot  |  slack

What stands before the first bar is taken or nothing runs; to the workspace belong the two buffers that prompts stream
experts through. The longer the longest step of a prompt, the more of it goes there, and to KV of sliding windows, and
the less often cold experts cross the link: `choose_step`. The reserve holds two buffers for each size of record:
through them goes what the card can neither hold nor read where it is. The ring is a number of slots per expert layer;
all other whole slots are hot. When every expert is hot, ring and reserve are not needed and take nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkd.residency.budget import GIB
from sparkd.residency.slabs import SlabSize

#: Bytes of a CUDA context with our kernels. Stated, not measured.
CARD_CONTEXT = 400 << 20
#: The reserve, for each size of record: so many buffers of what a token uses of a layer.
RESERVE_PARTS = 2
#: Buffers that prompts stream through.
STAGING_PARTS = 2
#: Rows that the longest step of a prompt may have: the least of these, or more where they cost few slots.
ROWS = (512, 1024, 2048)
#: Of the bytes of slots beside the shortest of those steps, what a longer one may take: on paper a tenth of decoding at
#: most, for prompts twice to four times as fast (docs/plan.md).
ROWS_SHARE = 0.15
#: Slots of the ring in each expert layer, unless asked otherwise.
RING_SLOTS = 32
#: The part of a whole card that is left to driver, display and others (a 16 GiB RTX 5060 Ti shows 15.3 GiB free).
CARD_MARGIN = 0.045


@dataclass(frozen=True, slots=True)
class Stack:
    """The records of one expert layer: `experts` of them, `record_bytes` each."""

    experts: int
    record_bytes: int

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return self.experts * self.record_bytes


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Bytes a worker takes on a card beside slots, and what the slots are for.

    `rows`: of the longest step of a prompt that KV and workspace have room for.
    """

    context: int
    core: int
    kv: int
    state: int
    workspace: int
    stacks: tuple[Stack, ...]
    rows: int = ROWS[0]

    @property
    def fixed(self) -> int:
        """What is taken whatever the number of slots."""
        return self.context + self.core + self.kv + self.state + self.workspace

    @property
    def records(self) -> int:
        """Bytes of all experts."""
        return sum(stack.size for stack in self.stacks)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """`needs` divided into `limit` bytes: `hot` slots of each expert layer, and bytes of ring and reserve.

    `ring_slots` are those of one layer, `reserve_slots` those of one size of record. When `missing` is not 0 there are
    no slots at all.
    """

    needs: DeviceNeeds
    limit: int
    hot: tuple[int, ...]
    ring_slots: int
    ring: int
    reserve: int
    reserve_slots: int = 0

    @property
    def hot_bytes(self) -> int:
        """Bytes of all hot slots."""
        return sum(n * stack.record_bytes for n, stack in zip(self.hot, self.needs.stacks, strict=True))

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots but the reserve."""
        return self.ring + self.hot_bytes

    @property
    def used(self) -> int:
        """Bytes that are planned."""
        return self.needs.fixed + self.reserve + self.ring + self.hot_bytes

    @property
    def missing(self) -> int:
        """Bytes by which what must be there exceeds the limit; 0: it fits."""
        return max(self.used - self.limit, 0)

    @property
    def slack(self) -> int:
        """Bytes that are left, less than the largest record unless everything is hot."""
        return max(self.limit - self.used, 0)

    @property
    def residency(self) -> float:
        """The share of all experts that is hot; 1 for a model without experts."""
        return sum(self.hot) / experts if (experts := sum(stack.experts for stack in self.needs.stacks)) else 1.0


def divide(needs: DeviceNeeds, limit: int, ring_slots: int, reserve_slots: int) -> DeviceBudget:
    """Divide `limit` bytes: `reserve_slots` of each size of record, up to `ring_slots` in each layer, the rest hot.

    The ring gives way to the hot set when there are fewer than twice its slots. Layers get equally many hot slots, the
    first ones one more while there is room.
    """
    stacks = needs.stacks
    if needs.fixed + needs.records <= limit:
        return DeviceBudget(needs, limit, tuple(stack.experts for stack in stacks), 0, 0, 0)
    reserve = reserve_slots * sum({stack.record_bytes for stack in stacks})
    left = limit - needs.fixed - reserve
    if left < 0 or not stacks:
        return DeviceBudget(needs, limit, (0,) * len(stacks), 0, 0, reserve, reserve_slots)
    row = sum(stack.record_bytes for stack in stacks)
    ring_slots = min(ring_slots, left // row // 2)
    left -= ring_slots * row
    most = max(stack.experts for stack in stacks)
    level = _level(stacks, left, most)
    hot = [min(level, stack.experts) for stack in stacks]
    left -= sum(n * stack.record_bytes for n, stack in zip(hot, stacks, strict=True))
    for index, stack in enumerate(stacks):
        if hot[index] < stack.experts and stack.record_bytes <= left:
            hot[index] += 1
            left -= stack.record_bytes
    return DeviceBudget(needs, limit, tuple(hot), ring_slots, ring_slots * row, reserve, reserve_slots)


def choose_step(divided: Iterable[DeviceBudget]) -> DeviceBudget:
    """Of budgets for ever longer steps of a prompt, the shortest first, the longest that costs few slots.

    What is whole stays whole.
    """
    shortest, *longer = divided
    least = shortest.slots_bytes * (1 - ROWS_SHARE) if shortest.residency < 1 else shortest.slots_bytes
    fitting = [budget for budget in longer if not budget.missing and budget.slots_bytes >= least]
    return fitting[-1] if fitting else shortest


def step_rows(context: int) -> tuple[int, ...]:
    """Those of `ROWS` that a sequence of `context` positions can make use of."""
    return tuple(rows for rows in ROWS if rows <= max(context, ROWS[0]))


def staging_slots(top_k: int, rows: int) -> int:
    """Records of a buffer that prompts stream through, for steps of so many rows.

    A long step computes longer before a layer's choice is known: meanwhile the link fills the buffers.
    """
    return max(1, top_k * rows // ROWS[0])


def slab_sizes(budget: DeviceBudget, slabs: Sequence[int]) -> list[SlabSize]:
    """The slots of each slab, `slabs[layer]` being that of an expert layer: hot set and ring of its layers together.

    What a layer has too many of for its own experts others of its slab use.
    """
    sizes = []
    for slab in range(max(slabs, default=-1) + 1):
        layers = [layer for layer, number in enumerate(slabs) if number == slab]
        records = sum(budget.needs.stacks[layer].experts for layer in layers)
        ordinary = sum(budget.hot[layer] + budget.ring_slots for layer in layers)
        if ordinary >= records:
            sizes.append(SlabSize(records, reserve=0))
        else:
            sizes.append(SlabSize(ordinary + budget.reserve_slots, budget.reserve_slots))
    return sizes


def _level(stacks: Sequence[Stack], left: int, most: int) -> int:
    """The most slots that every layer can have (or all of its experts) in `left` bytes."""
    low, high = 0, most
    while low < high:
        level = (low + high + 1) // 2
        if sum(min(level, stack.experts) * stack.record_bytes for stack in stacks) <= left:
            low = level
        else:
            high = level - 1
    return low


def allowance(free: int, total: int, wanted: int, context: int) -> tuple[int, str]:
    """Bytes that may be allocated of a card that reports `free` of `total` beside our context of `context` bytes.

    All but a margin; with the context no more than `wanted`, where that is not 0. Never less than 0; and a note as of
    `usable`.
    """
    size, note = usable(free, total)
    size -= int(total * CARD_MARGIN)
    if wanted:
        size = min(size, wanted - context)
    return max(size, 0), note


def usable(free: int, total: int, margin: int = 0) -> tuple[int, str]:
    """Bytes that may be planned of a card that reports `free` of `total`, and a note when the report cannot be.

    `margin` bytes of `total` are left to others. Never less than 0, never more than `total - margin`.
    """
    most = max(total - margin, 0)
    if total <= 0:
        return 0, f"the card reports {total} bytes of memory: there is nothing to plan with"
    if free > total:
        return most, f"{free / GIB:.2f} GiB are more than the card has ({total / GIB:.2f} GiB): {most / GIB:.2f} count"
    if free <= 0:
        return 0, f"none of the card's {total / GIB:.2f} GiB is free"
    return min(free, most), ""
