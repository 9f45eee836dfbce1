"""Loading: only complete records are published, a changed file is refused, and nothing is read twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filled_arena import empty, filled, regions_closed

from sparkd.errors import ModelFileError
from sparkd.gguf.model_file import Identity
from sparkd.ipc.directory import Entry, State
from sparkd.models import build_program
from sparkd.store.arena import Arena
from sparkd.store.loader import LoadCancelled, Loader

NAME = "qwen35moe-tiny-s1-q4_k_m"


@pytest.fixture(autouse=True)
def _close_regions():
    with regions_closed():
        yield


@pytest.fixture
def path(model_path, tmp_path) -> Path:
    return Path(shutil.copy(model_path(NAME), tmp_path / "model.gguf"))


def test_everything_is_resident_with_its_own_slot_after_a_load(path):
    one = filled(path)
    assert one.arena.core_loaded
    assert one.arena.directory.residents() == [layer.experts for layer in one.program.expert_layers]
    entries = [
        (records.slab, one.arena.directory.entry(layer, expert))
        for layer, records in enumerate(one.arena.layout.layers)
        for expert in range(records.experts)
    ]
    assert len({(slab, entry.slot) for slab, entry in entries}) == len(entries)
    assert {entry.generation for _, entry in entries} == {1}


@pytest.mark.parametrize("readers", [1, 3, 16])
def test_the_number_of_readers_does_not_change_the_arena(path, readers):
    expected = filled(path)
    one = empty(path)
    Loader(one.arena, readers).load()
    assert bytes(one.region.view(0, one.region.size)) == bytes(expected.region.view(0, expected.region.size))


def test_a_second_store_reads_nothing_again(path):
    one = filled(path)
    before = bytes(one.region.view(0, one.region.size))
    again = Loader(Arena.attach(one.region, build_program))
    again.load()
    assert again.read == 0
    assert again.done == again.total
    assert bytes(one.region.view(0, one.region.size)) == before


def test_slots_that_were_being_loaded_count_as_empty(path):
    one = filled(path)
    entry = one.arena.directory.entry(2, 5)
    one.arena.directory.publish(2, 5, Entry(State.LOADING, entry.generation, entry.slot))
    start = one.arena.layout.record(2, entry.slot)
    size = one.arena.layout.slabs[one.arena.layout.layers[2].slab].record_bytes
    before = bytes(one.region.view(start, size))
    one.region.view(start, size)[:] = bytes(size)
    again = Loader(Arena.attach(one.region, build_program))
    again.load()
    assert 0 < again.read <= size
    assert bytes(one.region.view(start, size)) == before
    assert one.arena.directory.entry(2, 5) == Entry(State.RESIDENT, entry.generation + 1, entry.slot)


def _replace(path: Path) -> None:
    copy = path.with_suffix(".new")
    shutil.copy2(path, copy)
    copy.rename(path)


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _truncate(path: Path) -> None:
    status = path.stat()
    os.truncate(path, status.st_size - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [_replace, _touch, _truncate])
def test_a_file_that_changed_since_it_was_opened_is_refused_with_both_identities(path, change):
    one = empty(path)
    before = Identity.of(path.stat())
    change(path)
    after = Identity.of(path.stat())
    with pytest.raises(ModelFileError) as caught:
        one.loader.load()
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    for identity in (before, after):
        assert f"inode {identity.inode} size {identity.size} modified {identity.mtime_ns / 1e9:.9f}" in said
    assert one.loader.read == 0
    assert not one.arena.core_loaded


def test_a_change_is_also_noticed_by_a_store_that_has_nothing_to_read(path):
    one = filled(path)
    _touch(path)
    with pytest.raises(ModelFileError, match="not the file that was opened first"):
        Loader(Arena.attach(one.region, build_program)).load()


def test_a_file_that_is_gone_is_one_clear_line(path):
    one = empty(path)
    path.unlink()
    with pytest.raises(ModelFileError, match=r"model\.gguf: cannot be opened: No such file"):
        one.loader.load()


def test_a_file_that_ends_early_says_how_many_bytes_are_there(path, monkeypatch):
    one = empty(path)
    preadv = os.preadv

    def short(fd, buffers, offset):
        return preadv(fd, [buffers[0][:100]], offset) if offset % 3 else 0

    monkeypatch.setattr(os, "preadv", short)
    with pytest.raises(ModelFileError, match=r"ends early: of \d+ bytes at byte \d+ only \d+ are there"):
        one.loader.load()
    assert not one.arena.core_loaded
    assert sum(one.arena.directory.residents()) == 0


def test_short_reads_are_continued(path, monkeypatch):
    expected = filled(path)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1000]], offset))
    one = filled(path)
    assert bytes(one.region.view(0, one.region.size)) == bytes(expected.region.view(0, expected.region.size))


def test_a_read_error_names_the_place(path, monkeypatch):
    one = empty(path)

    def broken(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelFileError, match=r"cannot read \d+ bytes at byte \d+: Input/output error"):
        one.loader.load()


def test_a_cancelled_load_stops_and_publishes_no_half_record(path, monkeypatch):
    one = empty(path)
    preadv = os.preadv
    reads = 0

    def counted(fd, buffers, offset):
        nonlocal reads
        reads += 1
        if reads == 200:
            one.loader.cancel()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with pytest.raises(LoadCancelled):
        one.loader.load()
    assert 0 < one.loader.done < one.loader.total
    again = Loader(Arena.attach(one.region, build_program))
    again.load()
    expected = filled(path)
    for slab in expected.arena.layout.slabs:
        size = slab.slots * slab.record_bytes
        assert bytes(one.region.view(slab.offset, size)) == bytes(expected.region.view(slab.offset, size))


def test_files_are_closed_after_success_and_failure(path):
    def opened() -> list[Path]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [link for link in links if link.readlink() == path]

    one = filled(path)
    assert opened() == []
    _touch(path)
    with pytest.raises(ModelFileError):
        Loader(one.arena).load()
    assert opened() == []
