"""Brings records that are not in host memory to the step that waits for them: a client of the store.

    request ──Stage──► asked ──Staged──► lent: records come, the step reads ──Release──► over
                        ▲ │               │
                        └─┴───────────────┘ the store is gone, its leases too: what is missing is asked of its successor

A part is one Stage: at most half the reserve of a slab, so that one part can be read while another is computed with.
The store serves parts in order and holds back those that have no room yet, so all of them are asked for at once. It
says at once where records are going to be; the directory says when each is there, so that nobody's turn is waited for.

A lease is given back with what is said to the store next, unless parts wait for room: not while the step is waited for.

Attach tells the store that this worker holds no lease. It is sent again when the store has gone away (the arena and its
directory outlive it), and when a step has failed half-way; answers to what was asked before mean nothing then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import UnavailableError
from sparkd.executors.base import RecordRefused
from sparkd.ipc.directory import State
from sparkd.ipc.internal import Attach, Attached, Foreseen, Release, Stage, Staged, Used
from sparkd.ipc.sockets import Channel, PeerSlow
from sparkd.store.arena import Arena
from sparkd.store.layout import Slab

#: A store that does not even take messages for so long is replaced by the supervisor, or this worker is.
_SEND_S = 60.0
#: The longest wait for a record until the channel is looked at again: for a refusal, or the end of the store.
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class _Part:
    layer: int
    experts: Sequence[int]
    use: str


@dataclass(frozen=True, slots=True)
class _Lent:
    """A part under its lease; `coming`: where each expert is going to be that has not been read yet."""

    part: _Part
    lease: int
    coming: dict[int, _Filling]


@dataclass(frozen=True, slots=True)
class _Filling:
    """A filling of a slot, which has a number among those of all slabs; and the address of the slot."""

    slot: int
    generation: int
    address: int


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
        self._limits = [_part_limit(slab) for slab in slabs]
        self._firsts = np.arange(len(layout.layers), dtype=np.int64)[:, None, None] * arena.directory.experts
        self._words: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._asked: dict[int, _Part] = {}
        self._lent: dict[int, _Lent] = {}
        #: Experts of the layer that came since the step began, and where they are.
        self._there: list[tuple[int, int]] = []
        #: Leases of what has been computed.
        self._over: list[int] = []
        self._batch = 0

    def begin(self) -> NDArray[np.uint64] | None:
        """Addresses by the words of the directory: to be called when the step is counted as begun."""
        if self._asked or self._lent:
            self._attach()
        words = self._arena.directory.snapshot()
        if np.array_equal(words, self._words):
            return None
        self._words = words
        return self._arena.addresses(words)

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of these experts that are not in memory."""
        words = self._arena.directory.snapshot()[layer] >> np.uint64(62)
        return [expert for expert in experts if words[expert] != State.RESIDENT]

    def foresee(self, layer: int, experts: Sequence[int]) -> None:
        """Tell the store what a step will probably miss next. Nobody waits for it, so nobody hears if that is lost."""
        with contextlib.suppress(PeerSlow):
            self._channel.send(Foreseen([[layer, expert] for expert in experts]))

    def request(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Send what is missing to the store, in parts, decode first. PeerSlow: it takes no messages.

        What has become resident since the step began may be read until its end.
        """
        self._notice_loss()
        limit = self._limits[layer]
        entries = {expert: self._arena.directory.entry(layer, expert) for expert in (*decode, *prefill)}
        self._there = [
            (expert, self._arena.address(layer, entry.slot))
            for expert, entry in entries.items()
            if entry.state is State.RESIDENT
        ]
        there = dict(self._there)
        for use, chosen in (("decode", decode), ("prefill", prefill)):
            experts = [expert for expert in chosen if expert not in there]
            for first in range(0, len(experts), limit):
                self._ask(_Part(layer, experts[first : first + limit], use))
        self._give_back()

    def arrivals(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """The records as they come. UnavailableError: the store refuses this worker, or what it asked for."""
        if self._there:
            yield [expert for expert, _ in self._there], [address for _, address in self._there]
        while self._asked or self._lent:
            rung = self._arena.directory.rung()
            came = self._came()
            if not came:
                self._wait(rung)
                continue
            self._went_on()
            addresses = [self._lent[batch].coming[expert].address for batch, expert in came]
            yield [expert for _, expert in came], addresses
            self._computed(came)
            if not self._notice_loss() and self._asked:
                self._give_back()

    def used(self, step: int, decode: NDArray[np.uint8], experts: NDArray[np.int16]) -> None:
        """Tell the store what a step used: `experts` [expert layers, rows, top_k], and which rows are decode."""
        self._notice_loss()
        words = experts + self._firsts
        chosen = decode.astype(bool)
        with contextlib.suppress(PeerSlow):
            self._channel.send(Used(step, self._bits(words[:, chosen]), self._bits(words[:, ~chosen])))
        self._give_back()

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

    def _came(self) -> list[tuple[int, int]]:
        """Batch and expert of what is there, and has not been read yet."""
        holds = self._arena.directory.holds
        return [
            (batch, expert)
            for batch, lent in self._lent.items()
            for expert, filling in lent.coming.items()
            if holds(filling.slot, filling.generation)
        ]

    def _computed(self, came: Iterable[tuple[int, int]]) -> None:
        """These have been read; the lease of a part that has nothing to come is over."""
        for batch, expert in came:
            lent = self._lent[batch]
            del lent.coming[expert]
            if not lent.coming:
                del self._lent[batch]
                self._over.append(lent.lease)

    def _wait(self, rung: int) -> None:
        """Until the store has said or, since the bell was `rung`, done something; or a little longer."""
        msg = self._channel.receive(0.0 if self._lent else _SEND_S)
        if self._notice_loss():
            return
        match msg:
            case Attached(error=str() as error):
                raise UnavailableError(error)
            case Staged() if msg.batch in self._asked or msg.batch in self._lent:
                self._heed(msg)
            case None if self._lent:
                self._arena.directory.listen(rung, _LOOK_S)

    def _heed(self, msg: Staged) -> None:
        lent = self._lent.pop(msg.batch, None)
        part = self._asked.pop(msg.batch) if lent is None else lent.part
        if msg.refused is not None:
            layer, expert = msg.refused
            raise RecordRefused(str(msg.error), layer, expert)
        if msg.error is not None:
            raise UnavailableError(msg.error)
        layout = self._arena.layout
        slab = layout.layers[part.layer].slab
        fillings = [
            _Filling(layout.slot_number(slab, slot), generation, self._arena.address(part.layer, slot))
            for slot, generation in zip(msg.slots, msg.generations, strict=True)
        ]
        self._lent[msg.batch] = _Lent(part, msg.lease, dict(zip(part.experts, fillings, strict=True)))

    def _notice_loss(self) -> bool:
        """Whether the store has gone away since the last call; then what is missing is asked of the next one.

        Nothing is read under a lease when this is called: the next store may give the places of the last one away.
        """
        if not self._channel.interrupted():
            return False
        left = [_Part(lent.part.layer, list(lent.coming), lent.part.use) for lent in self._lent.values()]
        parts = [*left, *self._asked.values()]
        self._attach()
        for part in parts:
            self._ask(part)
        return True

    def _give_back(self) -> None:
        for lease in self._over:
            self._channel.send(Release(lease), _SEND_S)
        self._over.clear()

    def _attach(self) -> None:
        self._asked.clear()
        self._lent.clear()
        self._over.clear()
        self._channel.send(Attach(self._worker, ""), _SEND_S)


def _part_limit(slab: Slab) -> int:
    return slab.records if slab.full else max(1, slab.size.reserve // 2)
