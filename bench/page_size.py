"""What huge pages are worth to whoever reads weights: records read from an arena of either kind, in turn.

    python bench/page_size.py [--gib N] [--record BYTES] [--rounds N]

Fills two regions, joins the pages of one, and reads records at random places of both, several hundred a round, the same
places in the same order. Prints a table: the median of the rounds, the slowest and the fastest, in GB/s, one thread;
and how long joining took.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from sparkd.ipc.mapping import HUGE_PAGE
from sparkd.ipc.memory import Region

_RECORDS = 400
_PIECE = 1 << 20


def filled(size: int) -> Region:
    region = Region.create(size)
    piece = memoryview(np.random.default_rng(1).bytes(_PIECE))
    for offset in range(0, size, _PIECE):
        region.write(offset, piece)
    return region


def read(region: Region, places: list[int], size: int) -> float:
    """GB per second of records read, whole words, each once."""
    words = region.array(0, region.size // 8, np.uint64)
    start = time.perf_counter()
    for place in places:
        words[place : place + size // 8].max()
    return len(places) * size / 1e9 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--record", type=int, default=1769472)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    size = int(given.gib * (1 << 30)) // HUGE_PAGE * HUGE_PAGE
    with filled(size) as small, filled(size) as huge:
        start = time.perf_counter()
        for page in range(size // HUGE_PAGE):
            huge.mapping.make_huge(page)
        joined = time.perf_counter() - start
        random = np.random.default_rng(2)
        speeds: dict[str, list[float]] = {"4 KiB": [], "2 MiB": []}
        for _ in range(given.rounds):
            places = random.integers(0, (size - given.record) // 8, _RECORDS).tolist()
            for name, region in (("4 KiB", small), ("2 MiB", huge)):
                speeds[name].append(read(region, places, given.record))
    print("| pages | GB/s | slowest - fastest |\n| --- | --- | --- |")
    for name, runs in speeds.items():
        print(f"| {name} | {statistics.median(runs):.2f} | {min(runs):.2f} - {max(runs):.2f} |")
    print(f"\njoining: {joined:.2f} s for {size / 1e9:.2f} GB, {joined / (size // HUGE_PAGE) * 1e3:.2f} ms each page")


if __name__ == "__main__":
    main()
