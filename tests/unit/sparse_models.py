"""Model files without weights: true sizes on a few MB of disk, for whatever reads headers only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "data" / "tools"))

import make_sparse

from sparkd.config import Settings
from sparkd.ipc.directory import Entry, State
from sparkd.ipc.memory import Region
from sparkd.store.arena import Arena
from sparkd.store.layout import ArenaLayout
from sparkd.store.plan import open_model

#: Twenty models by name: hybrid, with draft layers, gate and up fused, mixed types, in parts, and plain ones.
TWENTY: dict[str, dict[str, object]] = {
    "hybrid": {"arch": "qwen35moe", "preset": "tiny"},
    "hybrid-f32": {"arch": "qwen35moe", "preset": "tiny", "quant": "f32"},
    "hybrid-wide": {"arch": "qwen35moe", "preset": "tinyk", "quant": "q5_k_m"},
    "hybrid-every-second": {"arch": "qwen35moe", "preset": "tinyk", "n_layer": 6, "quant": "q6_k"},
    "hybrid-draft": {"arch": "qwen35moe", "preset": "tiny", "n_nextn": 1},
    "hybrid-draft-fused": {"arch": "qwen35moe", "preset": "tiny", "n_nextn": 1, "fuse_gate_up": True},
    "hybrid-fused": {"arch": "qwen35moe", "preset": "tinyk", "fuse_gate_up": True},
    "hybrid-parts": {"arch": "qwen35moe", "preset": "tiny", "parts": 3},
    "hybrid-many": {"arch": "qwen35moe", "preset": "tinyk", "n_expert": 96, "n_used": 6, "quant": "q3_k_m"},
    "hybrid-mixed": {"arch": "qwen35moe", "preset": "tinyk", "types": {"blk.0.ffn_down_exps": "q8_0"}},
    "windows": {"arch": "laguna", "preset": "tiny"},
    "windows-wide": {"arch": "laguna", "preset": "tinyk", "quant": "q4_k"},
    "windows-mxfp4": {"arch": "laguna", "preset": "tinyk", "quant": "mxfp4_moe"},
    "windows-fused": {"arch": "laguna", "preset": "tinyk", "fuse_gate_up": True, "quant": "q2_k"},
    "windows-parts": {"arch": "laguna", "preset": "tinyk", "parts": 2},
    "windows-mixed": {
        "arch": "laguna",
        "preset": "tinyk",
        "n_layer": 5,
        "types": {"blk.2.ffn_gate_exps": "q6_k", "blk.3.ffn_up_exps": "iq4_xs", "blk.4.ffn_down_exps": "f16"},
    },
    "windows-long": {"arch": "laguna", "preset": "tiny", "n_swa": 1024},
    "windows-dense": {"arch": "laguna", "preset": "tiny", "n_dense": 3},
    "full-attention": {"arch": "laguna", "preset": "tiny", "n_swa": 0},
    "tied": {"arch": "qwen35moe", "preset": "tiny", "tied": True},
}


def make_one_of_twenty(name: str, folder: Path) -> Path:
    """Write the model `name` of `TWENTY`; returns the path of its first file."""
    return make_sparse.make(folder / f"{name}.gguf", **TWENTY[name])


def make_full(arch: str, folder: Path) -> Path:
    """The published model of `arch` at Q4_K_M: Laguna-XS.2 or Qwen3.6-35B-A3B."""
    return make_sparse.make(folder / f"{arch}.gguf", arch)


@contextmanager
def untouched(settings: Settings) -> Iterator[Arena]:
    """An arena that says that all is there, though nothing ever was: its pages are never touched."""
    model, program = open_model(settings)
    layout = ArenaLayout.of(program, model)
    with Region.create(layout.total_bytes) as region:
        arena = Arena.create(region, model, program, layout)
        slots = [0] * len(layout.slabs)
        for number, layer in enumerate(layout.layers):
            for expert in range(layer.experts):
                arena.directory.publish(number, expert, Entry(State.RESIDENT, 1, slots[layer.slab]))
                slots[layer.slab] += 1
        yield arena
