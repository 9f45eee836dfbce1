"""The policy laboratory: what share of its experts would a tier have had ready, run in one way or another?

    python bench/policies.py [--demo demo_routing.npz] [--public FOLDER] [--trace FILE.npz ...]
                             [--capacity 10 25 ...] [--tokens N] [--warm] [--plot FILE.svg] [--json FILE]

Replays routing in the order of time, a cache over all layers with so many percent of the records: cold at first, or,
with `--warm`, as the profile would have it ("static" and ours). All but the uniform choice and Belady's optimum is the
daemon's own code: `calibration/shadow` over `residency/ring` (here compiled, `fast_shadow`), and for "ours" the adviser
with its counts, its sample of shadows and its placements. What a placement brings counts as a miss, and so does what
"static" is filled with where it begins cold. "LFU" is the decayed frequency whose half-life was best on this very
traffic, known afterwards.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from fast_shadow import FastShadow, build
from plot import lines_svg
from traffic import Trace, demo, made, recorded

from sparkd.calibration.adviser import Adviser, Tier
from sparkd.calibration.counts import RoutingCounts
from sparkd.calibration.shadow import FIRST, LRU, STATIC, Rule, Shadow
from sparkd.calibration.tuner import top
from sparkd.residency.placement import Placement
from sparkd.residency.slabs import LayerSize

_CAPACITIES = (10, 25, 40, 60, 80)
_DECAYS = tuple(Rule(f"decay {h}", 0.0, float(h)) for h in (16, 64, 256, 1024))


@dataclass(frozen=True, slots=True)
class Result:
    """Percent of the uses that were found; `rule` is what ours ended with, `half_life` the best one for LFU."""

    kind: str
    name: str
    capacity: int
    uniform: float
    static: float
    lru: float
    lfu: float
    half_life: float
    ours: float
    rule: str
    belady: float


def play(trace: Trace, percent: int, warm: bool = False) -> Result:
    """All policies at one capacity."""
    slots = max(1, round(trace.records * percent / 100))
    steps = [np.unique(numbers).tolist() for numbers in trace.numbers()]
    uses = sum(map(len, steps))
    profile = np.bincount(_numbers(trace.profile, trace.experts), minlength=trace.records).astype(float)
    found = {rule: _shadow(rule, slots, steps, trace.records, profile, warm) / uses for rule in (STATIC, LRU, *_DECAYS)}
    best = max(_DECAYS, key=lambda rule: found[rule])
    chance = np.random.default_rng(1).permutation(trace.records)
    ours, rule = _ours(trace, slots, steps, warm)
    return Result(
        trace.kind,
        trace.name,
        percent,
        uniform=100 * sum(np.isin(step, chance[:slots]).sum() for step in steps) / uses,
        static=100 * found[STATIC],
        lru=100 * found[LRU],
        lfu=100 * found[best],
        half_life=best.half_life,
        ours=100 * ours / uses,
        rule=rule.name,
        belady=100 * _belady(steps, slots) / uses,
    )


def _shadow(rule: Rule, slots: int, steps: Sequence[list[int]], records: int, profile: np.ndarray, warm: bool) -> int:
    shadow = FastShadow([0] * records, [slots], rule)
    brought = shadow.pin(top(profile, np.zeros(records, np.int64), shadow.pins)) if rule.pinned else 0
    return sum(map(shadow.step, steps)) - (0 if warm else brought)


def _ours(trace: Trace, slots: int, steps: Sequence[list[int]], warm: bool) -> tuple[int, Rule]:
    """Hits of a tier that follows the adviser, less what placements brought while it served.

    `warm`: at the start it holds what the profile says.
    """
    layers = trace.ids.shape[2]
    tier = Tier("host", (LayerSize(0, trace.experts),) * layers, (1,), (slots,), (0,))
    adviser, counts = Adviser(tier, shadow=FastShadow), RoutingCounts(layers, trace.experts)
    live = FastShadow([0] * trace.records, [slots], FIRST)
    if warm:
        counts.add(trace.profile.transpose(1, 0, 2).astype(np.int16), np.ones(len(trace.profile), bool))
        _follow(live, adviser, adviser.warm(counts.blended()), trace)
    hits = 0
    for ids, step in zip(trace.ids, steps, strict=True):
        hits += live.step(step)
        adviser.step(counts.add(ids.transpose(1, 0, 2).astype(np.int16), np.ones(len(ids), bool)))
        if adviser.due:
            hits -= _follow(live, adviser, adviser.advise(counts.blended()), trace)
    return hits, adviser.rule


def _follow(live: Shadow, adviser: Adviser, placement: Placement | None, trace: Trace) -> int:
    """Do what the adviser says; how many records that brought."""
    if placement is None:
        return 0
    live.change(adviser.rule)
    ranked = placement.ranked([trace.experts] * trace.ids.shape[2])
    return live.pin(record.layer * trace.experts + record.expert for record in ranked)


def _belady(steps: Sequence[list[int]], slots: int) -> int:
    """Hits if always that record went whose next use is farthest, be it the one that has just come."""
    never = len(steps)
    following: dict[int, int] = {}
    nexts: list[list[int]] = []
    for number in range(len(steps) - 1, -1, -1):
        nexts.append([following.get(record, never) for record in steps[number]])
        following.update(dict.fromkeys(steps[number], number))
    nexts.reverse()
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for step, after in zip(steps, nexts, strict=True):
        hits += sum(record in held for record in step)
        for record, use in zip(step, after, strict=True):
            held[record] = use
            heapq.heappush(heap, (-use, record))
        while len(held) > slots:
            use, record = heapq.heappop(heap)
            if held.get(record) == -use:
                del held[record]
    return hits


def _numbers(ids: np.ndarray, experts: int) -> np.ndarray:
    return (ids + (np.arange(ids.shape[1]) * experts)[:, None]).ravel()


def mean(results: Iterable[Result]) -> Iterator[tuple[str, int, Mapping[str, float]]]:
    """Of each kind and capacity, the mean over its traces."""
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.kind, result.capacity].append(result)
    for (kind, capacity), members in groups.items():
        fields = ("uniform", "static", "lru", "lfu", "ours", "belady")
        yield kind, capacity, {name: float(np.mean([getattr(r, name) for r in members])) for name in fields}


def table(results: Sequence[Result]) -> str:
    """Hits in percent; `behind`: how far ours is below the best of static, LRU and LFU, on the worst trace."""
    lines = [
        "| traffic | capacity | uniform | static | LRU | LFU, best | ours | Belady | of LRU's gap closed | behind |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, capacity, rates in mean(results):
        closed = 100 * (rates["ours"] - rates["lru"]) / max(rates["belady"] - rates["lru"], 1e-9)
        behind = max(_behind(r) for r in results if (r.kind, r.capacity) == (kind, capacity))
        cells = " | ".join(f"{value:.1f}" for value in rates.values())
        lines.append(f"| {kind} | {capacity} % | {cells} | {closed:.0f} % | {behind:.1f} |")
    return "\n".join(lines)


def _behind(result: Result) -> float:
    return max(result.static, result.lru, result.lfu) - result.ours


def main() -> None:
    """Play, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--demo", type=Path, help="recorded routing of the demo model")
    parser.add_argument("--public", type=Path, help="folder with counts of public models")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="files that sparkctl trace wrote")
    parser.add_argument("--capacity", type=int, nargs="*", default=list(_CAPACITIES), help="percent of the records")
    parser.add_argument(
        "--warm", action="store_true", help="ours begins with what the profile says, as the daemon does"
    )
    parser.add_argument("--tokens", type=int, help="play at most so many steps of each trace")
    parser.add_argument("--plot", type=Path, help="where to draw")
    parser.add_argument("--json", type=Path, help="where to write every single result")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    began = time.monotonic()
    traces = [
        *(demo(given.demo) if given.demo else ()),
        *(made(given.public) if given.public else ()),
        *(trace for path in given.trace for trace in recorded(path)),
    ]
    if given.tokens:
        traces = [replace(trace, ids=trace.ids[: given.tokens]) for trace in traces]
    build()
    with ProcessPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(play, trace, percent, given.warm) for trace in traces for percent in given.capacity]
        results = [run.result() for run in runs]
    print(table(results))
    print()
    for result in results:
        if _behind(result) > 1.0:
            print(f"more than a point behind: {result}")
    tokens = sum(trace.ids.shape[0] * trace.ids.shape[1] for trace in traces)
    print(f"{len(traces)} traces, {tokens} tokens, {time.monotonic() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if given.plot:
        given.plot.write_text(lines_svg(list(mean(results)), "hits, % of uses", "capacity, % of experts"))


if __name__ == "__main__":
    main()
