"""Running a model file through the native executor, without any process around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.ops import Value, Weight
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.models import build_program
from sparkd.worker.state import Holding, PoolSize, StatePool

sys.path.insert(0, str(Path(__file__).parent))


class FileWeights:
    """The weights of a file in memory of our own: core tensors as they are, records put together expert by expert."""

    def __init__(self, model: ModelFile, program: Program) -> None:
        self._model = model
        self._files = [np.memmap(shard.path, np.uint8, mode="r") for shard in model.shards]
        self._program = program
        #: Of each expert layer uint8 [experts, bytes of a record].
        self.arrays: list[NDArray[np.uint8]] = []
        for layer in program.expert_layers:
            slices = [np.stack([self._rows(w, e) for e in range(layer.experts)]) for w in self._matrices(layer)]
            self.arrays.append(np.concatenate(slices, axis=1))

    @staticmethod
    def _matrices(layer) -> tuple[Weight, Weight, Weight]:
        return layer.gate, layer.up, layer.down

    def _rows(self, weight: Weight, expert: int) -> NDArray[np.uint8]:
        tensor = self._model.tensors[weight.tensor]
        start = tensor.slice_offset(expert) + weight.first_row * tensor.row_bytes
        return self._files[tensor.shard][start : start + weight.rows * tensor.row_bytes]

    def tensor(self, name: str) -> Stored:
        tensor = self._model.tensors[name]
        return Stored(self._files[tensor.shard].ctypes.data + tensor.offset, tensor.format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        pieces, offset = [], 0
        for weight in self._matrices(self._program.expert_layers[layer]):
            format = self._model.tensors[weight.tensor].format
            pieces.append(Piece(offset, format))
            offset += weight.rows * format.row_bytes(weight.columns)
        return tuple(pieces)

    def records(self) -> list[NDArray[np.uint64]]:
        return [r.ctypes.data + np.arange(len(r), dtype=np.uint64) * np.uint64(r.shape[1]) for r in self.arrays]


@dataclass(eq=False)
class Run:
    """One sequence: what it holds of the pool, how far it has come, and what it gave so far."""

    holding: Holding
    position: int = 0
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    experts: list[NDArray[np.int16]] = field(default_factory=list)

    @property
    def all_logits(self) -> NDArray[np.float32]:
        return np.concatenate(self.logits)

    @property
    def all_experts(self) -> NDArray[np.int16]:
        """[expert layers, rows, top_k]."""
        return np.concatenate(self.experts, axis=1)


class Machine:
    """A native executor with a state pool for a few sequences of up to 700 positions."""

    POSITIONS = 700

    def __init__(
        self,
        loaded: Loaded,
        *,
        kv_bytes: int = 4,
        max_rows: int = 600,
        threads: int = 1,
        isa: str = "auto",
        sequences: int = 4,
        stager: Any = None,
        foresight: Any = None,
        keep: Collection[Value] = (),
    ) -> None:
        layout = StateLayout.of(loaded.program, kv_bytes)
        size = PoolSize.worst_case(layout, sequences, self.POSITIONS, max_rows)
        self._stager = stager
        self._pool = StatePool(layout, size, max_rows)
        # Nothing may depend on what was in the memory before.
        memory = StateMemory.allocate(layout, size.pages, size.records)
        for array in (*memory.pages, memory.records):
            array[:] = 0xFF
        self.executor = NativeExecutor(
            loaded.program,
            loaded.weights,
            layout,
            memory,
            max_rows=max_rows,
            threads=threads,
            isa=isa,
            stager=stager,
            foresight=foresight,
            keep=keep,
        )

    def start(self) -> Run:
        holding = self._pool.admit(self.POSITIONS)
        assert holding is not None
        return Run(holding)

    def end(self, run: Run) -> None:
        self._pool.release(run.holding)

    def step(self, *parts: tuple[Run, Sequence[int]], last_only: bool = False) -> None:
        """One step with rows of one or several sequences; logits of every row, or of the last row of each."""
        segments, tokens, wanted = [], [], []
        for run, ids in parts:
            self._pool.extend(run.holding, run.position + len(ids))
            kind = RowKind.DECODE if len(ids) == 1 else RowKind.PREFILL
            segments.append(Segment(run.position, len(ids), run.holding.tables, run.holding.record, kind))
            first = len(tokens) + (len(ids) - 1 if last_only else 0)
            tokens.extend(ids)
            wanted.append(range(first, len(tokens)))
        rows = np.array([row for part in wanted for row in part], np.int32)
        batch = Batch(np.array(tokens, np.int32), tuple(segments), rows)
        result = self.executor.step(batch)
        if self._stager is not None:
            self._stager.check(batch, result)
        at = row = 0
        for (run, ids), part in zip(parts, wanted, strict=True):
            run.logits.append(result.logits[at : at + len(part)])
            run.experts.append(result.experts[:, row : row + len(ids)])
            run.position += len(ids)
            at, row = at + len(part), row + len(ids)
            self._pool.trim(run.holding, run.position)

    def prefill(self, tokens: Sequence[int], chunk: int = 600, last_only: bool = False) -> Run:
        """A new sequence that has read `tokens` in chunks."""
        run = self.start()
        for first in range(0, len(tokens), chunk):
            self.step((run, tokens[first : first + chunk]), last_only=last_only)
        return run

    def greedy(self, run: Run, count: int) -> list[int]:
        """Continue with the best token `count` times; the last one is not read any more."""
        tokens = [int(run.logits[-1][-1].argmax())]
        while len(tokens) < count:
            self.step((run, tokens[-1:]))
            tokens.append(int(run.logits[-1][-1].argmax()))
        return tokens


@dataclass(frozen=True)
class Loaded:
    """A model file, its program, and its weights in memory."""

    program: Program
    weights: FileWeights


@pytest.fixture
def load_file() -> Callable[..., Loaded]:
    """Load a model file."""

    def load(path: Path, yarn: str = "keys") -> Loaded:
        model = ModelFile.open(path)
        program = build_program(model, yarn)
        return Loaded(program, FileWeights(model, program))

    return load


@pytest.fixture
def load(model_path: Callable[[str], Path], load_file: Callable[..., Loaded]) -> Callable[..., Loaded]:
    """Load a test model by the name of its recipe."""
    return lambda name, yarn="keys": load_file(model_path(name), yarn)


@pytest.fixture
def machine() -> type[Machine]:
    """Puts a loaded model into a native executor."""
    return Machine
