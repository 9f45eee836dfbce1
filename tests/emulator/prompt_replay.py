"""Recorded choices of a long prompt and of decoding, through a device tier: no kernel runs, records are copied.

The recording is `bench/prompt_routing.py`'s: this project's documents, read by a generated model with as many experts
as the published ones in each of seven layers (256, of which 8 are used), and narrow. Records here hold nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from emulated_tiers import Churned
from host_device import HostDevice
from numpy.typing import NDArray
from sparse_models import make_sparse, untouched
from test_device_tier import Reader

from sparkd.config import ModelSettings, Settings
from sparkd.executors.cuda import Reach
from sparkd.executors.cuda_prompt import Likely
from sparkd.residency.device_budget import ROWS, staging_slots
from sparkd.residency.leases import Use
from sparkd.store.arena import Arena

RECORDING = Path(__file__).parents[1] / "data" / "routing" / "laguna-256-experts.npz"


@dataclasses.dataclass(frozen=True)
class Recording:
    """`chunks` [chunks of 512 rows, layers, experts]: rows that chose each expert; `decode` [tokens, layers, top_k]."""

    chunks: NDArray[np.uint16]
    decode: NDArray[np.uint8]

    @staticmethod
    def load() -> Recording:
        with np.load(RECORDING) as kept:
            return Recording(kept["chunks"], kept["decode"])

    def steps(self, rows: int) -> NDArray[np.int64]:
        """The same in steps of `rows` rows."""
        layers, experts = self.chunks.shape[1:]
        return self.chunks.reshape(-1, rows // ROWS[0], layers, experts).sum(axis=1, dtype=np.int64)


@contextmanager
def arena_for(recording: Recording, folder: Path) -> Iterator[Arena]:
    """As many layers, experts and ranks as were recorded; what the records hold is nothing."""
    layers, experts = recording.chunks.shape[1:]
    shape = {"n_layer": layers + 1, "n_expert": experts, "n_used": recording.decode.shape[2]}
    path = make_sparse.make(folder / "replayed.gguf", "laguna", preset="tiny", **shape)
    with untouched(Settings(model=ModelSettings(str(path)))) as arena:
        assert len(arena.program.expert_layers) == layers
        yield arena


class Replay:
    """A tier that holds `share` of the records, with buffers for prompts in steps of `rows` rows."""

    def __init__(self, arena: Arena, share: float, rows: int, seed: int) -> None:
        device = HostDevice(seed=seed)
        self._tables = Reader(device, arena)
        layers = arena.program.expert_layers
        self.tier = Churned(device, self._tables, arena, share, seed, staging=staging_slots(layers[0].top_k, rows)).tier
        self._rows = rows
        self._likely = Likely(layers)
        self._sizes = [arena.layout.slabs[layer.slab].record_bytes for layer in arena.layout.layers]
        #: Bytes of the different records that steps of prompts chose and no slot held.
        self.least = 0

    def decode(self, tokens: NDArray[np.uint8]) -> float:
        """Decode; the share of choices that were found in slots."""
        before = dataclasses.replace(self.tier.counts()[Use.DECODE])
        for token in tokens:
            self._step(token[:, None].astype(np.int16), decode=True)
        while self.tier.advance():
            pass
        now = self.tier.counts()[Use.DECODE]
        return 1 - (now.misses - before.misses) / (now.uses - before.uses)

    def prompt(self, steps: NDArray[np.int64]) -> None:
        """Read a prompt: each part of a layer's records is looked at as the executor would have it."""
        for counts in steps:
            chosen = [np.flatnonzero(layer) for layer in counts]
            self._step(_as_rows(chosen), decode=False, counts=counts)
            absent = self.tier._was_absent
            self.least += sum(
                int(absent[number, experts].sum()) * size
                for number, (experts, size) in enumerate(zip(chosen, self._sizes, strict=True))
            )

    def _step(self, ids: NDArray[np.int16], *, decode: bool, counts: NDArray[np.int64] | None = None) -> None:
        assert self.tier.begin() is Reach.ALL
        for number, layer in enumerate([] if counts is None else counts):
            self.tier.expect(number, self._likely.experts(number, self._rows))
            self._likely.learn(number, layer, self._rows)
            wanted = np.flatnonzero(layer).tolist()
            told = [expert for part, _ in self.tier.stage(number, wanted) for expert in part]
            assert sorted(told) == wanted
        self.tier.meanwhile()
        self._tables.stream.synchronize()
        self.tier.used(np.full(ids.shape[1], decode), ids)


def _as_rows(chosen: Sequence[NDArray[np.int64]]) -> NDArray[np.int16]:
    """[layers, rows, 1] in which each layer has its experts, some more than once."""
    most = max(map(len, chosen))
    return np.array([np.resize(experts, most) for experts in chosen], np.int16)[:, :, None]
