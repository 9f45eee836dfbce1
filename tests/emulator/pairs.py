"""The native and the CUDA executor side by side: the same steps, results that must be equal bit for bit."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from host_device import HostDevice
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RowKind, Segment, StepResult
from sparkd.executors.cuda import CudaExecutor
from sparkd.executors.cuda_device import CudaDevice
from sparkd.executors.cuda_host import HostExperts
from sparkd.executors.device import Device
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.executors.weights import Piece, Stored, Weights
from sparkd.gguf.formats import FORMATS_BY_NAME, Format
from sparkd.gguf.model_file import ModelFile
from sparkd.graph import ops
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.ipc.memory import Region
from sparkd.models import build_program
from sparkd.store.arena import Arena
from sparkd.store.copier import Copier
from sparkd.store.layout import ArenaLayout
from sparkd.store.loader import Loader
from sparkd.store.residents import Residents
from sparkd.worker.state import Holding, PoolSize, StatePool

F32 = FORMATS_BY_NAME["F32"]
#: "cuda" has the tests of kernels and models run on a real GPU (bench/gpu_check.py); else they run in the emulator.
DEVICE = os.environ.get("SPARKD_TEST_DEVICE", "host")


def card(*, seed: int, order: str, tensor_cores: bool = False) -> Device:
    """What the CUDA executor of a pair runs on; a real GPU has its own order of threads, and tensor cores or not."""
    return CudaDevice() if DEVICE == "cuda" else HostDevice(seed=seed, order=order, tensor_cores=tensor_cores)


@contextmanager
def loaded(path: Path) -> Iterator[Arena]:
    """All weights of a model file in an arena, as a store lays them out."""
    model = ModelFile.open(path)
    program = build_program(model)
    layout = ArenaLayout.of(program, model)
    region = Region.create(layout.total_bytes)
    try:
        arena = Arena.create(region, model, program, layout)
        copier = Copier(arena)
        Loader(Residents(arena, copier), copier).load()
        yield arena
    finally:
        region.close()


def aligned(data: NDArray) -> NDArray[np.uint8]:
    """The same bytes where the arena would have them: 64-byte aligned, with room up to the next multiple."""
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    memory = np.zeros(raw.size + 128, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + raw.size] = raw
    return memory[start : start + raw.size]


@dataclass
class MadeWeights:
    """Weights made by a test: `tensors` by name, `records[layer]` uint8 [experts, record bytes]."""

    tensors: Mapping[str, tuple[NDArray, Format]]
    records_of: Sequence[NDArray[np.uint8]] = ()
    pieces_of: Sequence[tuple[Piece, Piece, Piece]] = ()
    _kept: dict[object, NDArray[np.uint8]] = field(default_factory=dict)

    def _memory(self, key: object, data: NDArray) -> NDArray[np.uint8]:
        if key not in self._kept:
            self._kept[key] = aligned(data)
        return self._kept[key]

    def tensor(self, name: str) -> Stored:
        data, format = self.tensors[name]
        return Stored(self._memory(name, data).ctypes.data, format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        return self.pieces_of[layer]

    def records(self) -> list[NDArray[np.uint64]]:
        return [
            self._memory(layer, data).ctypes.data + np.arange(len(data), dtype=np.uint64) * np.uint64(data.shape[1])
            for layer, data in enumerate(self.records_of)
        ]


def same(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """Equal bits; any NaN equals any other."""
    nan = np.isnan(one)
    return np.array_equal(nan, np.isnan(other)) and np.array_equal(one[~nan].view("u4"), other[~nan].view("u4"))


@dataclass(eq=False)
class Running:
    """One sequence of a pair: what it holds, and how far it is."""

    holding: Holding
    position: int = 0


class Pair:
    """Both executors, each with state of its own that starts full of 0xFF; `keep` values are compared too."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        device: Device,
        *,
        kv_bytes: int = 2,
        sequences: int = 4,
        positions: int = 300,
        max_rows: int = 64,
        counts: Sequence[int] = (1, 8),
        keep: Collection[ops.Value] = (),
        prompt_rows: int = 8,
        prompt_from: int = 1 << 30,
        host_threads: int = 0,
    ) -> None:
        """Prompts run by graphs unless `prompt_from` says otherwise. `host_threads`: 0, the host computes nothing."""
        self.device = device
        self._keep = keep
        layout = StateLayout.of(program, kv_bytes)
        size = PoolSize.worst_case(layout, sequences, positions, max_rows)
        self._pool = StatePool(layout, size, max_rows)
        self._positions = positions
        memory = StateMemory.allocate(layout, size.pages, size.records)
        for array in (*memory.pages, memory.records):
            array[:] = 0xFF
        self.native = NativeExecutor(program, weights, layout, memory, max_rows=max_rows, threads=1, keep=keep)
        self.cuda = CudaExecutor(
            device, program, weights, layout, pages=size.pages, slots=size.records, context=positions, counts=counts,
            prompt_rows=prompt_rows, prompt_from=prompt_from, keep=keep,
            host=HostExperts(device, program, weights, host_threads) if host_threads else None,
        )  # fmt: skip

    def start(self) -> Running:
        """A new sequence."""
        holding = self._pool.admit(self._positions)
        assert holding is not None
        return Running(holding)

    def end(self, sequence: Running) -> None:
        """Give its state back, to be used by others as it is."""
        self._pool.release(sequence.holding)

    def segments(self, rows: int) -> tuple[Segment, ...]:
        """Rows of a sequence that has just begun."""
        holding = self.start().holding
        self._pool.extend(holding, rows)
        return (Segment(0, rows, holding.tables, holding.record, RowKind.DECODE),)

    def step(self, *parts: tuple[Running, Sequence[int]], logits: bool = True) -> StepResult:
        """A step of both with logits of every row, or of none; asserts that all results are equal."""
        segments, tokens = [], []
        for sequence, ids in parts:
            self._pool.extend(sequence.holding, sequence.position + len(ids))
            holding = sequence.holding
            segments.append(Segment(sequence.position, len(ids), holding.tables, holding.record, RowKind.DECODE))
            tokens.extend(ids)
        wanted = np.arange(len(tokens) if logits else 0, dtype=np.int32)
        batch = Batch(np.array(tokens, np.int32), tuple(segments), wanted)
        native, cuda = self.native.step(batch), self.cuda.step(batch)
        np.testing.assert_array_equal(native.experts, cuda.experts)
        for value in self._keep:
            assert same(self.native.trace(value), self.cuda.trace(value)), value.name
        assert same(native.logits, cuda.logits)
        for sequence, ids in parts:
            sequence.position += len(ids)
            self._pool.trim(sequence.holding, sequence.position)
        return native
