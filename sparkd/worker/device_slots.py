"""Memory of a device for the slots of each slab, in blocks that can be given back one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.device import Device
from sparkd.residency.slabs import SlabSize

#: Bytes of a block: what is given back at once when others need the card's memory.
BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Slots of a slab that lie in one piece of memory."""

    slab: int
    slots: range
    address: int
    bytes: int


class DeviceSlots:
    """Slots of `sizes[slab]`, each of `record_bytes[slab]`. DeviceError where the device has no room for all."""

    def __init__(
        self,
        device: Device,
        sizes: Sequence[SlabSize],
        record_bytes: Sequence[int],
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.sizes = list(sizes)
        self.record_bytes = list(record_bytes)
        self._device = device
        self._addresses: list[NDArray[np.uint64]] = []
        #: Blocks of ordinary slots, those that are there and those that were given back.
        self._blocks: list[Block] = []
        self._given: list[Block] = []
        for slab, (size, record) in enumerate(zip(sizes, record_bytes, strict=True)):
            self._addresses.append(np.zeros(size.slots, np.uint64))
            together = max(1, block_bytes // record)
            for first, end in ((0, size.ordinary), (size.ordinary, size.slots)):
                for start in range(first, end, together):
                    slots = range(start, min(start + together, end))
                    block = Block(slab, slots, device.allocate(len(slots) * record), len(slots) * record)
                    self._place(block)
                    if first == 0:
                        self._blocks.append(block)

    def address(self, slab: int, slot: int) -> int:
        """Where a slot lies. IndexError outside the slab."""
        return int(self._addresses[slab][slot])

    @property
    def bytes(self) -> int:
        """Of ordinary slots that are there."""
        return sum(block.bytes for block in self._blocks)

    def spare_block(self, slabs: Collection[int], taken: Collection[Block]) -> Block | None:
        """A block to give up beside `taken`: the last one of that of `slabs` that has most; None when there is none."""
        left = [block for block in self._blocks if block.slab in slabs and block not in taken]
        if not left:
            return None
        sizes = {slab: sum(block.bytes for block in left if block.slab == slab) for slab in {b.slab for b in left}}
        largest = max(sizes, key=lambda slab: sizes[slab])
        return [block for block in left if block.slab == largest][-1]

    def give_back(self, block: Block) -> None:
        """Free the memory of a block that nobody reads or writes any more."""
        self._blocks.remove(block)
        self._addresses[block.slab][block.slots.start : block.slots.stop] = 0
        self._device.free(block.address)
        self._given.append(block)

    def given_block(self) -> Block | None:
        """The block that was given back last; None when all are there."""
        return self._given[-1] if self._given else None

    def take_back(self) -> Block:
        """Allocate that block again, somewhere. IndexError without one, DeviceError where the device has no room."""
        given = self._given[-1]
        block = dataclasses.replace(given, address=self._device.allocate(given.bytes))
        self._given.pop()
        self._blocks.append(block)
        self._place(block)
        return block

    def _place(self, block: Block) -> None:
        places = np.arange(len(block.slots), dtype=np.uint64) * np.uint64(self.record_bytes[block.slab])
        self._addresses[block.slab][block.slots.start : block.slots.stop] = np.uint64(block.address) + places
