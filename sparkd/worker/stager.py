"""Brings records that are not in host memory to the step that waits for them: a client of the store.

    request ──Stage──► asked ──Staged──► leased: the step reads ──Release──► over
                        ▲ │                                         │
                        └─┴── the store is gone, its leases too ────┘ what is missing is asked of its successor

A part is one Stage: at most half the reserve of a slab, so that one part can be read while another is computed with.
Decode takes smaller ones, for what is computed with the last part is what is waited for in the end.
The store serves parts in order and holds back those that have no room yet, so all of them are asked for at once.

Attach tells the store that this worker holds no lease. It is sent again when the store has gone away (the arena and its
directory outlive it), and when a step has failed half-way; answers to what was asked before mean nothing then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import UnavailableError
from sparkd.executors.base import RecordRefused
from sparkd.ipc.internal import Attach, Attached, Release, Stage, Staged, Used
from sparkd.ipc.sockets import Channel, PeerSlow
from sparkd.store.arena import Arena
from sparkd.store.layout import Slab

#: A store that does not even take messages for so long is replaced by the supervisor, or this worker is.
_SEND_S = 60.0
#: Bytes of one part of decode, where that is two experts or more: messages cost little beside reading so much.
_DECODE_PART = 3 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    layer: int
    experts: Sequence[int]
    use: str


class StoreStager:
    """The stager of one worker. `went_on` is called whenever a part has come, however long the whole takes."""

    def __init__(self, arena: Arena, channel: Channel, worker: int, went_on: Callable[[], None]) -> None:
        """`channel` leads to the store, which knows this worker already, and is watched."""
        self._arena = arena
        self._channel = channel
        self._worker = worker
        self._went_on = went_on
        layout = arena.layout
        slabs = [layout.slabs[layer.slab] for layer in layout.layers]
        self._limits = {
            "decode": [min(_part_limit(slab), max(2, -(-_DECODE_PART // slab.record_bytes))) for slab in slabs],
            "prefill": [_part_limit(slab) for slab in slabs],
        }
        self._firsts = np.arange(len(layout.layers), dtype=np.int64)[:, None, None] * arena.directory.experts
        self._words: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._asked: dict[int, _Part] = {}
        self._lease: int | None = None
        self._batch = 0

    def begin(self) -> NDArray[np.uint64] | None:
        """Addresses by the words of the directory: to be called when the step is counted as begun."""
        if self._asked or self._lease is not None:
            self._attach()
        words = self._arena.directory.snapshot()
        if np.array_equal(words, self._words):
            return None
        self._words = words
        return self._arena.addresses(words)

    def request(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Send what is missing to the store, in parts, decode first. PeerSlow: it takes no messages."""
        self._notice_loss()
        for use, experts in (("decode", decode), ("prefill", prefill)):
            limit = self._limits[use][layer]
            for first in range(0, len(experts), limit):
                self._ask(_Part(layer, experts[first : first + limit], use))

    def arrivals(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """The parts as the store has them. UnavailableError: it refuses this worker, or what it asked for."""
        while self._asked:
            part, staged = self._next()
            yield part.experts, [self._arena.address(part.layer, slot) for slot in staged.slots]
            self._lease = None
            if not self._notice_loss():
                self._channel.send(Release(staged.lease), _SEND_S)

    def used(self, step: int, decode: NDArray[np.uint8], experts: NDArray[np.int16]) -> None:
        """Tell the store what a step used: `experts` [expert layers, rows, top_k], and which rows are decode."""
        self._notice_loss()
        words = experts + self._firsts
        chosen = decode.astype(bool)
        with contextlib.suppress(PeerSlow):
            self._channel.send(Used(step, self._bits(words[:, chosen]), self._bits(words[:, ~chosen])))

    def _bits(self, words: NDArray[np.int64]) -> bytes:
        if not words.size:
            return b""
        marks = np.zeros(self._words.size, bool)
        marks[words.ravel()] = True
        return np.packbits(marks, bitorder="little").tobytes()

    def _ask(self, part: _Part) -> None:
        self._batch += 1
        self._asked[self._batch] = part
        records = [[part.layer, expert] for expert in part.experts]
        self._channel.send(Stage(self._batch, "", part.use, records), _SEND_S)

    def _next(self) -> tuple[_Part, Staged]:
        """Wait for a part that was asked for."""
        while True:
            msg = self._channel.receive(_SEND_S)
            if self._notice_loss():
                continue
            match msg:
                case Attached(error=str() as error):
                    raise UnavailableError(error)
                case Staged() if msg.batch in self._asked:
                    part = self._asked.pop(msg.batch)
                    if msg.refused is not None:
                        layer, expert = msg.refused
                        raise RecordRefused(str(msg.error), layer, expert)
                    if msg.error is not None:
                        raise UnavailableError(msg.error)
                    self._lease = msg.lease
                    self._went_on()
                    return part, msg

    def _notice_loss(self) -> bool:
        """Whether the store has gone away since the last call; then what is missing is asked of the next one.

        Nothing is read under a lease when this is called: the next store may give the places of the last one away.
        """
        if not self._channel.interrupted():
            return False
        parts = list(self._asked.values())
        self._attach()
        for part in parts:
            self._ask(part)
        return True

    def _attach(self) -> None:
        self._asked.clear()
        self._lease = None
        self._channel.send(Attach(self._worker, ""), _SEND_S)


def _part_limit(slab: Slab) -> int:
    return slab.records if slab.full else max(1, slab.size.reserve // 2)
