"""Would it pay to read the next layer's likely experts before its router has spoken?

    python bench/read_ahead.py MODEL.gguf --traces demo_routing.npz [--tokens N] [--capacity 25 40 60]
                               [--mixer-ms 3.5] [--expert-ms 0.2] [--read-ms 0.9]

Runs text that the model never saw through the native executor and asks two predictors, when the router of a layer has
spoken, for the experts of the next layer:

    router   the next layer's norm and router, applied to the present hidden state (before the present experts)
    table    how often each expert of the next layer followed each of the present ones, in text seen before

First table: of the experts chosen, and of those that a tier of this capacity misses, what share is among as many
predicted as are chosen (`top`), or half as many, or twice as many; and of the reads that would be begun for that, how
many are used. The tier is a ring with decayed frequency, as the daemon begins with.

Second table: milliseconds a token would take. A layer computes its mixer, then the experts that are there while the
others are read, then the last of these. The disk reads one record after another; what is missing goes first, then what
is predicted, until the next router has spoken; what is under way then is waited for, wanted or not. The costs are
options: of a layer without experts, of an expert, of reading one. `oracle` predicts all and only what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from cpu import FileWeights
from numpy.typing import NDArray

from sparkd.calibration.shadow import FIRST, Shadow
from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.gguf.model_file import ModelFile
from sparkd.graph import ops
from sparkd.graph.state import PAGE, StateLayout
from sparkd.models import build_program

_WINDOW, _CHUNK = 2048, 256
Ids = NDArray[np.int64]
#: Which of these records would be missed.
Absent: TypeAlias = Callable[[Sequence[int]], list[int]]


class Tier(Shadow):
    """Which records a tier holds."""

    def absent(self, records: Sequence[int]) -> list[int]:
        """Those of these records that would be missed now."""
        return [record for record in records if record not in self._there]


class Hidden:
    """Runs tokens; gives the chosen experts and the hidden states that their routers saw."""

    def __init__(self, path: Path) -> None:
        model = ModelFile.open(path)
        program = build_program(model)
        weights = FileWeights(model, program)
        layout = StateLayout.of(program, 2)
        pages = _WINDOW // PAGE
        memory = StateMemory.allocate(layout, [pages] * len(layout.groups), 1)
        routes = [op for op in program.ops if isinstance(op, ops.Route)]
        norms = {op.out: op for op in program.ops if isinstance(op, ops.RmsNorm)}
        self.routers = [_Router(model, norms[route.x], route) for route in routes]
        self._values = [norms[route.x].x for route in routes]
        self._executor = NativeExecutor(program, weights, layout, memory, max_rows=_CHUNK, threads=2, keep=self._values)
        self._tables = tuple(np.arange(pages, dtype=np.int32) for _ in layout.groups)

    def run(self, tokens: Sequence[int]) -> tuple[Ids, NDArray[np.float32]]:
        """Of at most one window: experts [tokens, layers, top_k], hidden states [layers, tokens, width]."""
        chosen, states = [], []
        for first in range(0, len(tokens), _CHUNK):
            part = np.array(tokens[first : first + _CHUNK], np.int32)
            segment = Segment(first, len(part), self._tables, 0, RowKind.PREFILL)
            result = self._executor.step(Batch(part, (segment,), np.array([len(part) - 1], np.int32)))
            chosen.append(result.experts.transpose(1, 0, 2).astype(np.int64))
            states.append(np.stack([self._executor.trace(value) for value in self._values]))
        return np.concatenate(chosen), np.concatenate(states, axis=1)


class _Router:
    def __init__(self, model: ModelFile, norm: ops.RmsNorm, route: ops.Route) -> None:
        self._norm = _floats(model, norm.weight.tensor)
        self._matrix = _floats(model, route.weight.tensor).reshape(route.weight.rows, -1)
        self._bias = None if route.bias is None else _floats(model, route.bias.tensor)
        self._eps = norm.eps

    def scores(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """[tokens, experts]: what the choice goes by."""
        scale = 1 / np.sqrt((states * states).mean(axis=1, keepdims=True) + self._eps)
        logits = (states * scale * self._norm) @ self._matrix.T
        return logits if self._bias is None else 1 / (1 + np.exp(-logits)) + self._bias


def _floats(model: ModelFile, name: str) -> NDArray[np.float32]:
    tensor = model.tensors[name]
    assert tensor.format.name == "F32", f"{name} is {tensor.format.name}"
    return np.fromfile(model.shards[tensor.shard].path, np.float32, tensor.elements, offset=tensor.offset)


def transitions(seen: Ids, experts: int) -> NDArray[np.float64]:
    """[layers - 1, experts, experts]: how often the second was chosen in the layer after the first."""
    layers = seen.shape[1]
    table = np.zeros((layers - 1, experts, experts))
    for layer in range(layers - 1):
        for one in seen[:, layer].T:
            for other in seen[:, layer + 1].T:
                np.add.at(table[layer], (one, other), 1.0)
    return table


def ranked(scores: NDArray[np.floating]) -> Ids:
    """Experts, the likeliest first."""
    return np.argsort(-scores, axis=-1, kind="stable")


def missed(
    chosen: Ids, experts: int, percent: int
) -> Iterator[tuple[list[list[int]], Callable[[Sequence[int]], list[int]]]]:
    """Of each token: the experts that are missed, by layer; and a function for what else would be."""
    tokens, layers, _ = chosen.shape
    tier = Tier([0] * (layers * experts), [round(layers * experts * percent / 100)], FIRST)
    for token in range(tokens):
        numbers = [[layer * experts + int(e) for e in chosen[token, layer]] for layer in range(layers)]
        yield [tier.absent(layer) for layer in numbers], tier.absent
        tier.step([record for layer in numbers for record in layer])


def token_ms(
    given: argparse.Namespace, top_k: int, misses: Sequence[Sequence[int]], ahead: Sequence[Sequence[int]]
) -> tuple[float, int]:
    """Milliseconds of a token, and records read; `ahead[layer]`: what is begun for a layer, in this order."""
    now = disk = asked = 0.0
    reads = 0
    arrivals: dict[int, float] = {}
    waiting: list[int] = []
    for layer, wanted in enumerate(misses):
        spoken = now + given.mixer_ms
        # What was predicted for this layer and has begun by now; the rest is given up.
        for record in waiting:
            if max(disk, asked) >= spoken:
                break
            disk = max(disk, asked) + given.read_ms
            arrivals[record] = disk
            reads += 1
        late = [record for record in wanted if record not in arrivals]
        disk = max(disk, spoken)
        for record in late:
            disk += given.read_ms
            arrivals[record] = disk
            reads += 1
        last = max((arrivals[record] for record in wanted), default=spoken)
        ready = sum(arrivals[record] <= spoken for record in wanted)
        present = spoken + (top_k - len(wanted) + ready) * given.expert_ms
        now = max(present, last) + (given.expert_ms if len(wanted) > ready else 0.0)
        asked = spoken
        waiting = list(ahead[layer + 1]) if layer + 1 < len(misses) else []
        arrivals = {}
    return now, reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="of each domain")
    parser.add_argument("--capacity", type=int, nargs="*", default=[25, 40, 60], help="percent of the records")
    parser.add_argument("--mixer-ms", type=float, default=3.5)
    parser.add_argument("--expert-ms", type=float, default=0.2)
    parser.add_argument("--read-ms", type=float, default=0.9)
    given = parser.parse_args()
    hidden = Hidden(given.model)
    with np.load(given.traces) as data:
        domains = [str(name) for name in data["domains"]]
        experts = int(data["n_expert"])
        heldout = {name: data[f"{name}.heldout.tokens"][: given.tokens].tolist() for name in domains}
        table = transitions(np.concatenate([data[f"{name}.seen.experts"] for name in domains]), experts)
    rows: dict[tuple[str, int, int], list[float]] = {}
    times: dict[tuple[int, str], list[float]] = {}
    for name in domains:
        parts = [hidden.run(heldout[name][first : first + _WINDOW]) for first in range(0, given.tokens, _WINDOW)]
        chosen = np.concatenate([part[0] for part in parts])
        states = np.concatenate([part[1] for part in parts], axis=1)
        layers = chosen.shape[1]
        guesses = {
            "router": [ranked(hidden.routers[layer + 1].scores(states[layer])) for layer in range(layers - 1)],
            "table": [ranked(_follow(table[layer], chosen[:, layer])) for layer in range(layers - 1)],
        }
        for percent in given.capacity:
            _judge(given, guesses, chosen, experts, percent, rows, times)
    _print(given, rows, times)


def _follow(table: NDArray[np.float64], chosen: Ids) -> NDArray[np.float64]:
    share = (table + 0.5) / (table + 0.5).sum(axis=1, keepdims=True)
    return np.log(share)[chosen].sum(axis=1)


def _judge(
    given: argparse.Namespace,
    guesses: dict[str, list[Ids]],
    chosen: Ids,
    experts: int,
    percent: int,
    rows: dict[tuple[str, int, int], list[float]],
    times: dict[tuple[int, str], list[float]],
) -> None:
    layers, top_k = chosen.shape[1:]
    counts = (top_k // 2, top_k, 2 * top_k)
    for token, (misses, absent) in enumerate(missed(chosen, experts, percent)):
        ways: dict[str, list[list[int]]] = {"none": [[] for _ in misses], "oracle": misses}
        for who, ranks in guesses.items():
            for count in counts:
                ahead: list[list[int]] = [[]]
                for layer in range(1, layers):
                    guess = ranks[layer - 1][token, :count]
                    begun = absent([layer * experts + int(e) for e in guess])
                    ahead.append(begun)
                    hit = np.isin(chosen[token, layer], guess).sum()
                    found = len(set(misses[layer]) & set(begun))
                    row = rows.setdefault((who, count, percent), [0.0] * 5)
                    for n, value in enumerate((hit, top_k, found, len(misses[layer]), len(begun))):
                        row[n] += value
                ways[f"{who}, {count}"] = ahead
        for way, ahead in ways.items():
            ms, reads = token_ms(given, top_k, misses, ahead)
            total = times.setdefault((percent, way), [0.0, 0.0, 0.0])
            total[0] += ms
            total[1] += reads
            total[2] += 1


def _print(
    given: argparse.Namespace,
    rows: dict[tuple[str, int, int], list[float]],
    times: dict[tuple[int, str], list[float]],
) -> None:
    print("| predictor | predicted | capacity | of the chosen | of the missed | of what is read, used |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (who, count, percent), (hit, used, found, wanted, begun) in sorted(rows.items()):
        print(f"| {who} | {count} | {percent} % | {hit / used:.0%} | {found / wanted:.0%} | {found / begun:.0%} |")
    print()
    print(f"a layer {given.mixer_ms} ms without experts, an expert {given.expert_ms} ms, a read {given.read_ms} ms")
    print("| capacity | read ahead | ms a token | records read a token |")
    print("| --- | --- | --- | --- |")
    for (percent, way), (ms, reads, tokens) in times.items():
        print(f"| {percent} % | {way} | {ms / tokens:.1f} | {reads / tokens:.1f} |")


if __name__ == "__main__":
    main()
