"""For gpu_check.py: a model at several residencies of a card, whether it says what the CPU says, and how fast."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, Executor, RowKind, Segment, StepResult
from sparkd.executors.cuda import CudaExecutor
from sparkd.executors.cuda_host import HostExperts
from sparkd.executors.cuda_source import COUNTS
from sparkd.executors.device import Device
from sparkd.executors.metered import Metered
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.graph.state import StateLayout
from sparkd.residency.device_budget import RESERVE_PARTS, ROWS, staging_slots
from sparkd.residency.leases import Use
from sparkd.residency.misses import Misses
from sparkd.residency.placement import Placement
from sparkd.residency.ring import HALF_LIFE
from sparkd.residency.slabs import SlabSize
from sparkd.store.arena import Arena
from sparkd.worker.device_misses import MissPolicy, measured
from sparkd.worker.device_slots import DeviceSlots
from sparkd.worker.device_staging import Staging
from sparkd.worker.device_tier import DeviceTier
from sparkd.worker.registration import Registration
from sparkd.worker.state import PoolSize, StatePool

#: Shares of the experts that are hot, and slots of the ring in each layer.
SHARES = (1.0, 0.6, 0.4, 0.25)
RINGS = (0, 8, 16, 32, 48)
#: Shares at which all that may become of what is missed is compared.
LOW_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
_PROMPT = 24
_CHUNK = 8
#: Calls of a tier that has no step to wait for, until it has to have what it wants.
_PATIENCE = 100_000


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, tokens per second of decoding, and the chosen experts [layers, rows, top_k]."""

    tokens: list[int]
    speed: float
    experts: NDArray[np.int16]


@dataclass(frozen=True)
class Found:
    """One residency: slots over all layers, the share of decode's uses that were missed, whether tokens were equal.

    `missed_bytes_s`: bytes of missed experts per second of decoding.
    """

    share: float
    ring: int
    slots: int
    missed: float
    missed_bytes_s: float
    speed: float
    equal: bool


class _Registered:
    """Stands for the registration of a tier: all of host memory, which was registered before."""

    refused = ""

    def __init__(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._pieces = list(pieces)

    def take(self) -> Iterator[tuple[int, int, int]]:
        pieces, self._pieces = self._pieces, []
        yield from pieces


class _Lent(Metered):
    """A device that gets back, at `end`, what was allocated here."""

    def end(self) -> None:
        for address in list(self._sizes):
            self.free(address)


class Model:
    """Both executors of a loaded model, which run one sequence at a time."""

    def __init__(self, arena: Arena, device: Device, tokens: int) -> None:
        program = arena.program
        self._arena, self._device, self._tokens = arena, device, tokens
        self._layout = StateLayout.of(program, 2)
        self._positions = _PROMPT + tokens
        self._size = PoolSize.worst_case(self._layout, 1, self._positions, _CHUNK)
        memory = StateMemory.allocate(self._layout, self._size.pages, self._size.records)
        threads = os.cpu_count() or 1
        self.native = NativeExecutor(program, arena, self._layout, memory, max_rows=_CHUNK, threads=threads)
        self._host = HostExperts(device, program, arena, threads)
        self.cuda = CudaExecutor(
            device, program, arena, self._layout, pages=self._size.pages, slots=self._size.records,
            context=self._positions, counts=COUNTS, prompt_rows=_CHUNK, host=self._host,
        )  # fmt: skip
        registration = Registration(device, arena)
        while registration.register_next():
            pass
        self._pieces = list(registration.take())

    def answer(self, executor: Executor, after: Callable[[bool, StepResult], None] = lambda *_: None) -> Answer:
        """The answer to a prompt that is always the same; `after` each step: whether it was decode, and its result."""
        pool = StatePool(self._layout, self._size, _CHUNK)
        holding = pool.admit(self._positions)
        assert holding is not None
        vocab = self._arena.program.vocab
        tokens = np.random.default_rng(1).integers(0, min(vocab, 4096), _PROMPT).tolist()
        experts, done, began = [], 0, 0.0
        while len(tokens) < self._positions:
            part = tokens[done : done + _CHUNK]
            decode = done >= _PROMPT
            if decode and not began:
                began = time.perf_counter()
            pool.extend(holding, done + len(part))
            kind = RowKind.DECODE if decode else RowKind.PREFILL
            segment = Segment(done, len(part), holding.tables, holding.record, kind)
            last = np.array([len(part) - 1], np.int32)
            result = executor.step(Batch(np.array(part, np.int32), (segment,), last, best_of=vocab))
            after(decode, result)
            experts.append(result.experts)
            done += len(part)
            pool.trim(holding, done)
            if done == len(tokens):
                tokens.append(int(result.logits[0].argmax() if result.best is None else result.best[0]))
        took = time.perf_counter() - began
        decoded = self._positions - _PROMPT - 1
        return Answer(tokens[_PROMPT:], decoded / took, np.concatenate(experts, axis=1))

    def policy(self) -> MissPolicy:
        """What `worker.misses` = auto measures here."""
        lent = _Lent(self._device, self._device.memory()[0])
        try:
            top_k = self._arena.program.expert_layers[0].top_k
            record_bytes = max(slab.record_bytes for slab in self._arena.layout.slabs)
            staging = Staging(lent, staging_slots(top_k, ROWS[0]), record_bytes)
            return measured("auto", lent, self.cuda.stream, staging, self._arena, self._host)
        finally:
            self.cuda.stream.synchronize()
            lent.end()

    def at(self, expected: Answer, share: float, ring: int, misses: Misses = Misses.IN_PLACE) -> Found:
        """The CUDA executor's answer with `share` of each layer's experts hot, those that `expected` used most."""
        layers = self._arena.layout.layers
        hot = [[expert for expert, _ in Counter(chosen.ravel().tolist()).most_common()] for chosen in expected.experts]
        for wanted, layer in zip(hot, layers, strict=True):
            wanted += [expert for expert in range(layer.experts) if expert not in set(wanted)]
            del wanted[round(layer.experts * share) :]
        sizes, free = [], 1.0
        for number, slab in enumerate(self._arena.layout.slabs):
            inside = [layer for layer, one in enumerate(layers) if one.slab == number]
            ordinary = min(slab.records, sum(len(hot[layer]) + ring for layer in inside))
            top_k = max(self._arena.program.expert_layers[layer].top_k for layer in inside)
            reserve = 0 if ordinary == slab.records else RESERVE_PARTS * top_k
            sizes.append(SlabSize(ordinary + reserve, reserve))
            free = min(free, 1 - sum(len(hot[layer]) for layer in inside) / max(1, ordinary))
        lent = _Lent(self._device, self._device.memory()[0])
        try:
            slots = DeviceSlots(lent, sizes, [slab.record_bytes for slab in self._arena.layout.slabs])
            staging = Staging(lent, staging_slots(top_k, ROWS[0]), max(slots.record_bytes))
            registered = _Registered(self._pieces)
            tier = DeviceTier(
                lent, self.cuda, self._arena, slots, registered, staging, misses  # type: ignore[arg-type]
            )  # fmt: skip
            self.cuda.serve_from(tier)
            tier.place(Placement(1, hot, free, HALF_LIFE))
            for _ in range(_PATIENCE):
                if not tier.advance():
                    break
            else:
                raise RuntimeError(f"the tier is not done after {_PATIENCE} calls")

            missed_bytes = 0

            def after(decode: bool, result: StepResult) -> None:
                nonlocal missed_bytes
                missed_bytes += tier.missed_bytes if decode else 0  # of the step before, which is as good
                tier.used(np.full(result.experts.shape[1], decode), result.experts)

            found = self.answer(self.cuda, after)
            counts = tier.counts()[Use.DECODE]
            missed = counts.misses / counts.uses if counts.uses else 0.0
            ordinary = sum(size.ordinary for size in sizes)
            rate = missed_bytes / max(1, len(found.tokens) - 1) * found.speed
            return Found(share, ring, ordinary, missed, rate, found.speed, found.tokens == expected.tokens)
        finally:
            self.cuda.stream.synchronize()
            lent.end()


@contextmanager
def opened(path: Path, device: Device, tokens: int) -> Iterator[tuple[Model, Answer]]:
    """A model file on a device, and what the CPU answers."""
    from pairs import loaded

    with loaded(path) as arena:
        model = Model(arena, device, tokens)
        yield model, model.answer(model.native)
