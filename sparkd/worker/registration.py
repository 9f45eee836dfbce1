"""Lets a device read the arena's records where they are: host memory is registered piece by piece, while all serve.

A piece is a number of whole slots that begins and ends with a page, since pages belong to one registration each, and
neither kernels nor copies may read across two. Pieces are small: the driver holds a lock meanwhile. Where one is
refused (a limit on locked memory, WSL2), what was registered stays so, and the rest is brought through the reserve.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator

from sparkd.errors import DeviceError
from sparkd.executors.device import Device
from sparkd.store.arena import Arena
from sparkd.store.layout import PAGE

#: Bytes of a piece.
PIECE_BYTES = 256 << 20
_log = logging.getLogger(__name__)


class Registration:
    """A thread that registers the slabs of an arena; `wake` is called, in that thread, with each piece that is done."""

    def __init__(
        self, device: Device, arena: Arena, wake: Callable[[], None] = lambda: None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._device = device
        self._arena = arena
        self._wake = wake
        self._pieces = self._cut(piece_bytes)
        self._done: deque[tuple[int, int, int]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)
        #: Bytes that are registered; why it is not all, empty while nothing was refused.
        self.bytes = 0
        self.refused = ""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def take(self) -> Iterator[tuple[int, int, int]]:
        """Pieces that are new: address in this process, bytes, and the address at which the device reads them."""
        while self._done:
            yield self._done.popleft()

    def close(self) -> None:
        """End after the piece that is being registered."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def register_next(self) -> bool:
        """Register one piece; false when there is none left, or it is refused."""
        address, size = next(self._pieces, (0, 0))
        if not size:
            return False
        try:
            there = self._device.register(address, size)
        except DeviceError as error:
            self.refused = str(error)
            _log.warning("experts are copied to the card when they are used: %s", error)
            return False
        self.bytes += size
        self._done.append((address, size, there))
        return True

    def _run(self) -> None:
        while not self._stop.is_set() and self.register_next():
            self._wake()

    def _cut(self, piece_bytes: int) -> Iterator[tuple[int, int]]:
        for slab in self._arena.layout.slabs:
            # So many slots end with a page.
            together = PAGE // math.gcd(PAGE, slab.record_bytes)
            count = max(1, piece_bytes // slab.record_bytes // together) * together
            base = self._arena.region.address + slab.offset
            for first in range(0, slab.slots, count):
                end = min(first + count, slab.slots) * slab.record_bytes
                start = first * slab.record_bytes
                yield base + start, -(-(end - start) // PAGE) * PAGE
