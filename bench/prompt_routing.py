"""Which experts the rows of a long prompt choose, recorded from the CPU executor: what a card would have to bring.

    python bench/prompt_routing.py MODEL.gguf TEXT... --out tests/data/routing/laguna-256-experts.npz [--threads 2]

Reads the first tokens of the texts as a prompt, and others, from where that ends, one after another as if they were
decoded. The file has `chunks` uint16 [chunks, layers, experts], how many of each 512 rows of the prompt chose each
expert, and `decode` uint8 [tokens, layers, top_k]. The one that is kept is of a generated model of narrow layers with
as many experts as the published ones have (`make_gguf.generate("laguna", "tinyk", "q4_k_m", ...)` with 8 layers of 256
experts, 8 used, and contexts of 32,768), which read the documents of this project.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparkd.executors.base import Batch, RowKind, Segment
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.graph.state import StateLayout
from sparkd.residency.device_budget import ROWS
from sparkd.store.arena import Arena
from sparkd.text.tokenizer import Tokenizer
from sparkd.worker.state import PoolSize, StatePool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "emulator"))
CHUNK = ROWS[0]


def routed(arena: Arena, tokens: list[int], threads: int) -> Iterator[NDArray[np.int16]]:
    """Chosen experts [layers, rows, top_k] of a sequence, `CHUNK` rows at a time."""
    layout = StateLayout.of(arena.program, 2)
    size = PoolSize.worst_case(layout, 1, len(tokens), CHUNK)
    memory = StateMemory.allocate(layout, size.pages, size.records)
    executor = NativeExecutor(arena.program, arena, layout, memory, max_rows=CHUNK, threads=threads)
    pool = StatePool(layout, size, CHUNK)
    holding = pool.admit(len(tokens))
    assert holding is not None
    for first in range(0, len(tokens), CHUNK):
        part = tokens[first : first + CHUNK]
        pool.extend(holding, first + len(part))
        segment = Segment(first, len(part), holding.tables, holding.record, RowKind.PREFILL)
        batch = Batch(np.array(part, np.int32), (segment,), np.empty(0, np.int32))
        yield executor.step(batch).experts
        pool.trim(holding, first + len(part))
        print(f"{first + len(part)} of {len(tokens)} tokens", file=sys.stderr)


def main() -> None:
    """Record, and write the file."""
    from pairs import loaded

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--prompt", type=int, default=40 * CHUNK, help="tokens of the prompt (20480)")
    parser.add_argument("--decode", type=int, default=2 * CHUNK, help="tokens that are decoded (1024)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with loaded(given.model) as arena:
        text = "\n".join(path.read_text() for path in given.texts)
        tokens = Tokenizer.from_metadata(arena.model.metadata).encode(text, special=False)
        if len(tokens) < given.prompt + given.decode:
            sys.exit(f"the texts have {len(tokens)} tokens, {given.prompt + given.decode} are wanted")
        experts = max(layer.experts for layer in arena.program.expert_layers)
        chunks = [
            [np.bincount(layer.ravel(), minlength=experts) for layer in chosen]
            for chosen in routed(arena, tokens[: given.prompt], given.threads)
        ]
        decoded = tokens[given.prompt : given.prompt + given.decode]
        decode = np.concatenate(list(routed(arena, decoded, given.threads)), axis=1).transpose(1, 0, 2)
    np.savez_compressed(given.out, chunks=np.array(chunks, np.uint16), decode=decode.astype(np.uint8))


if __name__ == "__main__":
    main()
