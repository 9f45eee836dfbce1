"""Streams records through two buffers of a device: while compute reads one, the other is filled.

    compute   │ what is there │ part 0 │ part 1 │ part 2 ...
    staging   │ part 0, part 1 ........│ part 2 │ part 3 ...

A buffer is filled once all that compute was given to read it before has ended, and read once it is full. Both orders
are kept by the streams: nobody waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sparkd.executors.device import Device, Event, Stream
from sparkd.residency.device_budget import STAGING_PARTS

#: Gives a stream the copy of a record to an address.
Copy = Callable[[Stream, int, int], None]


class Staging:
    """`STAGING_PARTS` buffers of `count` records of up to `record_bytes`. DeviceError where there is no room."""

    def __init__(self, device: Device, count: int, record_bytes: int) -> None:
        self.count = count
        self._record_bytes = record_bytes
        self._buffers = [device.allocate(max(1, count * record_bytes)) for _ in range(STAGING_PARTS)]
        self._stream = device.stream()
        #: Of each buffer: what reads it ends here.
        self._read: list[Event | None] = [None] * STAGING_PARTS

    def stream(self, compute: Stream, records: Sequence[int], copy: Copy) -> Iterator[list[tuple[int, int]]]:
        """Copy each record once; part by part which ones are there, and where. The first parts begin now.

        They are there for what compute is given until the next part is asked for.
        """
        parts = [records[first : first + self.count] for first in range(0, len(records), self.count)]
        full = [self._fill(number, part, copy) for number, part in enumerate(parts[:STAGING_PARTS])]
        return self._read_parts(compute, parts, full, copy)

    def _read_parts(
        self, compute: Stream, parts: Sequence[Sequence[int]], full: list[Event], copy: Copy
    ) -> Iterator[list[tuple[int, int]]]:
        for number, part in enumerate(parts):
            compute.wait(full[number])
            yield list(zip(part, self._places(number, part), strict=True))
            self._read[number % STAGING_PARTS] = compute.record()
            if number + STAGING_PARTS < len(parts):
                full.append(self._fill(number + STAGING_PARTS, parts[number + STAGING_PARTS], copy))

    def _fill(self, number: int, part: Sequence[int], copy: Copy) -> Event:
        read = self._read[number % STAGING_PARTS]
        if read is not None:
            self._stream.wait(read)
        for record, place in zip(part, self._places(number, part), strict=True):
            copy(self._stream, record, place)
        return self._stream.record()

    def _places(self, number: int, part: Sequence[int]) -> range:
        buffer = self._buffers[number % STAGING_PARTS]
        return range(buffer, buffer + len(part) * self._record_bytes, self._record_bytes)
