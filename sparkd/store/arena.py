"""The arena: one shared region with all weights, and everything a process needs to find its way in it.

The store creates it in the region the supervisor made; workers and a restarted store attach. Model, program and layout
are rebuilt from the raw GGUF headers inside, so that attaching reads no file. Words of the arena header (u64):

    0 magic (stored last: present means laid out)   1 layout version   2 total bytes   3 core loaded (0, 1)
    4-7 fingerprint of the model   8, 9 shard entries: offset, bytes   10, 11 directory   12, 13 core
    14 shards   15 slabs   16.. for each slab: offset, record bytes, slots, of them reserve, and spare
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import UnavailableError
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.model_file import Identity, ModelFile
from sparkd.graph.program import Program
from sparkd.ipc import _atomics
from sparkd.ipc.directory import Directory, State
from sparkd.ipc.memory import Region
from sparkd.residency.slabs import SlabSize
from sparkd.store.layout import (
    HEADER_WORDS,
    PAGE,
    SHARD_ENTRY,
    SLAB_WORDS,
    VERSION,
    ArenaLayout,
    shard_entry_bytes,
)

_MAGIC = int.from_bytes(b"SPKARENA", "little")
_MAGIC_WORD, _VERSION_WORD, _TOTAL_WORD, _CORE_LOADED_WORD, _FINGERPRINT_WORD = 0, 1, 2, 3, 4
_SHARDS_WORD, _SLABS_WORD = 14, 15
#: device, inode, size, mtime_ns, bytes of the path, bytes of the header; then path and header.
_SHARD = struct.Struct("<QQQqQQ")


class Arena:
    """A laid out arena. Implements `sparkd.executors.weights.Weights` for a worker whose records are all resident."""

    def __init__(
        self, region: Region, model: ModelFile, program: Program, layout: ArenaLayout, directory: Directory
    ) -> None:
        self.region = region
        self.model = model
        self.program = program
        self.layout = layout
        self.directory = directory
        self._words: NDArray[np.uint64] = region.array(0, PAGE // 8, np.uint64)
        slabs = [layout.slabs[layer.slab] for layer in layout.layers]
        # Of the slab of each expert layer: address of the first slot, bytes from one slot to the next.
        self._first = np.array([region.address + slab.offset for slab in slabs], np.uint64).reshape(-1, 1)
        self._record_bytes = np.array([slab.record_bytes for slab in slabs], np.uint64).reshape(-1, 1)

    @staticmethod
    def present(region: Region) -> bool:
        """Whether the region holds an arena (of whatever version)."""
        return _atomics.load(region.array(0, 1, np.uint64), _MAGIC_WORD) == _MAGIC

    @staticmethod
    def create(region: Region, model: ModelFile, program: Program, layout: ArenaLayout) -> Arena:
        """Lay out an empty region of `layout.total_bytes`: header, raw GGUF headers, a directory without residents."""
        if region.size != layout.total_bytes:
            raise ValueError(f"the region has {region.size} bytes, the layout needs {layout.total_bytes}")
        layers = len(program.expert_layers)
        experts = max((layer.experts for layer in program.expert_layers), default=0)
        directory = Directory.create(region, layout.directory_offset, layers, experts)
        _write_shards(region, model)
        arena = Arena(region, model, program, layout, directory)
        header = _header(model.fingerprint, layout, len(model.shards))
        arena._words[1 : len(header)] = header[1:]
        _atomics.store(arena._words, _MAGIC_WORD, _MAGIC)
        return arena

    @staticmethod
    def attach(region: Region, build: Callable[[ModelFile], Program]) -> Arena:
        """Use an arena that is there; `build` makes the program of its model (the same that the store made).

        UnavailableError when there is none, or one of another layout.
        """
        words = region.array(0, PAGE // 8, np.uint64)
        if not Arena.present(region):
            raise UnavailableError("the store has not laid out the arena yet")
        if words[_VERSION_WORD] != VERSION:
            what = f"the arena has layout version {words[_VERSION_WORD]}, this program knows {VERSION}"
            raise UnavailableError(what, fix="restart the daemon")
        another = UnavailableError("the arena was laid out by another version of sparkd", fix="restart the daemon")
        model = _read_shards(region, int(words[_SHARDS_WORD]))
        program = build(model)
        table = words[HEADER_WORDS : HEADER_WORDS + SLAB_WORDS * int(words[_SLABS_WORD])].reshape(-1, SLAB_WORDS)
        sizes = [SlabSize(int(slots), int(reserve), int(spare)) for _, _, slots, reserve, spare in table]
        try:
            layout = ArenaLayout.of(program, model, sizes)
        except ValueError:
            raise another from None
        expected = _header(model.fingerprint, layout, len(model.shards))
        found = words[: len(expected)].copy()
        found[_CORE_LOADED_WORD] = 0
        if layout.total_bytes != region.size or not np.array_equal(found, expected):
            raise another
        return Arena(region, model, program, layout, Directory.attach(region, layout.directory_offset))

    @property
    def core_loaded(self) -> bool:
        """Whether all core tensors are complete."""
        return _atomics.load(self._words, _CORE_LOADED_WORD) == 1

    def publish_core(self) -> None:
        """Say that all core tensors are complete. The store alone does this."""
        _atomics.store(self._words, _CORE_LOADED_WORD, 1)

    def tensor(self, name: str) -> Stored:
        """Address and format of a core tensor in this process. KeyError for any other tensor."""
        return Stored(self.region.address + self.layout.core[name], self.model.tensors[name].format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        """Gate, up, down inside the records of an expert layer."""
        return self.layout.layers[layer].pieces

    def records(self) -> list[NDArray[np.uint64]]:
        """For each expert layer the addresses of its records in this process, uint64 [experts]; 0: not resident."""
        rows = self.addresses(self.directory.snapshot())
        return [row[: layer.experts] for row, layer in zip(rows, self.layout.layers, strict=True)]

    def addresses(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The address in this process that each word of the directory stands for, uint64 [layers, experts]; 0: none."""
        slots = words & np.uint64(0xFFFFFFFF)
        return np.where(
            words >> np.uint64(62) == State.RESIDENT, self._first + slots * self._record_bytes, np.uint64(0)
        )

    def address(self, layer: int, slot: int) -> int:
        """The address in this process of slot `slot` of the slab that holds expert layer `layer`."""
        return self.region.address + self.layout.record(layer, slot)


def _header(fingerprint: str, layout: ArenaLayout, shards: int) -> NDArray[np.uint64]:
    """The words of the arena header, with core not loaded."""
    identity = np.frombuffer(bytes.fromhex(fingerprint), "<u8")
    slabs = [word for slab in layout.slabs for word in (slab.offset, slab.record_bytes, *astuple(slab.size))]
    places = [
        PAGE,
        layout.shards_bytes,
        layout.directory_offset,
        layout.directory_bytes,
        layout.core_offset,
        layout.core_bytes,
    ]
    words = [_MAGIC, VERSION, layout.total_bytes, 0, *map(int, identity), *places, shards, len(layout.slabs), *slabs]
    return np.array(words, np.uint64)


def _write_shards(region: Region, model: ModelFile) -> None:
    offset = PAGE
    for shard in model.shards:
        path, identity = os.fsencode(shard.path), shard.identity
        entry = _SHARD.pack(
            identity.device, identity.inode, identity.size, identity.mtime_ns, len(path), len(shard.header)
        )
        data = entry + path + shard.header
        region.view(offset, len(data))[:] = data
        offset += shard_entry_bytes(shard)


def _read_shards(region: Region, count: int) -> ModelFile:
    offset = PAGE
    headers: list[bytes] = []
    files: list[tuple[Path, Identity]] = []
    for _ in range(count):
        *identity, path_bytes, header_bytes = _SHARD.unpack(region.view(offset, SHARD_ENTRY))
        data = bytes(region.view(offset + SHARD_ENTRY, path_bytes + header_bytes))
        files.append((Path(os.fsdecode(data[:path_bytes])), Identity(*identity)))
        headers.append(data[path_bytes:])
        offset += -(-(SHARD_ENTRY + len(data)) // 64) * 64
    return ModelFile.from_headers(headers, files)
