"""Streams records through two buffers of a device: while compute reads one, the other is filled.

    compute   │ what is there │ part 0 │ part 1 │ part 2 ...
    staging   │ part 0, part 1 ........│ part 2 │ part 3 ...

A buffer is filled once all that compute was given to read it before has ended, and read once it is full. Both orders
are kept by the streams: nobody waits here. The first two parts may begin before it is known what they are wanted for
(`ahead`): of those, compute is told of what is asked for in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparkd.executors.device import Device, Event, Stream
from sparkd.residency.device_budget import STAGING_PARTS
from sparkd.residency.slots import Record

#: Gives a stream the copy of a record to an address.
Copy = Callable[[Stream, Record, int], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """Records in a buffer; they are there after `full`."""

    records: Sequence[Record]
    full: Event


class Staging:
    """`STAGING_PARTS` buffers of `count` records of up to `record_bytes`. DeviceError where there is no room."""

    def __init__(self, device: Device, count: int, record_bytes: int) -> None:
        self._count = count
        self._record_bytes = record_bytes
        self._buffers = [device.allocate(max(1, count * record_bytes)) for _ in range(STAGING_PARTS)]
        self._stream = device.stream()
        #: Of each buffer: what reads it ends here.
        self._read: list[Event | None] = [None] * STAGING_PARTS
        self._ahead: list[_Part] = []

    @property
    def room(self) -> int:
        """Records that all buffers hold."""
        return STAGING_PARTS * self._count

    @property
    def buffer(self) -> tuple[int, int]:
        """Address and bytes of a buffer, for whoever uses it while nothing streams."""
        return self._buffers[0], max(1, self._count * self._record_bytes)

    def ahead(self, records: Sequence[Record], copy: Copy) -> None:
        """Begin to copy up to `room` records for the next `stream`, whoever of them that asks for."""
        self._ahead = [self._fill(number, part, copy) for number, part in enumerate(self._cut(records[: self.room]))]

    def stream(self, compute: Stream, records: Sequence[Record], copy: Copy) -> Iterator[list[tuple[Record, int]]]:
        """Copy each record once; part by part which ones are there, and where. The first parts begin now.

        They are there for what compute is given until the next part is asked for.
        """
        begun, self._ahead = self._ahead, []
        early = {record for part in begun for record in part.records}
        left = self._cut([record for record in records if record not in early])
        while left and len(begun) < STAGING_PARTS:
            begun.append(self._fill(len(begun), left.pop(0), copy))
        return self._read_parts(compute, begun, left, frozenset(records), copy)

    def _read_parts(
        self, compute: Stream, parts: list[_Part], left: list[Sequence[Record]], wanted: frozenset[Record], copy: Copy
    ) -> Iterator[list[tuple[Record, int]]]:
        for number, part in enumerate(parts):
            places = zip(part.records, self._places(number, part.records), strict=True)
            told = [(record, place) for record, place in places if record in wanted]
            if told:
                compute.wait(part.full)
                yield told
                self._read[number % STAGING_PARTS] = compute.record()
            if left:
                parts.append(self._fill(number + STAGING_PARTS, left.pop(0), copy))

    def _fill(self, number: int, records: Sequence[Record], copy: Copy) -> _Part:
        read = self._read[number % STAGING_PARTS]
        if read is not None:
            self._stream.wait(read)
        for record, place in zip(records, self._places(number, records), strict=True):
            copy(self._stream, record, place)
        return _Part(records, self._stream.record())

    def _cut(self, records: Sequence[Record]) -> list[Sequence[Record]]:
        return [records[first : first + self._count] for first in range(0, len(records), self._count)]

    def _places(self, number: int, records: Sequence[Record]) -> range:
        buffer = self._buffers[number % STAGING_PARTS]
        return range(buffer, buffer + len(records) * self._record_bytes, self._record_bytes)
