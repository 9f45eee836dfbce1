"""The device tier: what the residency engine decides, carried out on a card's slots and on the tables of addresses.

Every record is in host memory, so nothing is ever absent: an entry of a table leads to a slot, or to host memory where
the device may read it there, or to a slot of the reserve that a record was brought to for one part of a step.

Two streams. *Compute* runs the steps and changes the tables between them; *copies* fills ordinary slots:

    compute   step n ── the victim's entry leads to host memory ── free │ step n+1 │ ── the new entry ── step n+2
    copies                                                          └─► │ copy ── ready │          ▲
    here                                                                │      ready is done ──────┘

- A slot is written only after `free`: whatever was given to compute before that may read what it held.
- An entry leads to a slot only when `ready` was found done. Work that is given later sees what was copied: compute does
  not wait once more. Where a part of a step needs a copy that is under way, compute itself waits for `ready`.
- A slot of the reserve is filled on compute, in order with those who read it.

Prompts are no business of the engine: what a layer's rows chose is read in slots, and what is not there streams through
two buffers (`device_staging`), each record once for all rows. Entries change between steps only, so a slot that is read
by what a step is given keeps what it holds; host memory keeps everything.

So for the engine a step runs only while a part of it is being put together, from `bring` to `let_go`; else a slot is
free as soon as its entry is changed. The engine decides while the device computes (`meanwhile`), by what the step
before has chosen, a few copies at a time.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.cuda import Reach
from sparkd.executors.device import Device, Event, Stream
from sparkd.residency.commands import Command, Copy, Grant, Publish, Retract
from sparkd.residency.epochs import Steps
from sparkd.residency.leases import Counts, Use
from sparkd.residency.misses import Misses
from sparkd.residency.placement import Placement
from sparkd.residency.slabs import LayerSize, SlabSize, SlabUse
from sparkd.residency.slots import Place, Record
from sparkd.residency.transfers import Residency
from sparkd.store.arena import Arena
from sparkd.worker.device_slots import Block, DeviceSlots
from sparkd.worker.device_staging import Staging
from sparkd.worker.registration import Registration

#: Of what a step missed, so many records are admitted; steps towards a placement that are begun beside them.
ADMITTED = 8
SWAPS = 2
#: Bytes of copies that may be under way: enough to keep a link busy, little enough to end within a step or two.
_UNDER_WAY_BYTES = 64 << 20
_WORKER = 0


class Tables(Protocol):
    """Who holds the tables on the device: `sparkd.executors.cuda.CudaExecutor`, or a test."""

    @property
    def stream(self) -> Stream:
        """Compute."""
        ...

    def publish_layer(self, layer: int, addresses: NDArray[np.uint64]) -> None:
        """Change a table for what compute is given after this."""
        ...


@dataclass(frozen=True, slots=True)
class _Moving:
    copy: Copy
    ready: Event


@dataclass(slots=True)
class _Closing:
    """A block that is being given back; `free` is set once its slots are closed."""

    block: Block
    free: Event | None = None


class DeviceTier:
    """The records of one arena in the slots of one device. Implements `sparkd.executors.cuda.Records`."""

    def __init__(
        self,
        device: Device,
        tables: Tables,
        arena: Arena,
        slots: DeviceSlots,
        registration: Registration,
        staging: Staging,
        misses: Misses = Misses.IN_PLACE,
    ) -> None:
        """`arena` holds all records. `misses` may change between steps (`choose`)."""
        self._staging = staging
        self._misses = misses
        self._device = device
        self._tables = tables
        self._slots = slots
        self._registration = registration
        self._copies = device.stream()
        self.layers = [LayerSize(layer.slab, layer.experts) for layer in arena.layout.layers]
        self._engine = Residency(self.layers, slots.sizes)
        #: Addresses [layers, most experts]: in this process; where the device reads host memory (0: nowhere); and the
        #: tables as they should be.
        self._host = arena.addresses(arena.directory.snapshot())
        self._home = np.zeros_like(self._host)
        self._table = np.zeros_like(self._host)
        self._absent = self._host != 0
        self._was_absent = self._absent.copy()
        self._changed = set(range(len(self.layers)))
        #: Whether copies have to wait: for readers of what a slot held before, or for what is copied within the device.
        self._behind = False
        self._under_way: deque[_Moving] = deque()
        self._most_copies = max(2, _UNDER_WAY_BYTES // max(slots.record_bytes, default=1))
        #: What the tier is filled with at first, in this order, as far as there is room.
        experts = max((layer.experts for layer in self.layers), default=0)
        self._to_fill = iter(
            [Record(n, e) for e in range(experts) for n, layer in enumerate(self.layers) if e < layer.experts]
        )
        #: Records by their number, layer times the most experts plus expert, and the first number of each layer.
        self._records = [Record(layer, expert) for layer in range(len(self.layers)) for expert in range(experts)]
        self._firsts = np.arange(len(self.layers), dtype=np.int64)[:, None, None] * experts
        self._granted: dict[int, tuple[Place, ...]] = {}
        self._leases: list[int] = []
        self._parts = Steps(0, 0)
        self._used: list[tuple[NDArray[np.int16], NDArray[np.bool_]]] = []
        self._missed: list[Record] = []
        self._turn = 0
        self._placed: int | None = None
        self._closing: list[_Closing] = []
        self.part_rows = min(
            (
                max(1, slots.sizes[layer.slab].reserve // ops.top_k)
                for layer, ops in zip(self.layers, arena.program.expert_layers, strict=True)
                if not self._engine.full(layer.slab)
            ),
            default=1 << 30,
        )
        #: Bytes of the records that the last step missed for decode rows.
        self.missed_bytes = 0
        #: Bytes that were copied into slots, those that prompts had streamed, and those of blocks that are given back.
        self.moved = 0
        self.streamed = 0
        self.given_back = 0

    # ---- for the executor ----

    def begin(self) -> Reach:
        """Publish what is complete, and say how a step comes to what is absent, where anything is."""
        self._land()
        self._write_tables()
        self._was_absent = self._absent.copy()
        if self._table[self._host != 0].all():
            return Reach.ALL
        return Reach.HOST if self._misses is Misses.HOST else Reach.PARTS

    def bring(self, layer: int, decode: Sequence[int], prefill: Sequence[int]) -> None:
        """Bring those that cannot be read: to the reserve, unless they are on the way to a slot."""
        self._parts = Steps(self._parts.begun + 1, self._parts.ended)
        row = self._table[layer].copy()
        others = [expert for expert in prefill if expert not in decode]
        for use, experts in ((Use.DECODE, decode), (Use.PREFILL, others)):
            records = [Record(layer, expert) for expert in experts if not row[expert]]
            if not records:
                continue
            lease, commands = self._engine.stage(_WORKER, records, use)
            self._leases.append(lease)
            self._carry_out(commands)
            while lease not in self._granted:
                self._await_oldest()
            for record, place in zip(records, self._granted.pop(lease), strict=True):
                row[record.expert] = self._slots.address(self.layers[layer].slab, place.slot)
        self._publish(layer, row)
        self._changed.add(layer)

    def let_go(self) -> None:
        """End the leases of `bring`."""
        self._parts = Steps(self._parts.begun, self._parts.begun)
        while self._leases:
            self._carry_out(self._engine.release(self._leases.pop()))
        self._carry_out(())

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """Have those that are in no slot begin to come, the likeliest first, as many as the buffers hold."""
        absent = self._absent[layer]
        self._staging.ahead([Record(layer, expert) for expert in experts if absent[expert]], self._stream)

    def stage(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[Sequence[int], NDArray[np.uint64]]]:
        """First those that are in slots, then the others, which are on their way meanwhile."""
        absent = self._absent[layer]
        others = [Record(layer, expert) for expert in experts if absent[expert]]
        here = [expert for expert in experts if not absent[expert]]
        parts = self._staging.stream(self._tables.stream, others, self._stream)
        if here:
            yield here, self._table[layer][here]
        for part in parts:
            yield [record.expert for record, _ in part], np.array([place for _, place in part], np.uint64)

    def meanwhile(self) -> None:
        """Decide on copies by what the step before used, and begin them."""
        self._land()
        self._learn()
        self._give_back()
        self._advance()

    def missed(self, experts: NDArray[np.int16]) -> NDArray[np.int32]:
        """For each row how many of `experts` [layers, rows, top_k] were not in a slot when the step began."""
        layers = np.arange(len(experts))[:, None, None]
        counts: NDArray[np.int32] = self._was_absent[layers, experts].sum(axis=(0, 2), dtype=np.int32)
        return counts

    # ---- for the worker ----

    def used(self, decode: NDArray[np.bool_], experts: NDArray[np.int16]) -> None:
        """A step has ended that used `experts` [layers, rows, top_k]; which rows are decode."""
        self._used.append((experts, decode))

    def advance(self) -> bool:
        """Go on while no step runs; true: call again soon."""
        self._land()
        self._learn()
        self._give_back()
        begun = self._advance()
        return begun or bool(self._under_way or self._closing)

    @property
    def misses(self) -> Misses:
        """What becomes of what steps miss."""
        return self._misses

    def choose(self, misses: Misses) -> None:
        """Have steps from now on do something else about what they miss."""
        self._misses = misses
        self._table[self._absent] = self._home[self._absent] if misses is Misses.IN_PLACE else 0
        self._changed |= set(range(len(self.layers)))

    def place(self, placement: Placement) -> None:
        """Take a placement as the goal of swaps. PlacementError when the tier cannot hold it."""
        self._engine.place(placement)
        self._placed = placement.version

    def shrink(self, size: int) -> int:
        """Begin to give back blocks of at least `size` bytes together, as far as there are any; their bytes.

        Whoever loses a slot can still be read: in host memory, or through a reserve.
        """
        begun = 0
        unread = {
            layer.slab
            for layer, row in zip(self.layers, self._home, strict=True)
            if not (self._misses is not Misses.COPY and row[: layer.experts].all())
        }
        slabs = [number for number, sizes in enumerate(self._slots.sizes) if sizes.reserve or number not in unread]
        while begun < size:
            block = self._slots.spare_block(slabs, [closing.block for closing in self._closing])
            if block is None:
                break
            self._closing.append(_Closing(block))
            begun += block.bytes
        return begun

    def grow(self, size: int) -> int:
        """Take back blocks of at most `size` bytes together, those first that were given back last; their bytes.

        DeviceError where the device has no room for one; those before it are back.
        """
        taken = 0
        while (block := self._slots.given_block()) is not None and taken + block.bytes <= size:
            block = self._slots.take_back()
            taken += block.bytes
            self.given_back -= block.bytes
            self._carry_out(self._engine.open(block.slab, block.slots))
        return taken

    @property
    def growth(self) -> int:
        """Bytes of the block that would be taken back next; 0: all are there."""
        block = self._slots.given_block()
        return 0 if block is None else block.bytes

    @property
    def returning(self) -> int:
        """Bytes that are being given back."""
        return sum(closing.block.bytes for closing in self._closing)

    def sizes(self) -> list[SlabSize]:
        """Slots of each slab that are there now."""
        return [SlabSize(use.slots, use.reserve) for use in self._engine.slab_use()]

    # ---- for the status document ----

    def residents(self) -> list[int]:
        """Resident records of each expert layer."""
        return self._engine.residents()

    def letters(self) -> list[str]:
        """For each expert layer a letter an expert: h (resident and hot), r (resident in the ring), or a dot."""
        hot = self._engine.hot()
        said = []
        for number, layer in enumerate(self.layers):
            records = [Record(number, expert) for expert in range(layer.experts)]
            resident = [self._engine.place_of(record) is not None for record in records]
            said.append(
                "".join(("h" if r in hot else "r") if here else "." for r, here in zip(records, resident, strict=True))
            )
        return said

    def slabs(self) -> list[SlabUse]:
        """How the slots of each slab are used."""
        return self._engine.slab_use()

    def counts(self) -> dict[Use, Counts]:
        """What steps used, and what of that was not in a slot."""
        return self._engine.counts

    def placement(self) -> tuple[int | None, int]:
        """The version of the placement that was taken last, and the steps that are left towards it."""
        return self._placed, self._engine.swaps_left()

    def readable(self) -> int:
        """Records that the device can read in host memory."""
        return int(np.count_nonzero(self._home))

    @property
    def all_readable(self) -> bool:
        """Whether it can read all of them there."""
        return bool(self._home[self._host != 0].all())

    # ---- inside ----

    def _land(self) -> None:
        """Take what has come to its end since: registered pieces and copies."""
        for address, size, there in self._registration.take():
            inside = (self._host >= address) & (self._host < address + size)
            self._home[inside] = self._host[inside] - np.uint64(address) + np.uint64(there)
            absent = inside & self._absent
            if self._misses is Misses.IN_PLACE:
                self._table[absent] = self._home[absent]
            self._changed |= set(np.flatnonzero(absent.any(axis=1)).tolist())
        while self._under_way and self._under_way[0].ready.done():
            self._carry_out(self._engine.copied(self._under_way.popleft().copy))
        self._carry_out(self._engine.publish())

    def _learn(self) -> None:
        """Have the engine count and heat what steps used."""
        for experts, decode in self._used:
            for use, rows in ((Use.DECODE, decode), (Use.PREFILL, ~decode)):
                if not rows.any():
                    continue
                chosen = np.unique(experts[:, rows] + self._firsts)
                missed = self._engine.used(_WORKER, [self._records[number] for number in chosen.tolist()], use)
                if use is Use.DECODE:
                    self._missed = missed
                    sizes = (self._slots.record_bytes[self.layers[record.layer].slab] for record in missed)
                    self.missed_bytes = sum(sizes)
        self._used.clear()

    def _advance(self) -> bool:
        """Begin copies, as many as may be under way: of a placement, of what was missed, then of anything there is."""
        room = self._most_copies - len(self._under_way)
        filling = any(left > 0 for left in self._engine.rooms())
        missed, self._missed = self._missed, []
        if room <= 0:
            return False
        begun = False
        if self._engine.swaps_left():
            self._carry_out(self._engine.swap(room if filling else SWAPS))
            begun = True
        elif filling:
            begun = self._fill(room)
        # Of equals other layers come first each time.
        self._turn += 1
        turn = self._turn % max(1, len(missed))
        chosen = self._engine.hottest(missed[turn:] + missed[:turn], min(ADMITTED, room))
        self._carry_out(self._engine.admit(chosen))
        return begun

    def _fill(self, most: int) -> bool:
        """Admit what nobody asked for, where nobody has to leave for it; whether there was any."""
        rooms = self._engine.rooms()
        chosen = []
        records = list(itertools.islice(self._to_fill, most))
        for record in records:
            slab = self.layers[record.layer].slab
            if rooms[slab] > 0:
                rooms[slab] -= 1
                chosen.append(record)
        self._carry_out(self._engine.admit(chosen))
        return bool(records)

    def _give_back(self) -> None:
        """Close the slots of blocks that are to be given back, and free those that compute can read no more."""
        for closing in list(self._closing):
            block = closing.block
            if closing.free is None and self._close(block):
                self._write_tables()
                closing.free = self._tables.stream.record()
            if closing.free is not None and closing.free.done():
                self._slots.give_back(block)
                self.given_back += block.bytes
                self._closing.remove(closing)

    def _close(self, block: Block) -> bool:
        """Whether no entry leads to the block's slots any more, and nothing is copied there."""
        closed, commands = self._engine.close(block.slab, block.slots)
        while commands and not closed:
            self._carry_out(commands)
            closed, commands = self._engine.close(block.slab, block.slots)
        self._carry_out(commands)
        return closed

    def _carry_out(self, commands: Iterable[Command]) -> None:
        """Change the tables, then begin the copies: after all that compute was given up to here, where that matters."""
        begun: list[Copy] = []
        arrived: deque[Copy] = deque()
        todo = deque(commands)
        while todo or (todo := deque(self._following(arrived))):
            match todo.popleft():
                case Retract(record, _):
                    in_place = self._misses is Misses.IN_PLACE
                    self._set(record, int(self._home[record]) if in_place else 0, absent=True)
                    self._behind = True
                case Publish(record, place):
                    slab = self.layers[record.layer].slab
                    self._set(record, self._slots.address(slab, place.slot), absent=False)
                case Copy() as copy if copy.reserve:
                    self._move(copy, self._tables.stream)
                    arrived.append(copy)
                case Copy() as copy:
                    begun.append(copy)
                    self._behind |= copy.source is not None
                case Grant(lease, places):
                    self._granted[lease] = places
                case _:
                    pass  # Hurry and Cancel: what was given to a stream goes its way
        if begun and self._behind:
            self._write_tables()
            self._copies.wait(self._tables.stream.record())
            self._behind = False
        for copy in begun:
            self._move(copy, self._copies)
            self._under_way.append(_Moving(copy, self._copies.record()))

    def _following(self, arrived: deque[Copy]) -> list[Command]:
        """What the engine wants next, all its commands so far being carried out."""
        commands: list[Command] = []
        while arrived and not commands:
            commands = self._engine.copied(arrived.popleft())
        if not commands and self._engine.draining:
            commands = self._engine.observe([self._parts])
        return commands

    def _move(self, copy: Copy, stream: Stream) -> None:
        """Give a stream a copy into a slot: within the device, or from host memory."""
        target, size = self._slots.address(copy.slab, copy.place.slot), self._slots.record_bytes[copy.slab]
        if copy.source is not None:
            self._device.copy(stream, target, self._slots.address(copy.slab, copy.source.slot), size)
        else:
            self._fetch(copy.record, stream, target)
        self.moved += size

    def _stream(self, stream: Stream, record: Record, place: int) -> None:
        self.streamed += self._fetch(record, stream, place)

    def _fetch(self, record: Record, stream: Stream, target: int) -> int:
        """Give a stream a copy from where the device reads host memory, or through the driver; its bytes."""
        size = self._slots.record_bytes[self.layers[record.layer].slab]
        home, host = int(self._home[record]), int(self._host[record])
        if home:
            self._device.copy(stream, target, home, size)
        else:
            self._device.upload(stream, target, _bytes_at(host, size))
        return size

    def _await_oldest(self) -> None:
        """Have compute wait for the copy that began first: for what it is given from now on the record is there."""
        if not self._under_way:
            raise RuntimeError("a lease waits for nothing")
        moving = self._under_way.popleft()
        self._tables.stream.wait(moving.ready)
        self._carry_out(self._engine.copied(moving.copy))

    def _set(self, record: Record, address: int, *, absent: bool) -> None:
        self._table[record] = address
        self._absent[record] = absent
        self._changed.add(record.layer)

    def _write_tables(self) -> None:
        for layer in sorted(self._changed):
            self._publish(layer, self._table[layer])
        self._changed.clear()

    def _publish(self, layer: int, row: NDArray[np.uint64]) -> None:
        self._tables.publish_layer(layer, row[: self.layers[layer].experts])


def _bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
