"""What the CPU's part of a card's step takes, without a card: calls as its driver makes them, on true records.

python bench/host_experts.py MODEL.gguf [--threads 1 2]

For each number of threads, rows, and missed experts of a row: the median microseconds of a call for one expert layer,
and bytes of experts per second. Rows want different experts; layers take turns, so that records come from memory.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from sparkd.executors.cuda_counted import CountingDevice
from sparkd.executors.cuda_host import HostExperts, call_now

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "emulator")]
#: Rows of a step, and experts that each of them misses.
WANTED = ((1, 0), (1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 4), (8, 4))
_CALLS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    from pairs import loaded

    print("| threads | rows | missed by each | µs a call | GB/s |\n| --- | --- | --- | --- | --- |")
    with loaded(given.model) as arena:
        layers, top_k = arena.layout.layers, arena.program.expert_layers[0].top_k
        rng = np.random.default_rng(1)
        for threads in given.threads:
            host = HostExperts(CountingDevice(), arena.program, arena, threads)
            told = np.ctypeslib.as_array((ctypes.c_int32 * (1 + 8 * top_k)).from_address(host.told))
            width = arena.program.expert_layers[0].gate.columns
            np.ctypeslib.as_array((ctypes.c_float * (8 * width)).from_address(host.x))[:] = rng.normal(size=8 * width)
            for rows, missed in WANTED:
                took = []
                for number in range(_CALLS):
                    layer = number % len(layers)
                    told[0], told[1:] = rows, -1
                    wanted = told[1 : 1 + rows * top_k].reshape(rows, top_k)
                    wanted[:, :missed] = rng.permutation(layers[layer].experts)[: rows * missed].reshape(rows, missed)
                    began = time.perf_counter()
                    call_now(host.calls[layer])
                    took.append(time.perf_counter() - began)
                host.check()
                median = statistics.median(took)
                size = statistics.mean(arena.layout.slabs[layer.slab].record_bytes for layer in layers)
                rate = rows * missed * size / median / 1e9
                print(f"| {threads} | {rows} | {missed} | {median * 1e6:.1f} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
