"""What a daemon holds, counted over all of its processes: what it holds after a fault must be what it held before."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from daemon import Daemon


@dataclass(frozen=True)
class Holdings:
    """Counts; `files` in the run directory, the daemon's directory for temporary files, and /dev/shm."""

    processes: int
    threads: int
    descriptors: int
    memfds: int
    sockets: int
    files: int

    @staticmethod
    def of(daemon: Daemon) -> Holdings:
        """What it holds now."""
        pids = list(family(daemon.process.pid))
        links = [link for pid in pids for link in _links(pid)]
        folders = (daemon.run_dir, daemon.temporary, Path("/dev/shm"))
        return Holdings(
            processes=len(pids),
            threads=sum(len(_entries(Path(f"/proc/{pid}/task"))) for pid in pids),
            descriptors=len(links),
            memfds=sum(link.startswith("/memfd:") for link in links),
            sockets=sum(link.startswith("socket:") for link in links),
            files=sum(len(_entries(folder)) for folder in folders),
        )

    def __str__(self) -> str:
        return " ".join(f"{value:>11}" for value in dataclasses.astuple(self))

    @staticmethod
    def heading() -> str:
        """Names of the columns of `str`."""
        return " ".join(f"{field.name:>11}" for field in dataclasses.fields(Holdings))


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    for task in _entries(Path(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def arena_inode(pid: int) -> int:
    """Of the arena that a process has."""
    return next(entry.stat().st_ino for entry in _entries(Path(f"/proc/{pid}/fd")) if _is_arena(entry))


def arena_holders(inode: int) -> set[int]:
    """Processes, anywhere on this machine, with a descriptor of the arena with this inode."""
    holders = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if _is_arena(entry) and entry.stat().st_ino == inode:
                holders.add(int(entry.parts[2]))
    return holders - {os.getpid()}


def _is_arena(entry: Path) -> bool:
    return "memfd:sparkd-arena" in str(entry.readlink())


def _links(pid: int) -> Iterator[str]:
    for entry in _entries(Path(f"/proc/{pid}/fd")):
        with contextlib.suppress(OSError):
            yield str(entry.readlink())


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
