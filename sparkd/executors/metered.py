"""A device of which no more is allocated than was granted."""

from __future__ import annotations

from sparkd.errors import BudgetError
from sparkd.executors.device import Device

#: Bytes to which a driver rounds an allocation.
_GRAIN = 512


class Metered:
    """Implements `Device` on another one: `used` bytes are allocated now, `limit` at most; else BudgetError.

    `free`: words about what of the card others had left when the limit was made.
    """

    def __init__(self, device: Device, limit: int, free: str = "") -> None:
        self.limit = limit
        self.free_at_first = free
        self.used = 0
        self.context = device.context
        self._device = device
        self._sizes: dict[int, int] = {}
        self.compile, self.capture = device.compile, device.capture
        self.pinned, self.register, self.stream, self.memory = (
            device.pinned,
            device.register,
            device.stream,
            device.memory,
        )
        self.upload, self.download, self.copy = device.upload, device.download, device.copy
        self.zero, self.launch, self.call = device.zero, device.launch, device.call

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, undefined contents."""
        taken = -(-size // _GRAIN) * _GRAIN
        if self.used + taken > self.limit:
            raise BudgetError(
                f"needs more than the {self.limit} bytes of GPU memory that may be used{self.free_at_first}:"
                f" {size} beside {self.used}",
                where="memory.vram_gib",
                fix="lower limits.context or limits.sequences, or give it more",
            )
        address = self._device.allocate(size)
        self._sizes[address] = taken
        self.used += taken
        return address

    def free(self, address: int) -> None:
        """Give memory back."""
        self._device.free(address)
        self.used -= self._sizes.pop(address)
