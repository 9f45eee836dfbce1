"""Shared memory: one region, seen by whoever holds its descriptor, with no name and no way to shrink it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparkd.errors import BudgetError
from sparkd.ipc.memory import Region


def test_what_one_mapping_writes_another_reads():
    with Region.create(10_000) as mine, Region.map(os.dup(mine.fd)) as other:
        mine.view(5000, 3)[:] = b"abc"
        assert bytes(other.view(5000, 3)) == b"abc"
        other.array(8000, (2, 3), np.uint32)[1, 2] = 77
        assert mine.array(8020, 1, np.uint32)[0] == 77


def test_a_child_that_inherits_the_descriptor_sees_the_bytes():
    code = (
        "import sys; from sparkd.ipc.memory import Region; r = Region.map(int(sys.argv[1])); r.view(1, 5)[:] = b'hello'"
    )
    with Region.create(4096) as region:
        subprocess.run([sys.executable, "-c", code, str(region.fd)], pass_fds=[region.fd], check=True)
        assert bytes(region.view(0, 7)) == b"\0hello\0"


def test_an_exec_without_the_descriptor_named_does_not_inherit_it():
    with Region.create(4096) as region:
        assert fcntl.fcntl(region.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_the_size_is_sealed():
    with Region.create(8192) as region:
        for size in (4096, 0, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)


def test_a_reader_cannot_write():
    with Region.create(4096) as region, Region.map(os.dup(region.fd), writable=False) as reader:
        with pytest.raises(TypeError):
            reader.view(0, 1)[:] = b"x"
        assert not reader.array(0, 8).flags.writeable


def test_what_is_written_by_descriptor_is_in_every_mapping():
    with Region.create(3 << 20) as region:
        data = bytes(range(256)) * 8000
        region.write(12345, memoryview(data))
        assert bytes(region.view(12345, len(data))) == data
        assert not region.array(0, 12345).any()
        assert not region.array(12345 + len(data), region.size - 12345 - len(data)).any()
        with pytest.raises(IndexError):
            region.write(region.size - 1, memoryview(b"xx"))
        assert region.array(region.size - 1, 1)[0] == 0


def test_memory_that_runs_out_while_writing_is_an_error_not_a_signal(monkeypatch):
    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    with Region.create(4096) as region:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(BudgetError, match="no memory for bytes 10 to 12 of 4096: No space left"):
            region.write(10, memoryview(b"xx"))


def test_the_address_is_where_the_bytes_are():
    with Region.create(4096) as region:
        region.view(100, 4)[:] = b"here"
        assert ctypes.string_at(region.address + 100, 4) == b"here"


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 4097), (4096, 1), (1 << 60, 1), (0, -1)])
def test_nothing_outside_the_region_is_handed_out(offset, size):
    with Region.create(4096) as region:
        with pytest.raises(IndexError):
            region.view(offset, size)
        with pytest.raises(IndexError):
            region.array(offset, size)


def test_views_stay_good_after_close():
    region = Region.create(4096)
    view = region.array(0, 4096)
    region.close()
    view[:] = 7
    assert view.sum() == 7 * 4096


def test_nothing_is_left_behind():
    before = [path.name for path in Path("/proc/self/fd").iterdir()]
    with Region.create(1 << 20) as region:
        assert str(Path(f"/proc/self/fd/{region.fd}").readlink()).startswith("/memfd:sparkd-arena")
    assert [path.name for path in Path("/proc/self/fd").iterdir()] == before


def test_a_region_that_cannot_be_is_one_clear_line():
    with pytest.raises(BudgetError, match="cannot make a shared memory region of") as caught:
        Region.create(1 << 62)
    assert "\n" not in str(caught.value)
