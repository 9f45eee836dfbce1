"""Fills the arena from the model's files: core first, then expert layer by expert layer.

Several threads read, each through a buffer of its own that stays in the processor's cache; neither call holds the GIL.
A record is published as soon as its three pieces are complete; what an earlier store already published is not read
again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TypeVar

from sparkd.errors import ModelFileError
from sparkd.gguf.model_file import Identity, Shard
from sparkd.ipc.directory import Entry, State
from sparkd.store.arena import Arena
from sparkd.store.layout import Extent, core_extent, record_extents

#: Threads that read at the same time.
READERS = 4
#: Bytes of a reader's buffer, hence of one read.
_BUFFER = 1 << 20
#: Bytes of a core tensor that one reader takes at a time, so that all share a big one and a stop is noticed soon.
_PIECE = 8 << 20
_Job = TypeVar("_Job")


class LoadCancelled(Exception):
    """`cancel` was called before everything was loaded."""


class Loader:
    """One filling of an arena. `done` of `total` bytes are in place; `read` bytes came from files."""

    def __init__(self, arena: Arena, readers: int = READERS) -> None:
        self.done = 0
        self.read = 0
        self._arena = arena
        self._readers = readers
        self._core = [core_extent(arena.layout, arena.model, name) for name in arena.layout.core]
        self._records = [
            (layer, expert) for layer, records in enumerate(arena.layout.layers) for expert in range(records.experts)
        ]
        core = sum(extent.size for extent in self._core)
        self.total = core + sum(extent.size for job in self._records for extent in self._extents(*job))
        self._files: list[int] = []
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def load(self) -> None:
        """Read everything that is not resident yet; returns when it is.

        ModelFileError: a file is not the one that was opened first (names both identities), cannot be read, or ends
        early. BudgetError: memory ran out. LoadCancelled after `cancel`.
        """
        with ExitStack() as stack:
            self._files = [_open(shard, stack) for shard in self._arena.model.shards]
            if self._arena.core_loaded:
                self._count(sum(extent.size for extent in self._core), read=False)
            else:
                self._run(_pieces(self._core), self._fill)
                self._arena.publish_core()
            self._run(self._records, self._load_record)

    def cancel(self) -> None:
        """Make `load` stop soon; for another thread."""
        self._cancelled.set()

    def _run(self, jobs: Iterable[_Job], work: Callable[[_Job, memoryview], None]) -> None:
        """Do `work` on every job in order of their start, several at a time; the first failure ends all."""
        queue = iter(jobs)
        failures: list[BaseException] = []

        def reader() -> None:
            buffer = memoryview(bytearray(_BUFFER))
            while not failures:
                with self._lock:
                    job = next(queue, None)
                if job is None:
                    return
                try:
                    if self._cancelled.is_set():
                        raise LoadCancelled
                    work(job, buffer)
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=reader, name=f"reader-{n}") for n in range(self._readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _load_record(self, record: tuple[int, int], buffer: memoryview) -> None:
        layer, expert = record
        directory, layout = self._arena.directory, self._arena.layout
        extents = list(self._extents(layer, expert))
        entry = directory.entry(layer, expert)
        if entry.state is State.RESIDENT:
            self._count(sum(extent.size for extent in extents), read=False)
            return
        slot = layout.layers[layer].first_slot + expert
        generation = entry.generation + 1
        directory.publish(layer, expert, Entry(State.LOADING, generation, slot))
        start = layout.record(layer, slot)
        for extent in extents:
            self._fill(Extent(extent.shard, extent.source, start + extent.target, extent.size), buffer)
        directory.publish(layer, expert, Entry(State.RESIDENT, generation, slot))

    def _fill(self, extent: Extent, buffer: memoryview) -> None:
        """Read an extent into the arena."""
        shard = self._arena.model.shards[extent.shard]
        got = 0
        while got < extent.size:
            wanted = min(len(buffer), extent.size - got)
            try:
                n = os.preadv(self._files[extent.shard], [buffer[:wanted]], extent.source + got)
            except OSError as error:
                place = f"{wanted} bytes at byte {extent.source + got}"
                raise ModelFileError(f"cannot read {place}: {error.strerror}", where=str(shard.path)) from None
            if n == 0:
                raise ModelFileError(
                    f"ends early: of {extent.size} bytes at byte {extent.source} only {got} are there",
                    where=str(shard.path),
                    fix="the file was cut while it was read: copy or download it again",
                )
            self._arena.region.write(extent.target + got, buffer[:n])
            got += n
        self._count(extent.size, read=True)

    def _count(self, size: int, read: bool) -> None:
        with self._lock:
            self.done += size
            if read:
                self.read += size

    def _extents(self, layer: int, expert: int) -> Iterator[Extent]:
        arena = self._arena
        return record_extents(arena.program.expert_layers[layer], arena.layout.layers[layer], arena.model, expert)


def _pieces(extents: Iterable[Extent]) -> Iterator[Extent]:
    for extent in extents:
        for start in range(0, extent.size, _PIECE):
            size = min(_PIECE, extent.size - start)
            yield Extent(extent.shard, extent.source + start, extent.target + start, size)


def _open(shard: Shard, stack: ExitStack) -> int:
    """Open a shard if it is still the file that its header was read from."""
    try:
        fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(f"cannot be opened: {error.strerror}", where=str(shard.path)) from None
    stack.callback(os.close, fd)
    found = Identity.of(os.fstat(fd))
    if found != shard.identity:
        raise ModelFileError(
            f"is not the file that was opened first: now {_words(found)}, then {_words(shard.identity)}",
            where=str(shard.path),
            fix="restart the daemon to serve the new file",
        )
    return fd


def _words(identity: Identity) -> str:
    return (
        f"device {identity.device} inode {identity.inode} size {identity.size} modified {identity.mtime_ns / 1e9:.9f}"
    )
