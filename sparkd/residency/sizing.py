"""How many slots of each record size a number of bytes buys, and how a slab shares them out. Pure.

Every slab gets the same share of its records, so that every layer is served alike. Of a slab that does not hold all of
them, the reserve has two *parts*: one is read from while the next is being filled, in a prompt as well as in decode. A
part is what one token needs of a layer, or more where records are so small that a disk would be read in small pieces.
The reserve never takes more than a third of the slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkd.residency.slabs import SlabSize

#: Bytes of one part of the reserve, where the records of a layer are as many: enough to keep a disk busy.
PART_BYTES = 16 << 20
#: The reserve has two parts, and at most this share of the slab.
_PARTS = 2
_RESERVE_SHARE = 3
#: Slots kept free: this share of what a token uses of the slab, and at most this share of the ordinary slots.
_SPARE_OF_USE = 4
_SPARE_SHARE = 32
#: Shares of the records are tried in steps of one in so many: fewer than a slab has records.
_STEPS = 1 << 20


@dataclass(frozen=True, slots=True)
class SlabNeed:
    """`records` of `record_bytes` each, in layers of at most `experts`; a token uses at most `top_k` of a layer."""

    record_bytes: int
    records: int
    experts: int
    top_k: int


def slabs_bytes(needs: Sequence[SlabNeed], sizes: Sequence[SlabSize], page: int = 1) -> int:
    """Bytes of slabs of these sizes, each up to a whole `page`."""
    return _bytes(needs, [size.slots for size in sizes], page)


def smallest_slabs(needs: Sequence[SlabNeed]) -> list[SlabSize]:
    """The fewest slots that serve these records at all."""
    return [_shared_out(need, _least(need)) for need in needs]


def size_slabs(needs: Sequence[SlabNeed], budget: int, page: int = 1) -> list[SlabSize]:
    """The most slots whose bytes (`slabs_bytes`) are within `budget`; the same for any budget down to those bytes.

    ValueError when not even the smallest slabs are.
    """
    if _bytes(needs, [_least(need) for need in needs], page) > budget:
        raise ValueError(f"{budget} bytes are too few for slabs of {len(needs)} sizes")
    low, high = 0, _STEPS
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(needs, _slots(needs, middle), page) <= budget:
            low = middle
        else:
            high = middle - 1
    slots = _slots(needs, low)
    open_slabs = {number for number, need in enumerate(needs) if slots[number] < need.records}
    while open_slabs:
        number = min(open_slabs, key=lambda n: (slots[n] / needs[n].records, n))
        slots[number] += 1
        if _bytes(needs, slots, page) > budget:
            slots[number] -= 1
            open_slabs.remove(number)
        elif slots[number] == needs[number].records:
            open_slabs.remove(number)
    return [_shared_out(need, count) for need, count in zip(needs, slots, strict=True)]


def _bytes(needs: Sequence[SlabNeed], slots: Sequence[int], page: int) -> int:
    return sum(-(-need.record_bytes * count // page) * page for need, count in zip(needs, slots, strict=True))


def _slots(needs: Sequence[SlabNeed], share: int) -> list[int]:
    return [max(need.records * share // _STEPS, _least(need)) for need in needs]


def _least(need: SlabNeed) -> int:
    """One slot that is read while another is filled."""
    return min(need.records, 2)


def _shared_out(need: SlabNeed, slots: int) -> SlabSize:
    if slots == need.records:
        return SlabSize(slots, reserve=0)
    part = min(max(need.top_k, -(-PART_BYTES // need.record_bytes)), need.experts)
    reserve = max(min(_PARTS * part, slots // _RESERVE_SHARE), 1)
    used = need.top_k * -(-need.records // need.experts)
    spare = min(used // _SPARE_OF_USE, (slots - reserve) // _SPARE_SHARE)
    return SlabSize(slots, reserve, spare)
