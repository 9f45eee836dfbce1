"""Lets a device read the arena's records where they are: host memory is registered piece by piece, while all serve.

A piece is a number of whole slots that begins and ends with a page, since pages belong to one registration each, and
neither kernels nor copies may read across two. Pieces are small: the driver holds a lock meanwhile. Where one is
refused (a limit on locked memory, WSL2), smaller ones are tried, down to the fewest slots that end with a page; where
those are too, what was registered stays so, and the rest is brought through the reserve.
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
        self._piece_bytes = piece_bytes
        #: Slabs that are left, and of the first of them the first slot that is.
        self._slabs = deque(arena.layout.slabs)
        self._first = 0
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
        """Register one piece; false when there is none left, or not even the least is taken."""
        while self._slabs:
            slab = self._slabs[0]
            # So many slots end with a page.
            together = PAGE // math.gcd(PAGE, slab.record_bytes)
            count = max(1, self._piece_bytes // slab.record_bytes // together) * together
            end = min(self._first + count, slab.slots)
            start = self._first * slab.record_bytes
            address = self._arena.region.address + slab.offset + start
            size = -(-(end * slab.record_bytes - start) // PAGE) * PAGE
            try:
                there = self._device.register(address, size)
            except DeviceError as error:
                if end - self._first > together:
                    self._piece_bytes = size // 2
                    continue
                self.refused = str(error)
                _log.warning("experts are copied to the card when they are used: %s", error)
                return False
            self.bytes += size
            self._done.append((address, size, there))
            self._first = end
            if end == slab.slots:
                self._slabs.popleft()
                self._first = 0
            return True
        return False

    def _run(self) -> None:
        while not self._stop.is_set() and self.register_next():
            self._wake()
