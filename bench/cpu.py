"""The CPU executor against the memory it reads and against llama.cpp, in one run.

    python bench/cpu.py MODEL.gguf ... [--peer PYTHON] [--threads 1 2] [--prefill 512] [--decode 64] [--rounds 3]
    python bench/cpu.py MODEL.gguf ... --together 1 2 4 8 [--threads 1 2]
    python bench/cpu.py --types [--isa ISA ...]

For each model: prompts and decode steps of sparkd and, where `--peer` names an interpreter that has llama-cpp-python
(the extra `bench`), of llama.cpp in both its modes (weights as in the file; repacked), in turn, round by round, so that
a machine whose speed drifts treats all alike. Figures are medians of the rounds; on the clock, and per second of
processor time, which a busy machine disturbs less. `--together`: decode steps of several sequences at once. `--types`:
products of one activation row with weights of every type out of cache. Every table begins with what a plain read
reaches.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.executors.weights import Piece, Stored
from sparkd.gguf.formats import FORMATS_BY_NAME, Format
from sparkd.gguf.model_file import ModelFile
from sparkd.graph import ops
from sparkd.graph.program import Program
from sparkd.graph.state import PAGE, StateLayout
from sparkd.kernels import available
from sparkd.models import build_program

PEER = Path(__file__).with_name("cpu_peer.py")
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of a prompt and of decode steps, on the clock and of processor time."""

    prefill: float
    prefill_used: float
    decode: float
    decode_used: float


class PeerDiedError(Exception):
    """The process of the peer ended before it answered; its exit status."""


Way = Callable[[int, int, int], Run]
"""Threads, tokens of the prompt, decode steps."""


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock and of processor time."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


class FileWeights:
    """Core tensors and records in memory of their own, which is in huge pages like the arena of a daemon."""

    def __init__(self, model: ModelFile, program: Program) -> None:
        self._model = model
        self._program = program
        self._files = [np.memmap(shard.path, np.uint8, "r") for shard in model.shards]
        self._core: dict[str, NDArray[np.uint8]] = {}
        self._records = []
        for layer in program.expert_layers:
            matrices = [self._matrix(w, layer.experts) for w in (layer.gate, layer.up, layer.down)]
            self._records.append(np.concatenate(matrices, axis=1))

    def _matrix(self, weight: ops.Weight, experts: int) -> NDArray[np.uint8]:
        tensor = self._model.tensors[weight.tensor]
        size, step = weight.rows * tensor.row_bytes, tensor.slice_offset(1) - tensor.slice_offset(0)
        first = tensor.slice_offset(0) + weight.first_row * tensor.row_bytes
        strided = np.lib.stride_tricks.as_strided
        return strided(self._files[tensor.shard][first:], (experts, size), (step, 1), writeable=False)

    def tensor(self, name: str) -> Stored:
        tensor = self._model.tensors[name]
        if name not in self._core:
            self._core[name] = self._files[tensor.shard][tensor.offset : tensor.offset + tensor.nbytes].copy()
        return Stored(self._core[name].ctypes.data, tensor.format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        pieces, offset = [], 0
        found = self._program.expert_layers[layer]
        for weight in (found.gate, found.up, found.down):
            format = self._model.tensors[weight.tensor].format
            pieces.append(Piece(offset, format))
            offset += weight.rows * format.row_bytes(weight.columns)
        gate, up, down = pieces
        return gate, up, down

    def records(self) -> list[NDArray[np.uint64]]:
        return [r.ctypes.data + np.arange(len(r), dtype=np.uint64) * np.uint64(r.shape[1]) for r in self._records]


class Sparkd:
    """A model, with an executor for each number of threads."""

    def __init__(self, path: Path, threads: Sequence[int], positions: int, isa: str, sequences: int = 1) -> None:
        model = ModelFile.open(path)
        self._program = build_program(model)
        weights = FileWeights(model, self._program)
        layout = StateLayout.of(self._program, 2)
        pages = -(-positions // PAGE)
        memory = StateMemory.allocate(layout, [pages * sequences] * len(layout.groups), sequences)
        self._tables = [
            tuple(np.arange(pages * slot, pages * (slot + 1), dtype=np.int32) for _ in layout.groups)
            for slot in range(sequences)
        ]
        self._executors = {
            n: NativeExecutor(self._program, weights, layout, memory, max_rows=CHUNK, threads=n, isa=isa)
            for n in threads
        }

    def run(self, threads: int, prefill: int, decode: int) -> Run:
        executor = self._executors[threads]
        chunks = [(first, min(CHUNK, prefill - first)) for first in range(0, prefill, CHUNK)]
        steps = [(prefill + i, 1) for i in range(decode)]
        return Run(
            *measure(lambda: [self._step(executor, *part) for part in chunks]),
            *measure(lambda: [self._step(executor, *part) for part in steps]),
        )

    def together(self, threads: int, sequences: int, steps: int) -> tuple[float, float]:
        """Seconds of decode steps of some sequences at once, on the clock and of processor time."""
        executor = self._executors[threads]
        rows = np.arange(sequences, dtype=np.int32)

        def step(position: int) -> None:
            segments = tuple(
                Segment(position, 1, table, slot, RowKind.DECODE) for slot, table in enumerate(self._tables[:sequences])
            )
            tokens = ((position * 7919 + rows * 104729) % self._program.vocab).astype(np.int32)
            executor.step(Batch(tokens, segments, rows))

        step(0)
        return measure(lambda: [step(position) for position in range(1, steps + 1)])

    def _step(self, executor: NativeExecutor, start: int, count: int) -> None:
        tokens = ((start + np.arange(count)) * 7919 % self._program.vocab).astype(np.int32)
        segment = Segment(start, count, self._tables[0], 0, RowKind.PREFILL)
        executor.step(Batch(tokens, (segment,), np.array([count - 1], np.int32)))


@contextmanager
def sparkd(path: Path, threads: Sequence[int], positions: int, isa: str) -> Iterator[Way]:
    yield Sparkd(path, threads, positions, isa).run


@contextmanager
def peer(python: str, path: Path, positions: int, repack: bool) -> Iterator[Way]:
    command = [python, str(PEER), str(path), str(positions), str(int(repack))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reader, writer = process.stdout, process.stdin

        def run(threads: int, prefill: int, decode: int) -> Run:
            writer.write(f"{threads} {prefill} {decode}\n")
            writer.flush()
            answer = reader.readline()
            if not answer:
                raise PeerDiedError(process.wait())
            return Run(*map(float, answer.split()))

        yield run
        writer.close()


def read_speed(megabytes: int = 512) -> float:
    """GB per second that one core reads, at best: sums of float32 out of cache."""
    values = np.ones(megabytes << 18, np.float32)
    return values.nbytes / min(measure(values.max)[1] for _ in range(5)) / 1e9


def bench_model(path: Path, given: argparse.Namespace) -> None:
    positions = given.prefill + given.decode + PAGE
    print(f"\n{path.name}; a plain read by one core: {read_speed():.1f} GB/s")
    runs: dict[tuple[str, int], list[Run]] = {}
    ways: list[tuple[str, Callable[[], object]]] = [
        (f"sparkd {isa}", lambda isa=isa: sparkd(path, given.threads, positions, isa)) for isa in given.isa
    ]
    if given.peer:
        ways += [
            (
                f"llama.cpp{', repacked' if repack else ''}",
                lambda repack=repack: peer(given.peer, path, positions, repack),
            )
            for repack in (False, True)
        ]
    for _ in range(given.rounds):
        for name, open_way in list(ways):
            try:
                with open_way() as run:  # type: ignore[attr-defined]
                    for threads in given.threads:
                        run(threads, 16, 2)  # the first use of memory is not measured
                        runs.setdefault((name, threads), []).append(run(threads, given.prefill, given.decode))
            except PeerDiedError as error:
                print(f"{name} died: exit status {error}")
                ways.remove((name, open_way))
    print("| way | threads | prefill tokens/s | of processor time | decode tokens/s | of processor time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (name, threads), results in runs.items():
        speeds = [
            statistics.median(count / getattr(r, field) for r in results)
            for field, count in (
                ("prefill", given.prefill), ("prefill_used", given.prefill),
                ("decode", given.decode), ("decode_used", given.decode),
            )
        ]  # fmt: skip
        print(f"| {name} | {threads} | " + " | ".join(f"{speed:.1f}" for speed in speeds) + " |")


def bench_together(path: Path, given: argparse.Namespace) -> None:
    print(f"\n{path.name}; a plain read by one core: {read_speed():.1f} GB/s")
    print("| threads | sequences | tokens/s | of processor time | against one |")
    print("| --- | --- | --- | --- | --- |")
    machine = Sparkd(path, given.threads, given.decode + PAGE, given.isa[0], max(given.together))
    for threads in given.threads:
        machine.run(threads, 16, 2)  # the first use of memory is not measured
        runs: dict[int, list[tuple[float, float]]] = {}
        for _ in range(given.rounds):
            for sequences in given.together:
                runs.setdefault(sequences, []).append(machine.together(threads, sequences, given.decode))
        speeds = {
            sequences: [sequences * given.decode / statistics.median(seconds) for seconds in zip(*results, strict=True)]
            for sequences, results in runs.items()
        }
        for sequences, (clock, used) in speeds.items():
            ratio = clock / speeds[given.together[0]][0]
            print(f"| {threads} | {sequences} | {clock:.1f} | {used:.1f} | {ratio:.2f} |")


class OneTensor:
    """A weight in memory, and activations to multiply it with."""

    def __init__(self, format: Format, columns: int, megabytes: int) -> None:
        rng = np.random.default_rng(1)
        self.columns = columns
        self.rows = (megabytes << 20) // format.row_bytes(columns)
        self._format = format
        self._activations = rng.normal(size=(1, columns)).astype(np.float32)
        # Any bytes, with exponents near 1 where they are factors of floats: no denormal slows anything.
        table: NDArray[np.uint8] = rng.integers(0, 256, self.rows * format.row_bytes(columns), np.uint8)
        if format.block == 1:
            table.reshape(-1, format.bytes)[:, -1] = 0x3C
        elif format.name == "MXFP4":
            table.reshape(-1, format.bytes)[:, 0] = 127
        self.table = table

    def tensor(self, name: str) -> Stored:
        if name == "activations":
            return Stored(self._activations.ctypes.data, FORMATS_BY_NAME["F32"])
        return Stored(self.table.ctypes.data, self._format)

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        raise AssertionError("no experts here")

    def records(self) -> list[NDArray[np.uint64]]:
        return []


def one_row(weights: OneTensor, isa: str) -> Callable[[], float]:
    """Measures products of one activation row, one thread: GB of weights per second of processor time."""
    x = ops.Value("x", weights.columns)
    program_ops = (
        ops.Embed(ops.Weight("activations", 1, weights.columns), x),
        ops.Logits(x, ops.Weight("weight", weights.rows, weights.columns)),
    )
    program = Program("bench", weights.columns, weights.rows, PAGE, program_ops, *[()] * 5)
    layout = StateLayout.of(program, 2)
    memory = StateMemory.allocate(layout, (), 0)
    executor = NativeExecutor(program, weights, layout, memory, max_rows=1, threads=1, isa=isa)
    zero = np.zeros(1, np.int32)
    batch = Batch(zero, (Segment(0, 1, (), 0, RowKind.DECODE),), zero)
    return lambda: weights.table.nbytes / measure(lambda: executor.step(batch))[1] / 1e9


def bench_types(isas: Sequence[str], rounds: int) -> None:
    """Medians of rounds in which a plain read and every instruction set have their turn."""
    print("| type | a plain read, GB/s | " + " | ".join(f"{isa} (of a plain read)" for isa in isas) + " |")
    print("| --- | --- |" + " --- |" * len(isas))
    plain = np.ones(256 << 18, np.float32)
    for format in FORMATS_BY_NAME.values():
        if format.arithmetic is None:
            continue
        weights = OneTensor(format, 2048, 256)
        ways = [lambda: plain.nbytes / measure(plain.max)[1] / 1e9, *[one_row(weights, isa) for isa in isas]]
        speeds = [[way() for way in ways] for _ in range(rounds)]
        roof, *found = (statistics.median(column) for column in zip(*speeds, strict=True))
        cells = [f"{speed:.1f} ({speed / roof:.0%})" for speed in found]
        print(f"| {format.name} | {roof:.1f} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--peer", default="")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", type=int, nargs="+", default=[])
    parser.add_argument("--types", action="store_true")
    parser.add_argument("--isa", nargs="+", default=[available()[0]], choices=available())
    given = parser.parse_args()
    if given.types:
        bench_types(given.isa, given.rounds)
    for path in given.models:
        if given.together:
            bench_together(path, given)
        else:
            bench_model(path, given)


if __name__ == "__main__":
    main()
