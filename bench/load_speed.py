"""How fast the store fills its arena, against a plain sequential read of the same file.

    python bench/load_speed.py MODEL.gguf [--readers N ...]

Cold runs drop the page cache first (needs root); without permission only warm ones are made.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from sparkd.gguf.model_file import ModelFile
from sparkd.ipc.memory import Region
from sparkd.models import build_program
from sparkd.store.arena import Arena
from sparkd.store.layout import ArenaLayout
from sparkd.store.loader import READERS, Loader

_PIECE = 8 << 20


def main() -> None:
    """Print one line per run: what, cold or warm, GB/s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--readers", type=int, nargs="+", default=[READERS])
    given = parser.parse_args()
    model = ModelFile.open(given.model)
    program = build_program(model)
    layout = ArenaLayout.of(program, model)
    print(
        f"{model.where}: arena {layout.total_bytes / 1e9:.2f} GB, records of {[s.record_bytes for s in layout.slabs]}"
    )

    def load(readers: int) -> int:
        with Region.create(layout.total_bytes) as region:
            loader = Loader(Arena.create(region, model, program, layout), readers)
            loader.load()
            return loader.read

    runs: dict[str, Callable[[], int]] = {"plain sequential read": lambda: read_all(model)}
    runs |= {f"load, {n} readers": lambda n=n: load(n) for n in given.readers}
    for name, run in runs.items():
        for cache in ("cold", "warm"):
            if cache == "cold" and not drop_caches():
                continue
            start = time.perf_counter()
            size = run()
            seconds = time.perf_counter() - start
            print(f"{name:24} {cache}  {size / 1e9:6.2f} GB  {seconds:6.2f} s  {size / 1e9 / seconds:6.2f} GB/s")


def read_all(model: ModelFile) -> int:
    """Read every shard once from start to end."""
    buffer = bytearray(_PIECE)
    total = 0
    for shard in model.shards:
        with shard.path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                total += n
    return total


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
