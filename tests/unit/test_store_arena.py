"""The arena: every byte as the file has it, where the layout says, found again without the file."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise

import numpy as np
import pytest
from filled_arena import Filled, empty, expert_bytes, file_bytes, filled, generate, regions_closed

from sparkd.config import ModelSettings, Settings
from sparkd.errors import ModelFileError, UnavailableError
from sparkd.gguf.model_file import ModelFile
from sparkd.ipc.directory import Entry, State
from sparkd.ipc.memory import Region
from sparkd.models import build_program
from sparkd.residency.budget import GIB, Limit
from sparkd.residency.slabs import SlabSize
from sparkd.store import arena as arena_module
from sparkd.store.arena import Arena
from sparkd.store.layout import (
    ALIGNMENT,
    BLOCK,
    PAGE,
    PIECE_ALIGNMENT,
    VERSION,
    ArenaLayout,
    core_tensors,
    record_extents,
)
from sparkd.store.plan import make_plan
from sparkd.store.server import open_arena

MODELS = ["qwen35moe-tiny-s1-q4_k_m", "laguna-tiny-s1-q4_k_m", "laguna-tinyk-s1-q4_k_m", "qwen35moe-tinyk-s1-mxfp4_moe"]


@pytest.fixture(autouse=True)
def _close_regions():
    with regions_closed():
        yield


def _at(one: Filled, arena: Arena, address: int, size: int) -> bytes:
    return bytes(arena.region.view(address - arena.region.address, size))


def _check_every_byte(one: Filled, arena: Arena) -> None:
    """Core tensors and every piece of every record, through the addresses that executors get, against the files."""
    for name in core_tensors(one.program):
        stored = arena.tensor(name)
        assert stored.address % ALIGNMENT == 0
        assert stored.format is one.model.tensors[name].format
        assert _at(one, arena, stored.address, one.model.tensors[name].nbytes) == file_bytes(one.model, name).tobytes()
    for layer, addresses in zip(one.program.expert_layers, arena.records(), strict=True):
        pieces = arena.pieces(one.program.expert_layers.index(layer))
        assert len(addresses) == layer.experts
        for expert, address in enumerate(addresses):
            for weight, piece in zip((layer.gate, layer.up, layer.down), pieces, strict=True):
                expected = expert_bytes(one.model, weight, expert)
                assert (int(address) + piece.offset) % PIECE_ALIGNMENT == 0
                assert piece.format is one.model.tensors[weight.tensor].format
                assert _at(one, arena, int(address) + piece.offset, len(expected)) == expected


@pytest.mark.parametrize("name", MODELS)
def test_the_arena_holds_every_byte_as_the_file_has_it(model_path, name):
    one = filled(model_path(name))
    _check_every_byte(one, one.arena)
    assert one.loader.done == one.loader.total == one.copier.read


def test_core_and_records_together_are_every_tensor_of_the_model(model_path):
    one = empty(model_path("laguna-tiny-s1-q4_k_m"))
    stacks = {w.tensor for layer in one.program.expert_layers for w in (layer.gate, layer.up, layer.down)}
    assert set(one.arena.layout.core) | stacks == set(one.model.tensors)
    assert not set(one.arena.layout.core) & stacks
    assert one.loader.total == one.model.tensor_bytes


def test_a_tied_embedding_lies_in_the_arena_once(tmp_path):
    one = filled(generate(tmp_path / "tied.gguf", tied=True))
    _check_every_byte(one, one.arena)
    assert list(one.arena.layout.core).count("token_embd.weight") == 1


def test_fused_gate_and_up_give_the_same_record_layout_as_separate_ones(tmp_path):
    fused, separate = (filled(generate(tmp_path / f"{on}.gguf", "laguna", fuse_gate_up=on)) for on in (True, False))
    assert any("gate_up" in name for name in fused.model.tensors)
    _check_every_byte(fused, fused.arena)
    assert fused.arena.layout.layers == separate.arena.layout.layers
    assert [s.record_bytes for s in fused.arena.layout.slabs] == [s.record_bytes for s in separate.arena.layout.slabs]


@pytest.mark.parametrize("name", MODELS)
def test_pieces_lie_within_blocks_as_in_the_file_and_have_room_for_whole_ones(model_path, name):
    one = empty(model_path(name))
    alike = 0
    for layer, records in zip(one.program.expert_layers, one.arena.layout.layers, strict=True):
        for expert in range(layer.experts):
            ends = [0]
            for extent in record_extents(layer, records, one.model, expert):
                if (extent.source - extent.target) % BLOCK == 0:
                    alike += 1
                    begin = extent.target - extent.target % BLOCK
                    assert begin >= ends[-1]
                    ends.append(extent.target + extent.size + -(extent.target + extent.size) % BLOCK)
                else:
                    assert extent.target >= ends[-1]
                    ends.append(extent.target + extent.size)
            assert ends[-1] <= one.arena.layout.slabs[records.slab].record_bytes
    assert alike or "tinyk" not in name


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_split_model_fills_the_same_arena_as_a_whole_one(tmp_path, empty_first):
    (tmp_path / "split").mkdir()
    path = tmp_path / "split" / "m.gguf"
    split = filled(generate(path, split_max_size=200_000, split_empty_first=empty_first))
    whole = filled(generate(tmp_path / "m.gguf"))
    assert len(split.model.shards) > 2
    _check_every_byte(split, split.arena)
    for one, two in zip(split.arena.layout.slabs, whole.arena.layout.slabs, strict=True):
        size = one.slots * one.record_bytes
        assert bytes(split.region.view(one.offset, size)) == bytes(whole.region.view(two.offset, size))
    _check_every_byte(split, Arena.attach(split.region, build_program))


def test_layers_with_records_of_one_size_share_a_slab_and_others_do_not(model_path):
    layout = empty(model_path("laguna-tinyk-s1-q4_k_m")).arena.layout
    sizes = [slab.record_bytes for slab in layout.slabs]
    assert len(set(sizes)) == len(sizes) > 1
    records = [sum(r.experts for r in layout.layers if r.slab == number) for number in range(len(layout.slabs))]
    assert records == [slab.slots for slab in layout.slabs]


def test_no_two_things_in_the_arena_overlap(model_path):
    one = empty(model_path("qwen35moe-tiny-s1-q4_k_m"))
    layout = one.arena.layout
    spans = [(0, PAGE), (PAGE, layout.shards_bytes), (layout.directory_offset, layout.directory_bytes)]
    spans += [(offset, one.model.tensors[name].nbytes) for name, offset in layout.core.items()]
    spans += [(slab.offset, slab.slots * slab.record_bytes) for slab in layout.slabs]
    spans.sort()
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following
    assert sum(spans[-1]) <= layout.total_bytes


def test_the_layout_follows_from_model_and_slots_alone(model_path):
    path = model_path("qwen35moe-tiny-s1-q4_k_m")
    one, two = empty(path), empty(path)
    assert one.arena.layout == two.arena.layout
    fewer = [SlabSize(3, reserve=1) for _ in one.arena.layout.slabs]
    partial = ArenaLayout.of(one.program, one.model, fewer)
    assert partial.core == one.arena.layout.core
    assert [slab.size for slab in partial.slabs] == fewer
    assert (one.arena.layout.partial, partial.partial) == (False, True)
    assert partial.records_bytes < one.arena.layout.records_bytes
    with pytest.raises(IndexError):
        partial.record(0, 3)
    with pytest.raises(ValueError, match="cannot be served"):
        ArenaLayout.of(one.program, one.model, [SlabSize(1, reserve=0) for _ in fewer])


@pytest.mark.parametrize("name", ["laguna-tiny-s1-q4_k_m", "qwen35moe-tiny-s1-f32"])
def test_the_layout_within_a_room_is_the_same_for_a_region_of_its_size(model_path, name):
    one = empty(model_path(name))
    full = one.arena.layout
    assert ArenaLayout.within(one.program, one.model, full.total_bytes) == full
    smallest = ArenaLayout.within(one.program, one.model, 0)
    assert [slab.size for slab in smallest.slabs] == [SlabSize(2, 1) for _ in full.slabs]
    step = full.slabs[0].record_bytes // 3
    for room in range(smallest.total_bytes, full.total_bytes, step):
        layout = ArenaLayout.within(one.program, one.model, room)
        assert layout.total_bytes <= room
        assert ArenaLayout.within(one.program, one.model, layout.total_bytes) == layout


def test_an_attached_arena_needs_no_file(model_path, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(model_path("qwen35moe-tiny-s1-q4_k_m"), path)
    one = filled(path)
    expected = bytes(one.region.view(0, one.region.size))
    hidden = path.rename(tmp_path / "elsewhere.gguf")
    other = Arena.attach(Region.map(os.dup(one.region.fd), writable=False), build_program)
    assert other.model.fingerprint == one.model.fingerprint
    assert other.model.shards == one.model.shards
    assert other.program == one.program
    assert other.layout == one.arena.layout
    assert other.core_loaded
    hidden.rename(path)
    _check_every_byte(one, other)
    assert bytes(one.region.view(0, one.region.size)) == expected


def test_records_that_are_not_resident_have_no_address(model_path):
    one = empty(model_path("qwen35moe-tiny-s1-q4_k_m"))
    assert not any(addresses.any() for addresses in one.arena.records())
    one.arena.directory.publish(1, 3, Entry(State.RESIDENT, 1, 4))
    one.arena.directory.publish(1, 4, Entry(State.LOADING, 1, 5))
    addresses = one.arena.records()
    assert int(addresses[1][3]) == one.region.address + one.arena.layout.record(1, 4)
    assert sum(int(np.count_nonzero(a)) for a in addresses) == 1


def test_a_region_without_an_arena_is_refused():
    with Region.create(1 << 16) as region:
        assert not Arena.present(region)
        with pytest.raises(UnavailableError, match="not laid out"):
            Arena.attach(region, build_program)


def test_an_arena_of_another_version_or_layout_is_refused(model_path):
    one = empty(model_path("qwen35moe-tiny-s1-q4_k_m"))
    words = one.region.array(0, 32, np.uint64)
    for word, said in (
        (arena_module._VERSION_WORD, f"layout version {VERSION + 1}, this program knows {VERSION}"),
        (arena_module._TOTAL_WORD, "another version"),
        (arena_module._FINGERPRINT_WORD + 3, "another version"),
        (12, "another version"),
        *((word, "another version") for word in (16, 17, 18, 20)),
    ):
        words[word] += 1
        with pytest.raises(UnavailableError, match=said):
            Arena.attach(one.region, build_program)
        words[word] -= 1
    assert Arena.attach(one.region, build_program).layout == one.arena.layout


def test_a_region_of_the_wrong_size_is_not_laid_out(model_path):
    model = ModelFile.open(model_path("qwen35moe-tiny-s1-q4_k_m"))
    program = build_program(model)
    layout = ArenaLayout.of(program, model)
    with Region.create(layout.total_bytes - PAGE) as region, pytest.raises(ValueError, match="the layout needs"):
        Arena.create(region, model, program, layout)


def test_a_store_takes_no_other_model_than_was_planned_even_of_the_same_size(model_path):
    settings = Settings(model=ModelSettings(path=str(model_path("qwen35moe-tiny-s1-q4_k_m"))))
    plan = make_plan(settings, limits=[Limit("limit", GIB)])
    with Region.create(plan.arena_bytes) as region:
        for _ in range(2):  # an empty region, then one that is laid out
            with pytest.raises(ModelFileError, match=f"{plan.path}: changed since .* {plan.fingerprint} now, not 00ab"):
                open_arena(region, settings, "00ab")
            assert open_arena(region, settings, plan.fingerprint).model.fingerprint == plan.fingerprint
