"""Where everything lies in the arena: pure arithmetic from a program, a model file and slab sizes.

    0          arena header: u64 words (`sparkd.store.arena` names them), then the slab table
    4096       for each shard: its identity, path, and raw GGUF header bytes
    page       directory (`sparkd.ipc.directory`)
    page       core: every tensor that an operation other than `Experts` names, byte for byte as in the file
    page       slab after slab, each page-aligned: slots of one size

Its end is that of a huge page, so that an arena can be made of those.

A record is one expert: the pieces gate, up, down, byte for byte. Each has room for the whole blocks of the file that it
lies in, and begins as far within a block as there, so that a direct read can go straight to its place (not where the
experts of a tensor lie differently in their blocks). Expert layers whose records have one size share a slab; whether
gate and up are fused in the file makes no difference to that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sparkd.errors import UnsupportedError
from sparkd.executors.weights import Piece
from sparkd.gguf.model_file import ModelFile, Shard
from sparkd.gguf.reader import Tensor
from sparkd.graph.ops import Op, Weight
from sparkd.graph.program import ExpertLayer, Program
from sparkd.ipc.directory import Directory
from sparkd.ipc.internal import Tier
from sparkd.ipc.mapping import HUGE_PAGE
from sparkd.residency.sizing import SlabNeed, size_slabs, smallest_slabs
from sparkd.residency.slabs import SlabSize

VERSION = 3
ALIGNMENT = 64
PAGE = 4096
#: Bytes of a block of most disks. Those with larger ones are read by way of a buffer.
BLOCK = 512
#: What kernels ask of the first byte of a piece; files give it unless they say otherwise.
PIECE_ALIGNMENT = 32
#: u64 words before the slab table, and words of one slab in it.
HEADER_WORDS = 16
SLAB_WORDS = 5
MAX_SLABS = (PAGE // 8 - HEADER_WORDS) // SLAB_WORDS
#: Bytes of a shard's entry before path and header.
SHARD_ENTRY = 48
#: Where an extent comes from the arena itself, its `source` counts from the arena's start.
IN_ARENA = -1


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` bytes at `source` of shard `shard` (or `IN_ARENA`) that belong at `target`.

    Targets count from the arena's or the record's start.
    """

    shard: int
    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class Slab:
    """`size.slots` places of `record_bytes` each, from `offset` on; the last of them are the reserve.

    `records` of the model have this size; `full`: each has an ordinary slot of its own.
    """

    offset: int
    record_bytes: int
    size: SlabSize
    records: int

    @property
    def slots(self) -> int:
        """All places, reserve and spare ones included."""
        return self.size.slots

    @property
    def full(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.size.holds(self.records)


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """The records of one expert layer: slab number, gate, up, down, and how many there are."""

    slab: int
    pieces: tuple[Piece, Piece, Piece]
    experts: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """All offsets in bytes from the arena's start. `core` maps tensor names to offsets, in the order of first use."""

    shards_bytes: int
    directory_offset: int
    directory_bytes: int
    core_offset: int
    core_bytes: int
    core: Mapping[str, int]
    layers: tuple[LayerRecords, ...]
    slabs: tuple[Slab, ...]
    total_bytes: int

    @staticmethod
    def of(program: Program, model: ModelFile, sizes: Sequence[SlabSize] | None = None) -> ArenaLayout:
        """Lay out `model`; `sizes[i]` is that of slab i, None gives every record a slot of its own.

        UnsupportedError when there are more record sizes than the header can list, ValueError for a slab that cannot
        serve its records.
        """
        shards_bytes = sum(shard_entry_bytes(shard) for shard in model.shards)
        directory_offset = _up(PAGE + shards_bytes, PAGE)
        experts = max((layer.experts for layer in program.expert_layers), default=0)
        directory_bytes = Directory.size(len(program.expert_layers), experts)
        core_offset = _up(directory_offset + directory_bytes, PAGE)
        core: dict[str, int] = {}
        offset = core_offset
        for name in core_tensors(program):
            core[name] = offset
            offset = _up(offset + model.tensors[name].nbytes, ALIGNMENT)
        core_bytes = offset - core_offset
        layers, record_bytes, needed = _layers(program, model)
        slabs = []
        for number, records in enumerate(needed):
            size = SlabSize(records, reserve=0) if sizes is None else sizes[number]
            size.holds(records)
            slab = Slab(_up(offset, PAGE), record_bytes[number], size, records)
            slabs.append(slab)
            offset = slab.offset + slab.slots * slab.record_bytes
        return ArenaLayout(
            shards_bytes,
            directory_offset,
            directory_bytes,
            core_offset,
            core_bytes,
            core,
            layers,
            tuple(slabs),
            _up(offset, HUGE_PAGE),
        )

    @staticmethod
    def within(program: Program, model: ModelFile, room: int) -> ArenaLayout:
        """The layout that holds most of `model` in `room` bytes; the same for any room down to its `total_bytes`.

        The smallest of all where `room` is too small for any: then its `total_bytes` are more. UnsupportedError: `of`.
        """
        layout = ArenaLayout.of(program, model)
        if layout.total_bytes <= room:
            return layout
        needs = layout.slab_needs(program)
        budget = room // HUGE_PAGE * HUGE_PAGE - _up(layout.core_offset + layout.core_bytes, PAGE)
        try:
            sizes = size_slabs(needs, budget, PAGE)
        except ValueError:
            sizes = smallest_slabs(needs)
        return ArenaLayout.of(program, model, sizes)

    def slab_needs(self, program: Program) -> list[SlabNeed]:
        """What each slab is there for."""
        needs = []
        for number, slab in enumerate(self.slabs):
            layers = [n for n, records in enumerate(self.layers) if records.slab == number]
            experts = max(self.layers[n].experts for n in layers)
            top_k = max(program.expert_layers[n].top_k for n in layers)
            needs.append(SlabNeed(slab.record_bytes, slab.records, experts, top_k))
        return needs

    def record(self, layer: int, slot: int) -> int:
        """Offset of slot `slot` of the slab that holds expert layer `layer`."""
        slab = self.slabs[self.layers[layer].slab]
        if not 0 <= slot < slab.slots:
            raise IndexError(f"slab {self.layers[layer].slab} has {slab.slots} slots, not {slot}")
        return slab.offset + slot * slab.record_bytes

    def slot_number(self, slab: int, slot: int) -> int:
        """Which one a slot of a slab is among those of all slabs."""
        return sum(before.slots for before in self.slabs[:slab]) + slot

    @property
    def partial(self) -> bool:
        """Whether some record has no slot of its own: then records come and go."""
        return not all(slab.full for slab in self.slabs)

    @property
    def records_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.slots * slab.record_bytes for slab in self.slabs)

    @property
    def padding_bytes(self) -> int:
        """What lies between the parts, and after them up to the end of a huge page."""
        return self.total_bytes - (
            PAGE + self.shards_bytes + self.directory_bytes + self.core_bytes + self.records_bytes
        )


def core_tensors(program: Program) -> list[str]:
    """Names of the tensors that every token uses, in the order of first use."""
    names = (weight.tensor for op in program.ops for weight in _weights(op))
    return list(dict.fromkeys(names))


def core_extent(layout: ArenaLayout, model: ModelFile, name: str) -> Extent:
    """Where the bytes of a core tensor come from and go to."""
    tensor = model.tensors[name]
    return Extent(tensor.shard, tensor.offset, layout.core[name], tensor.nbytes)


def record_extents(layer: ExpertLayer, records: LayerRecords, model: ModelFile, expert: int) -> Iterator[Extent]:
    """Where gate, up and down of one expert come from; targets count from the record's start."""
    for weight, piece in zip((layer.gate, layer.up, layer.down), records.pieces, strict=True):
        tensor = model.tensors[weight.tensor]
        source = tensor.slice_offset(expert) + weight.first_row * tensor.row_bytes
        yield Extent(tensor.shard, source, piece.offset, weight.rows * tensor.row_bytes)


def weights_bytes(layer: ExpertLayer, model: ModelFile) -> int:
    """Bytes of one expert's weights, as they would lie one behind the other."""
    weights = (layer.gate, layer.up, layer.down)
    return sum(_up(weight.rows * model.tensors[weight.tensor].row_bytes, ALIGNMENT) for weight in weights)


def shard_entry_bytes(shard: Shard) -> int:
    """Bytes of a shard's entry in the arena."""
    return _up(SHARD_ENTRY + len(bytes(shard.path)) + len(shard.header), ALIGNMENT)


def told_tier(tier: str, model: str, layout: ArenaLayout, sizes: Iterable[SlabSize] | None = None) -> Tier:
    """A tier as the calibrator is told of it; `sizes` are its slabs', those of the arena unless given."""
    sizes = [slab.size for slab in layout.slabs] if sizes is None else list(sizes)
    return Tier(
        model=model,
        tier=tier,
        slabs=[layer.slab for layer in layout.layers],
        experts=[layer.experts for layer in layout.layers],
        record_bytes=[slab.record_bytes for slab in layout.slabs],
        slots=[size.ordinary for size in sizes],
        spare=[size.spare for size in sizes],
    )


def _weights(op: Op) -> Iterator[Weight]:
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if isinstance(value, Weight):
            yield value


def _layers(program: Program, model: ModelFile) -> tuple[tuple[LayerRecords, ...], list[int], list[int]]:
    """Records of every expert layer; for each slab the record size and the slots that all its records need."""
    layers: list[LayerRecords] = []
    sizes: list[int] = []
    needed: list[int] = []
    for layer in program.expert_layers:
        pieces = []
        size = 0
        for weight in (layer.gate, layer.up, layer.down):
            tensor = model.tensors[weight.tensor]
            pieces.append(Piece(size + _within_block(weight, tensor), tensor.format))
            size += _up(weight.rows * tensor.row_bytes, BLOCK) + BLOCK
        if size not in sizes:
            sizes.append(size)
            needed.append(0)
        slab = sizes.index(size)
        layers.append(LayerRecords(slab, (pieces[0], pieces[1], pieces[2]), layer.experts))
        needed[slab] += layer.experts
    if len(sizes) > MAX_SLABS:
        raise UnsupportedError(f"experts of {len(sizes)} different sizes, sparkd takes {MAX_SLABS}", where=model.where)
    return tuple(layers), sizes, needed


def _within_block(weight: Weight, tensor: Tensor) -> int:
    """How far within a block of the file each expert's piece begins, 0 where that differs."""
    within = (tensor.slice_offset(0) + weight.first_row * tensor.row_bytes) % BLOCK
    alike = tensor.slice_bytes % BLOCK == 0 and within % PIECE_ALIGNMENT == 0
    return within if alike else 0


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
