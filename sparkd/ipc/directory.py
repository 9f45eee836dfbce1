"""Which experts are in host memory, and in which slot: words that the store writes and every worker reads.

A part of the arena, page-aligned, little endian:

    0       magic u64, version u32, layers u32, experts u32 (of the layer with most), workers u32
    4096    for each worker one cache line: steps begun u64, steps ended u64 (written by that worker alone)
    64      bell u64, which the store rings whenever a copy into a slot is complete
    8192    for each (expert layer, expert) one word u64 (written by the store alone)
    then    for each slot, of all slabs in a row, the last complete filling, plus one, u64 (written by the store
            alone): as there are no more slots than records, there is room for as many as there are words

    word    bits 62-63 state, bits 32-61 generation (counts the fillings of the slot, wraps), bits 0-31 slot

            publish(LOADING)            publish(RESIDENT)
    ABSENT ─────────────────► LOADING ─────────────────► RESIDENT
       ▲                         │                          │
       └────── load failed ──────┴───── publish(ABSENT) ────┘

A slot is a number within the slab of the record's layer; fillings are told by its number among the slots of all slabs.
Whoever leases a filling may read it once it is complete. A reader that sees RESIDENT sees the record's bytes too, and
may read them until the end of the step that it has begun before it looked. For that, a worker counts its step as begun
before it loads a word, and the store retracts a word before it loads the counters: all accesses are sequentially
consistent, so that a step which still sees the word is seen by the store (`sparkd.residency.epochs`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import UnavailableError
from sparkd.ipc import _atomics
from sparkd.ipc.memory import Region
from sparkd.residency.epochs import Steps
from sparkd.residency.slots import GENERATIONS

VERSION = 2
#: Workers whose step counters have a place.
WORKERS = 16
_MAGIC = int.from_bytes(b"SPKDIREC", "little")
_HEADER = struct.Struct("<QIIII")
_BELL = 64
_COUNTERS = 4096
_WORDS = 8192
#: u64 words from one worker's counters to the next: a cache line.
_LINE = 8


class State(IntEnum):
    """What a word says about its record."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """State of one record, and its slot in the slab of its layer (meaningless while ABSENT)."""

    state: State
    generation: int
    slot: int

    @staticmethod
    def of(word: int) -> Entry:
        """Unpack a word."""
        return Entry(State(word >> 62), word >> 32 & GENERATIONS - 1, word & 0xFFFFFFFF)

    @property
    def word(self) -> int:
        """The packed form."""
        return self.state << 62 | self.generation % GENERATIONS << 32 | self.slot


class StepCounter:
    """Counts the steps of one worker; only that worker has it. Each step runs inside `with`."""

    def __init__(self, words: NDArray[np.uint64], worker: int) -> None:
        """A step that a process before this one began under the same number counts as ended."""
        self._words = words
        self._begun, self._ended = worker * _LINE, worker * _LINE + 1
        self._steps = _atomics.load(words, self._begun)
        _atomics.store(words, self._ended, self._steps)

    def __enter__(self) -> None:
        self._steps += 1
        _atomics.store(self._words, self._begun, self._steps)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _atomics.store(self._words, self._ended, self._steps)


class Directory:
    """The directory at `offset` of a region; `layers` expert layers of at most `experts` experts."""

    def __init__(self, region: Region, offset: int, layers: int, experts: int) -> None:
        self.layers = layers
        self.experts = experts
        self._words: NDArray[np.uint64] = region.array(offset + _WORDS, layers * experts, np.uint64)
        self._fillings: NDArray[np.uint64] = region.array(
            offset + _WORDS + layers * experts * 8, layers * experts, np.uint64
        )
        self._bell: NDArray[np.uint64] = region.array(offset + _BELL, 1, np.uint64)
        self._fillings_at, self._bell_at = self._fillings.ctypes.data, self._bell.ctypes.data
        self._counters: NDArray[np.uint64] = region.array(offset + _COUNTERS, WORKERS * _LINE, np.uint64)
        self._last: tuple[bytes, list[Steps]] = b"", []

    @staticmethod
    def size(layers: int, experts: int) -> int:
        """Bytes a directory takes."""
        return _WORDS + 2 * layers * experts * 8

    @staticmethod
    def create(region: Region, offset: int, layers: int, experts: int) -> Directory:
        """Write the header; every record is absent (the region's memory is still zero)."""
        header = _HEADER.pack(_MAGIC, VERSION, layers, experts, WORKERS)
        region.view(offset, len(header))[:] = header
        return Directory(region, offset, layers, experts)

    @staticmethod
    def attach(region: Region, offset: int) -> Directory:
        """Use a directory that the store created. UnavailableError when there is none of this version."""
        magic, version, layers, experts, _ = _HEADER.unpack(region.view(offset, _HEADER.size))
        if magic != _MAGIC or version != VERSION:
            raise UnavailableError(f"the arena holds no directory of version {VERSION} at byte {offset}")
        return Directory(region, offset, layers, experts)

    def entry(self, layer: int, expert: int) -> Entry:
        """The record of `expert` in expert layer `layer` (an index into `Program.expert_layers`)."""
        return Entry.of(_atomics.load(self._words, self._index(layer, expert)))

    def publish(self, layer: int, expert: int, entry: Entry) -> None:
        """Make `entry` visible, after everything this thread wrote before. The store alone does this."""
        _atomics.store(self._words, self._index(layer, expert), entry.word)

    def snapshot(self) -> NDArray[np.uint64]:
        """All words, uint64 [layers, experts], each loaded atomically (not all at one instant)."""
        words = np.empty(self.layers * self.experts, np.uint64)
        _atomics.copy(self._words, words)
        return words.reshape(self.layers, self.experts)

    def filled(self, slot: int, generation: int) -> None:
        """Say that this filling of a slot is complete, and ring unless that is known. The store alone does this."""
        if not self.holds(slot, generation):
            _atomics.store(self._fillings, slot, generation + 1)
            _atomics.ring(self._bell, 0)

    def holds(self, slot: int, generation: int) -> bool:
        """Whether this filling of a slot is complete, and none was since."""
        return _atomics.load(self._fillings, slot) == generation + 1

    def last_filling(self) -> int:
        """The highest generation of all fillings that are complete; 0: there is none."""
        fillings = np.empty(self.layers * self.experts, np.uint64)
        _atomics.copy(self._fillings, fillings)
        return max(int(fillings.max(initial=0)) - 1, 0)

    def told_at(self, slot: int, generation: int) -> tuple[int, int, int]:
        """What `filled` does, for other code of this process: address of the filling, its value, that of the bell."""
        return self._fillings_at + 8 * slot, generation + 1, self._bell_at

    def rung(self) -> int:
        """How often the bell was rung."""
        return _atomics.load(self._bell, 0)

    def listen(self, rung: int, seconds: float) -> None:
        """Wait until the bell was rung more often than that, or for so long; now and then shorter."""
        _atomics.wait(self._bell, 0, rung, seconds)

    def step_counter(self, worker: int) -> StepCounter:
        """For worker number `worker` (below `WORKERS`) to count its steps with."""
        if not 0 <= worker < WORKERS:
            raise IndexError(f"no place for the counters of worker {worker}: there are {WORKERS}")
        return StepCounter(self._counters, worker)

    def steps(self) -> list[Steps]:
        """What each worker has counted. A step that began before this call and is not told as ended may be running.

        The very list of the last call if nothing has changed since.
        """
        # One after another: what a worker has begun is loaded before what it has ended.
        words = np.empty(WORKERS * _LINE, np.uint64)
        _atomics.copy(self._counters, words)
        counted = words.tobytes()
        last = self._last
        if counted != last[0]:
            last = self._last = counted, [Steps(*steps) for steps in words.reshape(WORKERS, _LINE)[:, :2].tolist()]
        return last[1]

    def residents(self) -> list[int]:
        """Resident records of each expert layer."""
        return [int(n) for n in (self.snapshot() >> np.uint64(62) == State.RESIDENT).sum(axis=1)]

    def _index(self, layer: int, expert: int) -> int:
        if not (0 <= layer < self.layers and 0 <= expert < self.experts):
            raise IndexError(f"no record ({layer}, {expert}) in {self.layers} layers of {self.experts} experts")
        return layer * self.experts + expert
