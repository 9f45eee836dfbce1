"""Reading files: past the page cache where that goes, through it where not, and always the very bytes asked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkd.errors import ModelFileError
from sparkd.gguf.model_file import Identity, Shard
from sparkd.store import reading
from sparkd.store.reading import BUFFER, ShardFile, new_buffer

SIZE = 3 * BUFFER + 777
CONTENT = bytes(os.urandom(SIZE))


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "shard"
    with path.open("wb") as file:
        file.write(CONTENT)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def _shard(path: Path) -> Shard:
    return Shard(path, path.stat().st_size, Identity.of(path.stat()), b"", 0)


def _opened(path: Path, monkeypatch: pytest.MonkeyPatch, block: int | None) -> ShardFile:
    """Read in blocks of this size; 0: through the page cache."""
    monkeypatch.setattr(reading, "direct_block", lambda fd: block)
    file = ShardFile(_shard(path))
    if file.way.block != block:
        file.close()
        pytest.skip(f"the file system of {path} takes no direct reads")
    return file


def _whole(file: ShardFile, offset: int, size: int) -> bytes:
    buffer, data = new_buffer(), b""
    while len(data) < size:
        data += file.read(offset + len(data), size - len(data), buffer)
    return data


def _cached_pages(path: Path) -> int:
    """How many pages of a file are in the page cache."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    present = (ctypes.c_ubyte * pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.byref(first), ctypes.c_size_t(size), present) == 0
        del first
    return sum(page & 1 for page in present)


@pytest.mark.parametrize("block", [0, 512, 4096])
def test_any_piece_of_a_file_is_read_as_it_is(path, monkeypatch, block):
    with closing(_opened(path, monkeypatch, block)) as file:

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(st.integers(0, SIZE - 1), st.integers(1, 2 * BUFFER))
        def check(offset: int, size: int) -> None:
            size = min(size, SIZE - offset)
            assert _whole(file, offset, size) == CONTENT[offset : offset + size]

        check()
        assert _whole(file, 0, SIZE) == CONTENT
        assert _whole(file, SIZE - 1, 1) == CONTENT[-1:]


@pytest.mark.parametrize("block", [512, 4096])
def test_a_piece_that_lies_alike_in_its_blocks_is_read_straight_to_its_place_and_no_other(path, monkeypatch, block):
    place = memoryview(mmap.mmap(-1, SIZE + 4 * 4096))
    with closing(_opened(path, monkeypatch, block)) as file:
        if not file.way.block:
            pytest.skip(f"the file system of {path} takes no direct reads")

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(st.integers(0, SIZE - 1), st.integers(1, 2 * BUFFER), st.integers(0, 2 * block - 1))
        def check(offset: int, size: int, shift: int) -> None:
            size = min(size, SIZE - offset)
            at = block + offset % block + shift
            end = at + size + -(at + size) % block
            place[:] = bytes(len(place))
            straight = file.read_straight(offset, size, place, at)
            assert straight == (shift % block == 0)
            assert bytes(place[at : at + size]) == (CONTENT[offset : offset + size] if straight else bytes(size))
            assert not any(place[: at - at % block]) and not any(place[end:])

        check()


def test_a_straight_read_goes_on_where_it_was_cut_short_and_is_done_the_other_way_once_refused(path, monkeypatch):
    preadv = os.preadv
    place = memoryview(mmap.mmap(-1, SIZE))
    with closing(_opened(path, monkeypatch, 512)) as file:
        if not file.way.block:
            pytest.skip(f"the file system of {path} takes no direct reads")
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1024]], offset))
        assert file.read_straight(700, 9000, place, 700)
        assert bytes(place[700:9700]) == CONTENT[700:9700]

        def refused(fd, buffers, offset):
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(os, "preadv", refused)
        assert not file.read_straight(700, 9000, place, 700)
        assert "was refused" in file.way.note
        assert not file.read_straight(0, 512, place, 0)


@pytest.mark.parametrize("block", [0, 4096])
def test_what_was_read_is_not_left_in_the_page_cache(path, monkeypatch, block):
    with closing(_opened(path, monkeypatch, block)) as file:
        if _cached_pages(path):
            pytest.skip(f"the file system of {path} keeps all in memory")
        assert _whole(file, 100, SIZE - 100) == CONTENT[100:]
        read_ahead = _cached_pages(path)
    assert _cached_pages(path) == 0
    assert block == 0 or read_ahead == 0


def test_a_file_system_that_says_its_block_is_believed(path, monkeypatch):
    monkeypatch.setattr(reading, "direct_block", lambda fd: 1024)
    with closing(ShardFile(_shard(path))) as file:
        if not file.way.block:
            pytest.skip(f"the file system of {path} takes no direct reads")
        assert file.way.describe() == "read past the page cache, in blocks of 1024 bytes"
        assert _whole(file, 1500, 5000) == CONTENT[1500:6500]


def test_a_file_system_that_says_nothing_is_tried(path, monkeypatch):
    preadv = os.preadv
    tried = []

    def only_whole_pages(fd, buffers, offset):
        tried.append((len(buffers[0]), offset))
        if offset % 4096 or len(buffers[0]) % 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(reading, "direct_block", lambda fd: None)
    monkeypatch.setattr(os, "preadv", only_whole_pages)
    with closing(ShardFile(_shard(path))) as file:
        if not tried:
            pytest.skip(f"the file system of {path} takes no direct reads")
        assert file.way.block == 4096
        assert tried == [(512, 512), (4096, 4096)]
        assert _whole(file, 5, 100_000) == CONTENT[5:100_005]


def _refuse_opening(monkeypatch):
    opened = os.open

    def refusing(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    return "takes no direct reads (Invalid argument)"


def _say_none(monkeypatch):
    monkeypatch.setattr(reading, "direct_block", lambda fd: 0)
    return "takes no direct reads of this file"


def _refuse_every_block(monkeypatch):
    preadv = os.preadv

    def refusing(fd, buffers, offset):
        if len(buffers[0]) % 512 == 0:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(reading, "direct_block", lambda fd: None)
    monkeypatch.setattr(os, "preadv", refusing)
    return "direct reads in blocks of 4096 bytes are refused"


@pytest.mark.parametrize("refuse", [_refuse_opening, _say_none, _refuse_every_block])
def test_where_direct_reads_do_not_go_the_way_taken_says_why(path, monkeypatch, refuse):
    reason = refuse(monkeypatch)
    with closing(ShardFile(_shard(path))) as file:
        assert file.way.block == 0
        assert file.way.describe().startswith("read through the page cache: ")
        assert reason in file.way.note
        assert _whole(file, 4000, 777) == CONTENT[4000:4777]


def test_a_direct_read_that_is_refused_later_is_done_the_other_way_and_said(path, monkeypatch):
    file = _opened(path, monkeypatch, 512)
    preadv = os.preadv

    def refusing(fd, buffers, offset):
        if fd == file._direct and offset >= BUFFER:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    with closing(file):
        assert _whole(file, 0, SIZE) == CONTENT
        assert file.way.block == 0
        assert f"at byte {BUFFER} was refused" in file.way.note


@pytest.mark.parametrize("block", [0, 512])
def test_a_read_error_names_file_and_place(path, monkeypatch, block):
    with closing(_opened(path, monkeypatch, block)) as file:

        def broken(fd, buffers, offset):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ModelFileError, match=r"shard: cannot read 99 bytes at byte 1234: Input/output error"):
            file.read(1234, 99, new_buffer())


@pytest.mark.parametrize("block", [0, 512])
def test_a_file_that_is_cut_while_it_is_open_is_noticed(path, monkeypatch, block):
    with closing(_opened(path, monkeypatch, block)) as file:
        before = Identity.of(path.stat())
        os.truncate(path, 1000)
        assert bytes(file.read(900, 500, new_buffer())) == CONTENT[900:1000]
        for offset in (1000, 1024, 5000):
            with pytest.raises(ModelFileError, match=rf"ends early: 500 bytes at byte {offset} are missing"):
                file.read(offset, 500, new_buffer())
            if file.way.block:
                with pytest.raises(ModelFileError, match=rf"ends early: 500 bytes at byte {offset} are missing"):
                    file.read_straight(offset, 500, memoryview(mmap.mmap(-1, SIZE)), offset)
        with pytest.raises(ModelFileError, match="not the file that was opened first") as caught:
            file.check()
        for size, ns in ((1000, path.stat().st_mtime_ns), (SIZE, before.mtime_ns)):
            assert f"size {size} modified {ns // 10**9}.{ns % 10**9:09d}" in str(caught.value)


def test_another_file_is_refused_before_anything_is_read(path, monkeypatch):
    shard = _shard(path)
    os.utime(path, ns=(0, 1))
    monkeypatch.setattr(os, "preadv", lambda *given: pytest.fail("read"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ModelFileError, match="not the file that was opened first"):
        ShardFile(shard)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
