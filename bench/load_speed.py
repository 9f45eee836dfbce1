"""How fast the store fills its arena, against a plain sequential read of the same file.

    python bench/load_speed.py MODEL.gguf [--readers N ...] [--rounds N] [--cached]

Every round does each way once, in turn, so that a machine whose speed drifts treats all alike. Cold runs drop the page
cache first (needs root); without permission only warm ones are made. `--cached` adds loads through the page cache.
Prints a table: the median of the rounds, the slowest and the fastest, in GB/s, and the processor time per GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sparkd.gguf.model_file import ModelFile
from sparkd.ipc.memory import Region
from sparkd.models import build_program
from sparkd.store import reading
from sparkd.store.arena import Arena
from sparkd.store.copier import Copier
from sparkd.store.layout import ArenaLayout
from sparkd.store.loader import READERS, Loader
from sparkd.store.residents import Residents

_PIECE = 8 << 20


class Bench:
    """One model; the ways to read it give the bytes they read."""

    def __init__(self, path: Path) -> None:
        self.model = ModelFile.open(path)
        self.program = build_program(self.model)
        self.layout = ArenaLayout.of(self.program, self.model)

    def plain(self) -> int:
        """Read every shard once from start to end."""
        buffer = bytearray(_PIECE)
        total = 0
        for shard in self.model.shards:
            with shard.path.open("rb", buffering=0) as file:
                while n := file.readinto(buffer):
                    total += n
        return total

    def load(self, readers: int, cached: bool) -> int:
        """Fill a new arena."""
        direct_block = reading.direct_block
        if cached:
            reading.direct_block = lambda fd: 0
        try:
            with Region.create(self.layout.total_bytes) as region:
                arena = Arena.create(region, self.model, self.program, self.layout)
                copier = Copier(arena, readers)
                loader = Loader(Residents(arena, copier), copier)
                loader.load()
                return copier.read
        finally:
            reading.direct_block = direct_block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--readers", type=int, nargs="+", default=[READERS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cached", action="store_true")
    given = parser.parse_args()
    bench = Bench(given.model)
    size, records = bench.layout.total_bytes, [s.record_bytes for s in bench.layout.slabs]
    print(f"{bench.model.where}: arena {size / 1e9:.2f} GB, records of {records}\n")
    ways: dict[str, Callable[[], int]] = {"plain sequential read": bench.plain}
    for cached in (False, True) if given.cached else (False,):
        how = "through the page cache" if cached else "direct"
        ways |= {f"load {how}, {n} readers": lambda n=n, cached=cached: bench.load(n, cached) for n in given.readers}
    results: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for name, way in ways.items():
            for cache in ("cold", "warm"):
                if cache == "warm":
                    bench.plain()
                elif not drop_caches():
                    continue
                results.setdefault((name, cache), []).append(measure(way))
                print(f"{name}, {cache}: {results[name, cache][-1][0]:.2f} GB/s", file=sys.stderr, flush=True)
    print("| way | page cache | GB/s | slowest - fastest | processor s/GB |\n| --- | --- | --- | --- | --- |")
    for (name, cache), runs in results.items():
        speeds, costs = zip(*runs, strict=True)
        span = f"{min(speeds):.2f} - {max(speeds):.2f}"
        print(f"| {name} | {cache} | {statistics.median(speeds):.2f} | {span} | {statistics.median(costs):.2f} |")


def measure(way: Callable[[], int]) -> tuple[float, float]:
    """GB per second, and seconds of processor time per GB."""
    start, used = time.perf_counter(), time.process_time()
    size = way() / 1e9
    return size / (time.perf_counter() - start), (time.process_time() - used) / size


def drop_caches() -> bool:
    """Empty the page cache; false where that is not permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
