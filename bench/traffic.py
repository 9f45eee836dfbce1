"""Traffic for `policies.py`: recorded routing, and made traffic of several kinds, each with a profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
#: Tokens of made traffic, and of the profile for it; of a phase, where the hot set moves.
_TOKENS = 6000
_PHASE = 2000
#: Every so many layers of a public model are played: they do not know of each other.
_LAYERS_STEP = 4


@dataclass(frozen=True, slots=True)
class Trace:
    """`ids` [steps, rows of a step, layers, top_k] of `experts`; `profile` [tokens, layers, top_k] was seen before."""

    kind: str
    name: str
    experts: int
    ids: Ids
    profile: Ids

    @property
    def records(self) -> int:
        """Records of all layers."""
        return self.ids.shape[2] * self.experts

    def numbers(self) -> Iterator[Ids]:
        """Of each step: the record numbers its rows used, [rows, uses of a row]."""
        steps, rows, layers, _ = self.ids.shape
        flat = (self.ids + (np.arange(layers) * self.experts)[:, None]).reshape(steps, rows, -1)
        yield from flat


def recorded(path: Path) -> Iterator[Trace]:
    """A file that `sparkctl trace` wrote: decode rows, the first half of which is the profile for the second."""
    with np.load(path) as data:
        ids = data["experts"][data["decode"] != 0].astype(np.int64)
        experts = int(data["n_expert"])
    half = len(ids) // 2
    yield Trace("recorded", path.stem, experts, ids[half:, None], ids[:half])


def demo(path: Path) -> Iterator[Trace]:
    """The recorded routing of the demo model, and mixtures of it."""
    with np.load(path) as data:
        domains = [str(name) for name in data["domains"]]
        experts = int(data["n_expert"])
        seen = {name: data[f"{name}.seen.experts"].astype(np.int64) for name in domains}
        heldout = {name: data[f"{name}.heldout.experts"].astype(np.int64) for name in domains}
        session = data["session.experts"].astype(np.int64)
    everything = np.concatenate(list(seen.values()))
    for name in domains:
        yield Trace("one domain, held out", name, experts, heldout[name][:, None], seen[name])
    yield Trace("mixed session", "session", experts, session[:, None], everything)
    phases = [heldout[name][:_PHASE] for name in domains]
    yield Trace("hot set moves every 2,000 tokens", "switching", experts, np.concatenate(phases)[:, None], everything)
    clients = np.stack([heldout[name][:5000] for name in domains[::2]], axis=1)
    yield Trace("four clients at once", "clients", experts, clients, everything)


def made(folder: Path) -> Iterator[Trace]:
    """Traffic drawn by the public counts of larger models; each token is drawn by itself."""
    rng = np.random.default_rng(20)
    for name in ("qwen3-30b-a3b", "qwen3-next-80b-a3b"):
        told: dict[str, Any] = json.loads((folder / f"coactivation_{name}.json").read_text())
        heat = np.array([layer["heat"] for layer in told["layers"][::_LAYERS_STEP]], float) + 0.5
        top_k, experts = int(told["k"]), heat.shape[1]
        profile = draw(rng, np.log(heat), _TOKENS, top_k)
        yield Trace("stationary", name, experts, draw(rng, np.log(heat), _TOKENS, top_k)[:, None], profile)
        if name == "qwen3-30b-a3b":
            other = np.log(rng.permuted(heat, axis=1))
            drift = [
                draw(rng, np.log((1 - share) * heat + share * np.exp(other)), _TOKENS // 20, top_k)
                for share in np.linspace(0, 1, 20)
            ]
            yield Trace("drifting", name, experts, np.concatenate(drift)[:, None], profile)
            flat = np.zeros_like(heat)
            yield Trace("no locality", "uniform", experts, draw(rng, flat, _TOKENS // 2, top_k)[:, None], profile)


def draw(rng: np.random.Generator, logits: NDArray[np.float64], tokens: int, top_k: int) -> Ids:
    """`top_k` different experts for each token and layer, drawn by `logits` [layers, experts]."""
    layers, experts = logits.shape
    ids = np.empty((tokens, layers, top_k), np.int64)
    for layer in range(layers):
        keys = logits[layer] + rng.gumbel(size=(tokens, experts))
        ids[:, layer] = np.argpartition(-keys, top_k, axis=1)[:, :top_k]
    return ids
