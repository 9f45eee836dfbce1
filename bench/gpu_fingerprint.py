"""What models say, as a number each: kept here, so that a GPU can be held to a CPU's bits where nothing can be built.

    PYTHONPATH=. python bench/gpu_fingerprint.py [--write] [--device cuda]

Needs this checkout, numpy, CuPy and a driver; no compiler and no network. A prompt and the greedy tokens after it, by
steps of several rows and of one; the number is the sha256 of all logits and chosen experts, bit for bit. `--device
native` has the native executor compute instead, `--write` keeps what comes out; the tests do the former. Ends with
status 1 where a number is another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, Executor, RowKind, Segment
from sparkd.executors.cuda import CudaExecutor
from sparkd.executors.cuda_device import CudaDevice
from sparkd.executors.device import Device
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.models import build_program
from sparkd.worker.state import PoolSize, StatePool

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_suffix(".json")
TOOLS = ROOT / "tests" / "data" / "tools"
#: The built-in model, and one of each architecture that is made by the tests' tools: architecture, preset, types, seed.
DEMO = ROOT / "sparkd" / "demo" / "spark-demo-laguna.gguf"
MADE = [("laguna", "tinyk", "q4_k_m", 1), ("qwen35moe", "tinyk", "q4_k_m", 1), ("qwen35moe", "tiny", "f32", 1)]
PROMPT, TOKENS, CHUNK = 20, 12, 8
_ALIGNMENT = 64


class FileWeights:
    """Weights of a model file as it is, in host memory. Implements `sparkd.executors.weights.Weights`."""

    def __init__(self, model: ModelFile, program: Program) -> None:
        self._model, self._program = model, program
        self._files = [np.fromfile(shard.path, np.uint8) for shard in model.shards]
        self._kept: dict[str, NDArray[np.uint8]] = {}
        self._records: list[NDArray[np.uint8]] = []
        self._pieces: list[tuple[Piece, Piece, Piece]] = []
        for layer in program.expert_layers:
            parts, pieces, offset = [], [], 0
            for weight in (layer.gate, layer.up, layer.down):
                tensor = model.tensors[weight.tensor]
                pieces.append(Piece(offset, tensor.format))
                size = weight.rows * tensor.row_bytes
                first = weight.first_row * tensor.row_bytes
                starts = [tensor.slice_offset(expert) + first for expert in range(layer.experts)]
                rows = np.stack([self._files[tensor.shard][start : start + size] for start in starts])
                parts.append(np.pad(rows, ((0, 0), (0, -size % _ALIGNMENT))))
                offset += parts[-1].shape[1]
            self._records.append(_aligned(np.concatenate(parts, axis=1)))
            self._pieces.append((pieces[0], pieces[1], pieces[2]))

    def tensor(self, name: str) -> Stored:
        """A core tensor."""
        tensor = self._model.tensors[name]
        if name not in self._kept:
            self._kept[name] = _aligned(self._files[tensor.shard][tensor.offset : tensor.offset + tensor.nbytes])
        return Stored(self._kept[name].ctypes.data, tensor.format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        """Gate, up, down inside records."""
        return self._pieces[layer]

    def records(self) -> list[NDArray[np.uint64]]:
        """Addresses of all records."""
        return [
            data.ctypes.data + np.arange(len(data), dtype=np.uint64) * np.uint64(data.shape[1])
            for data in self._records
        ]


def _aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same, 64-byte aligned, with room up to the next multiple."""
    memory = np.zeros(data.size + 2 * _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    placed = memory[start : start + data.size].reshape(data.shape)
    placed[:] = data
    return placed


class OnCard(FileWeights):
    """The same with records in the card's memory."""

    def __init__(self, model: ModelFile, program: Program, device: Device) -> None:
        super().__init__(model, program)
        stream = device.stream()
        self._places = []
        for data in self._records:
            self._places.append(device.allocate(data.nbytes))
            device.upload(stream, self._places[-1], data)
        stream.synchronize()

    def records(self) -> list[NDArray[np.uint64]]:
        """Addresses of all records on the card."""
        return [
            np.uint64(place) + np.arange(len(data), dtype=np.uint64) * np.uint64(data.shape[1])
            for place, data in zip(self._places, self._records, strict=True)
        ]


#: Makes an executor of a model file and its program, with a state of this layout and size.
Make = Callable[[ModelFile, Program, StateLayout, PoolSize], Executor]


def on_card(device: Device) -> Make:
    """A GPU, or what stands in for one."""
    return lambda model, program, layout, size: CudaExecutor(
        device, program, OnCard(model, program, device), layout, pages=size.pages, slots=size.records,
        context=PROMPT + TOKENS, prompt_rows=CHUNK,
    )  # fmt: skip


def native(model: ModelFile, program: Program, layout: StateLayout, size: PoolSize, *, isa: str = "auto") -> Executor:
    """The CPU, where it was built."""
    from sparkd.executors.native import NativeExecutor, StateMemory

    memory = StateMemory.allocate(layout, size.pages, size.records)
    return NativeExecutor(program, FileWeights(model, program), layout, memory, max_rows=CHUNK, threads=1, isa=isa)


def fingerprint(path: Path, make: Make) -> str:
    """The number of one model."""
    model = ModelFile.open(path)
    program = build_program(model)
    layout = StateLayout.of(program, 2)
    size = PoolSize.worst_case(layout, 1, PROMPT + TOKENS, CHUNK)
    executor = make(model, program, layout, size)
    pool = StatePool(layout, size, CHUNK)
    holding = pool.admit(PROMPT + TOKENS)
    assert holding is not None
    tokens = [(7 * i + 3) % program.vocab for i in range(PROMPT)]
    told, done = hashlib.sha256(), 0
    while done < PROMPT + TOKENS:
        part = tokens[done : done + CHUNK]
        pool.extend(holding, done + len(part))
        segment = Segment(done, len(part), holding.tables, holding.record, RowKind.DECODE)
        rows = np.arange(len(part), dtype=np.int32)
        result = executor.step(Batch(np.array(part, np.int32), (segment,), rows))
        told.update(result.logits.tobytes() + result.experts.tobytes())
        done += len(part)
        pool.trim(holding, done)
        if done == len(tokens):
            tokens.append(int(result.logits[-1].argmax()))
    return told.hexdigest()


@contextmanager
def models() -> Iterator[dict[str, Path]]:
    """The files by name; all but the built-in one are made, and are gone afterwards."""
    sys.path.insert(0, str(TOOLS))
    import make_gguf

    with TemporaryDirectory() as folder:
        paths = {DEMO.stem: DEMO}
        for architecture, preset, types, seed in MADE:
            name = f"{architecture}-{preset}-s{seed}-{types}"
            paths[name] = Path(folder) / f"{name}.gguf"
            make_gguf.generate(architecture, preset, types, seed, str(paths[name]), None)
        yield paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "native"], default="cuda")
    parser.add_argument("--write", action="store_true", help="keep the numbers")
    given = parser.parse_args()
    make = native if given.device == "native" else on_card(CudaDevice())
    with models() as paths:
        found = {name: fingerprint(path, make) for name, path in paths.items()}
    if given.write:
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    kept = json.loads(KEPT.read_text())
    for name, number in found.items():
        print(f"{name}: {number[:16]} {'equal' if number == kept[name] else 'DIFFERENT'}")
    return int(found != kept)


if __name__ == "__main__":
    raise SystemExit(main())
