"""Routed ids on their way from the worker to the calibrator: a ring of bytes in shared memory, one writer, one reader.

    0       magic u64, version u32, expert layers u32, experts u32 (of the layer with most), 0 u32, fingerprint [32]
    64      written u64: bytes ever written; dropped u64: steps that found no room; tags u64 (the worker's alone)
    128     read u64: bytes ever read (the calibrator's alone)
    1024    the tags of traffic, 32 bytes each, zeros behind the name
    4096    the ring: step after step, each a header (rows u32, top_k u32, step u64), one byte per row (1: decode, plus
            twice the number of its tag, 0: none), the ids, zeros up to a multiple of 8

A step is written whole or dropped whole and counted: the worker never waits. `written` moves when a step is complete,
`read` when it has been dealt with. So what a killed worker had begun is never seen, a killed calibrator's successor
goes on at the step that was not dealt with, and neither can leave the ring in a state that stops the other. A tag is
numbered with its first row, for as long as the ring lives; when all numbers are taken, others count as none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from sparkd.errors import UnavailableError
from sparkd.ipc import _atomics
from sparkd.ipc.memory import Region
from sparkd.tags import TRAFFIC_TAG

VERSION = 2
#: Bytes of a region that is large enough for a second of reading a prompt, and for minutes of decoding.
REGION_BYTES = 8 << 20
_MAGIC = int.from_bytes(b"SPKROUTE", "little")
_HEADER = struct.Struct("<QIIII32s")
_STEP = struct.Struct("<IIQ")
_DATA = 4096
#: Words, by index.
_WRITTEN, _DROPPED, _TAGS, _READ = 8, 9, 10, 16
_NAMES, _NAME = 1024, 32
#: Tags that one ring can tell apart, beside none.
MAX_TAGS = (_DATA - _NAMES) // _NAME


class TornError(ValueError):
    """The ring holds what no worker writes: one line that says what. Reading goes on behind it."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Routed ids of one step: `ids` is int16 [expert layers, rows, top_k], `kinds` one byte per row (`kind`)."""

    step: int
    rows: int
    top_k: int
    kinds: bytes
    ids: bytes


class RoutingRing:
    """One end of the ring in a region; which end is told by what is called."""

    def __init__(self, region: Region) -> None:
        """Use a ring that was created. UnavailableError when there is none of this version."""
        magic, version, self.layers, self.experts, _, raw = _HEADER.unpack(region.view(0, _HEADER.size))
        if magic != _MAGIC or version != VERSION:
            raise UnavailableError(f"the region holds no routing ring of version {VERSION}")
        #: Of the model whose experts are meant, hexadecimal.
        self.fingerprint: str = raw.hex()
        self._words = region.view(0, _DATA).cast("Q")
        self._data = region.view(_DATA, region.size - _DATA)
        self._capacity = len(self._data)
        self._names = region.view(_NAMES, _DATA - _NAMES)
        self._numbers = {name: number for number, name in enumerate(self.tags)}

    @staticmethod
    def create(region: Region, fingerprint: str, layers: int, experts: int) -> None:
        """Make an empty ring in a region of zeros, for a model with so many expert layers of at most `experts`."""
        header = _HEADER.pack(_MAGIC, VERSION, layers, experts, 0, bytes.fromhex(fingerprint))
        region.view(0, len(header))[:] = header

    @property
    def dropped(self) -> int:
        """Steps that found no room."""
        return int(_atomics.load(self._words, _DROPPED))

    @property
    def tags(self) -> list[str]:
        """The tags by number; the first is none. One that cannot be is none, too."""
        names = [""]
        for at in range(0, min(_atomics.load(self._words, _TAGS), MAX_TAGS) * _NAME, _NAME):
            name = bytes(self._names[at : at + _NAME]).rstrip(b"\0").decode(errors="replace")
            names.append(name if TRAFFIC_TAG.fullmatch(name) else "")
        return names

    def kind(self, decode: int, tag: str) -> int:
        """The worker: the byte of a row."""
        number = self._numbers.get(tag)
        if number is None:
            number = self._number(tag)
        return (1 if decode else 0) | number << 1

    def _number(self, tag: str) -> int:
        if TRAFFIC_TAG.fullmatch(tag) is None:
            raise ValueError(f"{tag!r} is no tag of traffic")
        taken = _atomics.load(self._words, _TAGS)
        if taken >= MAX_TAGS:
            return 0
        self._names[taken * _NAME : (taken + 1) * _NAME] = tag.encode().ljust(_NAME, b"\0")
        _atomics.store(self._words, _TAGS, taken + 1)
        self._numbers[tag] = taken + 1
        return self._numbers[tag]

    def push(self, routed: Routed) -> bool:
        """The worker: add a step, or drop and count it when there is no room. False when it was dropped."""
        frame = _STEP.pack(routed.rows, routed.top_k, routed.step) + routed.kinds + routed.ids
        frame += bytes(-len(frame) % 8)
        written = _atomics.load(self._words, _WRITTEN)
        if len(frame) > self._capacity - (written - _atomics.load(self._words, _READ)):
            _atomics.store(self._words, _DROPPED, self.dropped + 1)
            return False
        self._put(written, frame)
        _atomics.store(self._words, _WRITTEN, written + len(frame))
        return True

    def peek(self) -> Routed | None:
        """The calibrator: the oldest step that was not dealt with, None without any. TornError when it cannot be."""
        return next(iter(self.waiting(1)), None)

    def waiting(self, limit: int) -> list[Routed]:
        """The calibrator: the oldest steps not dealt with, at most `limit`. TornError when the first cannot be."""
        read, written = _atomics.load(self._words, _READ), _atomics.load(self._words, _WRITTEN)
        steps: list[Routed] = []
        while read != written and len(steps) < limit:
            waiting = written - read
            rows, top_k, step = _STEP.unpack(self._get(read, _STEP.size)) if waiting >= _STEP.size else (0, 0, 0)
            length = self._length(rows, top_k)
            if waiting > self._capacity or not rows or length > waiting:
                if steps:
                    break
                _atomics.store(self._words, _READ, written)
                raise TornError(f"{waiting} bytes of routed ids begin with a step of {rows} rows, {length} bytes")
            body = self._get(read + _STEP.size, length - _STEP.size)
            steps.append(Routed(step, rows, top_k, body[:rows], body[rows : rows + 2 * self.layers * rows * top_k]))
            read += length
        return steps

    def advance(self, *steps: Routed) -> None:
        """The calibrator: these steps, the oldest ones, are dealt with."""
        read = _atomics.load(self._words, _READ)
        _atomics.store(self._words, _READ, read + sum(self._length(step.rows, step.top_k) for step in steps))

    def _length(self, rows: int, top_k: int) -> int:
        length: int = _STEP.size + rows + 2 * self.layers * rows * top_k
        return length + -length % 8

    def _put(self, position: int, data: bytes) -> None:
        at = position % self._capacity
        first = min(len(data), self._capacity - at)
        self._data[at : at + first] = data[:first]
        self._data[: len(data) - first] = data[first:]

    def _get(self, position: int, size: int) -> bytes:
        at = position % self._capacity
        first = min(size, self._capacity - at)
        return bytes(self._data[at : at + first]) + bytes(self._data[: size - first])
