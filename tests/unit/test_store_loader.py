"""Loading: only complete records are published, a changed file is refused, and nothing is read twice."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filled_arena import Filled, adopting, empty, filled, regions_closed

from sparkd.errors import ModelFileError
from sparkd.gguf.model_file import Identity
from sparkd.ipc.directory import Entry, State
from sparkd.store import reading
from sparkd.store.loader import LoadCancelled

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
    one = adopting(empty(path).region, readers)
    one.loader.load()
    assert bytes(one.region.view(0, one.region.size)) == bytes(expected.region.view(0, expected.region.size))


def test_a_second_store_reads_nothing_again(path):
    one = filled(path)
    before = bytes(one.region.view(0, one.region.size))
    again = adopting(one.region)
    again.loader.load()
    assert again.copier.read == 0
    assert again.loader.done == again.loader.total == one.loader.total
    assert bytes(one.region.view(0, one.region.size)) == before


def test_slots_that_were_being_loaded_count_as_empty(path):
    one = filled(path)
    entry = one.arena.directory.entry(2, 5)
    one.arena.directory.publish(2, 5, Entry(State.LOADING, entry.generation, entry.slot))
    start = one.arena.layout.record(2, entry.slot)
    size = one.arena.layout.slabs[one.arena.layout.layers[2].slab].record_bytes
    before = bytes(one.region.view(start, size))
    one.region.view(start, size)[:] = bytes(size)
    again = adopting(one.region)
    again.loader.load()
    assert 0 < again.copier.read <= size
    assert bytes(one.region.view(start, size)) == before
    assert one.arena.directory.entry(2, 5) == Entry(State.RESIDENT, entry.generation + 1, entry.slot)


def _seconds(mtime_ns: int) -> str:
    return f"{mtime_ns // 10**9}.{mtime_ns % 10**9:09d}"


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
        assert f"inode {identity.inode} size {identity.size} modified {_seconds(identity.mtime_ns)}" in said
    assert one.copier.read == 0
    assert not one.arena.core_loaded


def test_a_change_is_also_noticed_by_a_store_that_has_nothing_to_read(path):
    one = filled(path)
    _touch(path)
    with pytest.raises(ModelFileError, match="not the file that was opened first"):
        adopting(one.region).loader.load()


def test_a_file_that_is_gone_is_one_clear_line(path):
    one = empty(path)
    path.unlink()
    with pytest.raises(ModelFileError, match=r"model\.gguf: cannot be opened: No such file"):
        one.loader.load()


@pytest.fixture(params=["direct", "through the page cache"])
def way(request, monkeypatch) -> str:
    """How the file is read; direct where its file system allows."""
    if request.param != "direct":
        monkeypatch.setattr(reading, "direct_block", lambda fd: 0)
    return request.param


def _at_read(monkeypatch, number: int, happens: Callable[[], None]) -> None:
    """Let something happen just before the read of this number, once."""
    preadv, reads = os.preadv, itertools.count(1)

    def counted(fd, buffers, offset):
        if next(reads) == number:
            happens()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)


def _check_residents(one: Filled, path: Path) -> None:
    """What an aborted load has published is what a whole one of the same file puts there."""
    expected = filled(path)
    for layer, records in enumerate(one.arena.layout.layers):
        size = one.arena.layout.slabs[records.slab].record_bytes
        for expert in range(records.experts):
            entry = one.arena.directory.entry(layer, expert)
            if entry.state is State.RESIDENT:
                at = one.arena.layout.record(layer, entry.slot)
                assert bytes(one.region.view(at, size)) == bytes(expected.region.view(at, size))


def test_both_ways_fill_the_same_arena_and_the_worse_is_said(path, monkeypatch, caplog):
    one = filled(path)
    monkeypatch.setattr(reading, "direct_block", lambda fd: 0)
    other = filled(path)
    assert bytes(one.region.view(0, one.region.size)) == bytes(other.region.view(0, other.region.size))
    said = "read through the page cache: the file system takes no direct reads of this file"
    assert other.copier.reading == [said]
    assert f"{path}: {said}" in caplog.messages


@pytest.mark.parametrize("number", [1, 3, 60, 200])
def test_a_file_that_is_cut_while_it_is_loaded_gives_one_clear_line_and_no_half_record(
    path, tmp_path, monkeypatch, way, number
):
    whole = Path(shutil.copy(path, tmp_path / "whole.gguf"))
    one = empty(path)
    _at_read(monkeypatch, number, lambda: os.truncate(path, one.model.shards[0].data_offset + 5000))
    with pytest.raises(ModelFileError, match=r"model\.gguf: (ends early|is not the file)") as caught:
        one.loader.load()
    assert "\n" not in str(caught.value)
    assert one.loader.done < one.loader.total
    _check_residents(one, whole)


@pytest.mark.parametrize("number", [1, 60, 200])
def test_a_file_that_is_written_to_while_it_is_loaded_publishes_nothing_new(path, tmp_path, monkeypatch, way, number):
    whole = Path(shutil.copy(path, tmp_path / "whole.gguf"))
    one = empty(path)

    def spoil() -> None:
        with path.open("r+b") as file:
            file.seek(one.model.shards[0].data_offset)
            file.write(b"\xff" * 1000)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    _at_read(monkeypatch, number, spoil)
    with pytest.raises(ModelFileError, match="not the file that was opened first"):
        one.loader.load()
    assert one.arena.core_loaded == (number == 200)
    _check_residents(one, whole)


def test_short_reads_are_continued(path, monkeypatch, way):
    expected = filled(path)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:4096]], offset))
    one = filled(path)
    assert bytes(one.region.view(0, one.region.size)) == bytes(expected.region.view(0, expected.region.size))


@pytest.mark.parametrize("number", [1, 60, 200])
def test_a_read_error_is_one_line_that_names_the_place_and_no_half_record_is_published(path, monkeypatch, way, number):
    one = empty(path)

    def fail() -> None:
        raise OSError(5, "Input/output error")

    _at_read(monkeypatch, number, fail)
    with pytest.raises(ModelFileError, match=r"model\.gguf: cannot read \d+ bytes at byte \d+: Input/output error"):
        one.loader.load()
    monkeypatch.undo()
    _check_residents(one, path)


def test_a_cancelled_load_stops_and_publishes_no_half_record(path, monkeypatch):
    one = empty(path)
    preadv = os.preadv
    reads = itertools.count()  # threads read, and each number must come once

    def counted(fd, buffers, offset):
        if next(reads) == 40:
            one.loader.cancel()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with pytest.raises(LoadCancelled):
        one.loader.load()
    assert 0 < one.loader.done < one.loader.total
    again = adopting(one.region)
    again.loader.load()
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
        adopting(one.region).loader.load()
    assert opened() == []
