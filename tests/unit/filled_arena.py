"""Arenas filled from generated models, and what the files say should be in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparkd.gguf.model_file import ModelFile
from sparkd.graph.ops import Weight
from sparkd.graph.program import Program
from sparkd.ipc.memory import Region
from sparkd.models import build_program
from sparkd.residency.slabs import SlabSize
from sparkd.store.arena import Arena
from sparkd.store.copier import READERS, Copier
from sparkd.store.layout import ArenaLayout
from sparkd.store.loader import Loader
from sparkd.store.residents import Copying, Residents

TOOLS = Path(__file__).parent.parent / "data" / "tools"


_regions: list[Region] = []


@contextmanager
def regions_closed() -> Iterator[None]:
    """Close at the end what was made here meanwhile."""
    yield
    while _regions:
        _regions.pop().close()


@dataclass
class Filled:
    model: ModelFile
    program: Program
    region: Region
    arena: Arena
    residents: Residents
    copier: Copier
    loader: Loader


def empty(path: Path, sizes: list[SlabSize] | None = None, copies: Copying | None = None) -> Filled:
    """An arena that is laid out and holds nothing yet; `copies` stands in for the copier."""
    model = ModelFile.open(path)
    program = build_program(model)
    layout = ArenaLayout.of(program, model, sizes)
    region = Region.create(layout.total_bytes)
    _regions.append(region)
    arena = Arena.create(region, model, program, layout)
    copier = Copier(arena)
    residents = Residents(arena, copies or copier)
    return Filled(model, program, region, arena, residents, copier, Loader(residents, copier))


def adopting(region: Region, readers: int = READERS, copies: Copying | None = None) -> Filled:
    """What a store that begins again makes of an arena."""
    arena = Arena.attach(region, build_program)
    copier = Copier(arena, readers)
    residents = Residents(arena, copies or copier)
    return Filled(arena.model, arena.program, region, arena, residents, copier, Loader(residents, copier))


def filled(path: Path) -> Filled:
    one = empty(path)
    one.loader.load()
    return one


def file_bytes(model: ModelFile, name: str) -> np.ndarray:
    """A tensor's bytes as the file has them, uint8 [slices, rows, row bytes]."""
    tensor = model.tensors[name]
    raw = np.fromfile(model.shards[tensor.shard].path, np.uint8, tensor.nbytes, offset=tensor.offset)
    return raw.reshape(tensor.slices, tensor.rows, tensor.row_bytes)


def expert_bytes(model: ModelFile, weight: Weight, expert: int) -> bytes:
    rows = slice(weight.first_row, weight.first_row + weight.rows)
    return file_bytes(model, weight.tensor)[expert, rows].tobytes()


def generate(out: Path, arch: str = "qwen35moe", preset: str = "tiny", quant: str = "q4_k_m", **changes) -> Path:
    """A model that is in no recipe; `changes` are hyper-parameters, or `split_max_size` and `split_empty_first`."""
    sys.path.insert(0, str(TOOLS))
    import make_gguf

    split = {key: changes.pop(key) for key in ("split_max_size", "split_empty_first") if key in changes}
    made = make_gguf.generate(arch, preset, quant, 1, str(out), None, overrides=changes, **split)
    return out.parent / made["files"][0]["name"]
