"""What counting and shadow policies cost for each decode step, in processor time.

    python bench/counting.py [--layers 40] [--experts 256] [--top-k 8] [--steps 1000]

Plays made routing (shares that fall as 1 / rank) of one sequence through what the calibrator does with each step.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from traffic import draw

from sparkd.calibration.adviser import PAUSE, Adviser, Tier
from sparkd.calibration.counts import RoutingCounts
from sparkd.residency.slabs import LayerSize


def main() -> None:
    """Measure, print microseconds per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    logits = np.tile(-np.log(np.arange(1, given.experts + 1)), (given.layers, 1))
    drawn = draw(np.random.default_rng(1), logits, given.steps, given.top_k).astype(np.int16)
    slots = round(0.4 * given.layers * given.experts)
    tier = Tier("host", (LayerSize(0, given.experts),) * given.layers, (1 << 21,), (slots,), (0,))
    counts, adviser = RoutingCounts(given.layers, given.experts), Adviser(tier)
    spent = dict.fromkeys(("counting", "shadows", "advice"), 0.0)
    one = np.ones(1, bool)
    for ids in drawn:
        began = time.process_time()
        numbers = counts.add(ids[:, None], one)
        counted = time.process_time()
        adviser.step(numbers)
        shadowed = time.process_time()
        if adviser.due:
            adviser.advise(counts.blended())
        spent["counting"] += counted - began
        spent["shadows"] += shadowed - counted
        spent["advice"] += time.process_time() - shadowed
    for what, seconds in spent.items():
        print(f"{what}: {1e6 * seconds / given.steps:.0f} us a step")
    print(f"together: {1e6 * sum(spent.values()) / given.steps:.0f} us a step; advice is given every {PAUSE} steps")


if __name__ == "__main__":
    main()
