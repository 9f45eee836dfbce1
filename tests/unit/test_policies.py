"""The laboratory's compiled shadow finds what the daemon's own finds, and its optimum is one."""

from __future__ import annotations

import itertools
import random
import shutil
import sys
from pathlib import Path

import pytest

from sparkd.calibration.shadow import RULES, Rule, Shadow

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
if shutil.which("g++") is None:
    pytest.skip("the laboratory needs g++", allow_module_level=True)
from fast_shadow import FastShadow
from policies import _belady

RECORDS = 60
SLABS = [record % 2 for record in range(RECORDS)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_compiled_shadow_finds_what_the_daemon_s_finds(rule: Rule) -> None:
    rng = random.Random(rule.name)
    slow, fast = Shadow(SLABS, [9, 14], rule), FastShadow(SLABS, [9, 14], rule)
    for step in range(800):
        if step % 97 == 0:
            room = dict(enumerate(slow.pins))
            picked = []
            for record in rng.sample(range(RECORDS), RECORDS):
                if room[SLABS[record]]:
                    room[SLABS[record]] -= 1
                    picked.append(record)
            assert slow.pin(picked) == fast.pin(picked)
        if step == 400:
            other = Rule("other", rule.pinned, 5.5)
            slow.change(other)
            fast.change(other)
        records = list({int(rng.paretovariate(0.6)) % RECORDS for _ in range(rng.randint(1, 6))})
        assert slow.step(records) == fast.step(records), step


def test_nothing_finds_more_than_the_optimum() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        steps = [rng.sample(range(5), rng.randint(1, 2)) for _ in range(7)]
        assert _belady(steps, 2) == _best(steps, 2)


def _best(steps: list[list[int]], slots: int) -> int:
    """The most hits of any choice of what is kept after each step."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for step in steps:
        following: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            found = hits + len(held.intersection(step))
            there = held.union(step)
            for count in range(min(slots, len(there)) + 1):
                for kept in itertools.combinations(sorted(there), count):
                    key = frozenset(kept)
                    following[key] = max(following.get(key, 0), found)
        reached = following
    return max(reached.values())
