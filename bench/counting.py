"""What counting and shadow policies cost for each decode step, in processor time.

    python bench/counting.py [--layers 40] [--experts 256] [--top-k 8] [--steps 1024] [--together 1 8 25]

Plays made routing (shares that fall as 1 / rank) of one sequence through what the calibrator does with each step. It
looks four times a second, so as many steps are counted together as a quarter of a second has: 8 of 31 ms, 25 of 10 ms.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray
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
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--together", type=int, nargs="*", default=[1, 8, 25])
    given = parser.parse_args()
    logits = np.tile(-np.log(np.arange(1, given.experts + 1)), (given.layers, 1))
    drawn = draw(np.random.default_rng(1), logits, given.steps, given.top_k).astype(np.int16)
    print(f"microseconds a step; advice is given every {PAUSE} steps")
    print("| steps counted together | counting | shadows | advice | all |")
    print("| --- | --- | --- | --- | --- |")
    for together in given.together:
        spent = play(drawn, given.experts, together)
        cells = [1e6 * seconds / given.steps for seconds in (*spent, sum(spent))]
        print(f"| {together} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")


def play(drawn: NDArray[np.int16], experts: int, together: int) -> tuple[float, float, float]:
    """Seconds of counting, shadows and advice; `drawn` [steps, layers, top_k]."""
    layers = drawn.shape[1]
    tier = Tier("host", (LayerSize(0, experts),) * layers, (1 << 21,), (round(0.4 * layers * experts),), (0,))
    counts, adviser = RoutingCounts(layers, experts), Adviser(tier)
    counting = shadows = advice = 0.0
    for first in range(0, len(drawn), together):
        ids = drawn[first : first + together]
        began = time.process_time()
        numbers = counts.add(ids.transpose(1, 0, 2), np.ones(len(ids), bool))
        counting += time.process_time() - began
        for row in range(len(ids)):
            began = time.process_time()
            adviser.step(numbers[row : row + 1])
            shadowed = time.process_time()
            if adviser.due:
                adviser.advise(counts.blended())
            shadows += shadowed - began
            advice += time.process_time() - shadowed
    return counting, shadows, advice


if __name__ == "__main__":
    main()
