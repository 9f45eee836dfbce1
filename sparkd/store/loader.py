"""Fills the arena from the model's files: core first, then expert layer by expert layer.

Several threads read, each through a buffer of its own; neither the read nor the copy into the arena holds the GIL. A
record is published as soon as its three pieces are complete and the file is still the same; what an earlier store
already published is not read again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from typing import TypeVar

from sparkd.errors import SparkError
from sparkd.residency.commands import Copy
from sparkd.residency.slots import Record
from sparkd.store.layout import Extent, core_extent, record_extents
from sparkd.store.reading import ShardFile, new_buffer
from sparkd.store.residents import Residents

#: Threads that read at the same time: as many as make a difference (bench/README.md).
READERS = 8
#: Bytes of a core tensor that one reader takes at a time, so that all share a big one and a stop is noticed soon.
_PIECE = 8 << 20
_Job = TypeVar("_Job")
_log = logging.getLogger(__name__)


class LoadCancelled(Exception):
    """`cancel` was called before everything was loaded."""


class Loader:
    """One filling of an arena. `done` of `total` bytes are in place; `read` bytes came from files.

    `reading`: for each shard the way it was read, and why not the better one: known once `load` has opened them.
    """

    def __init__(self, residents: Residents, readers: int = READERS) -> None:
        self.done = 0
        self.read = 0
        self.reading: list[str] = []
        self._residents = residents
        self._arena = arena = residents.arena
        self._readers = readers
        self._core = [core_extent(arena.layout, arena.model, name) for name in arena.layout.core]
        layers = enumerate(arena.layout.layers)
        self._record_bytes = [sum(extent.size for extent in self._extents(Record(layer, 0))) for layer, _ in layers]
        sizes = zip(self._record_bytes, arena.layout.layers, strict=True)
        self.total = sum(extent.size for extent in self._core) + sum(size * layer.experts for size, layer in sizes)
        self._files: list[ShardFile] = []
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def load(self) -> None:
        """Read everything that is not resident yet; returns when it is.

        ModelFileError: a file is not the one that was opened first (names both identities), cannot be read, or ends
        early. BudgetError: memory ran out. LoadCancelled after `cancel`.
        """
        with ExitStack() as stack:
            self._files = [stack.enter_context(closing(ShardFile(s))) for s in self._arena.model.shards]
            stack.callback(self._tell_ways)
            if self._arena.core_loaded:
                self._count(sum(extent.size for extent in self._core), read=False)
            else:
                self._run(_pieces(self._core), self._fill)
                self._arena.publish_core()
            there = zip(self._record_bytes, self._residents.residents(), strict=True)
            self._count(sum(size * records for size, records in there), read=False)
            self._run(self._residents.fill(), self._load_record)

    def cancel(self) -> None:
        """Make `load` stop soon; for another thread."""
        self._cancelled.set()

    def _run(self, jobs: Iterable[_Job], work: Callable[[_Job, memoryview], None]) -> None:
        """Do `work` on every job in order of their start, several at a time; the first failure ends all."""
        queue = iter(jobs)
        failures: list[BaseException] = []

        def reader() -> None:
            buffer = new_buffer()
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

    def _load_record(self, copy: Copy, buffer: memoryview) -> None:
        start = self._arena.layout.record(copy.record.layer, copy.place.slot)
        try:
            for extent in self._extents(copy.record):
                self._fill(Extent(extent.shard, extent.source, start + extent.target, extent.size), buffer)
        except SparkError as error:
            self._residents.failed(copy, str(error))
            raise
        self._residents.copied(copy)

    def _fill(self, extent: Extent, buffer: memoryview) -> None:
        """Read an extent into the arena."""
        file = self._files[extent.shard]
        done = 0
        while done < extent.size:
            data = file.read(extent.source + done, extent.size - done, buffer)
            self._arena.region.write(extent.target + done, data)
            done += len(data)
        file.check()
        self._count(extent.size, read=True)

    def _tell_ways(self) -> None:
        self.reading = [file.way.describe() for file in self._files]
        for file, words in zip(self._files, self.reading, strict=True):
            if file.way.note:
                _log.warning("%s: %s", file.where, words)

    def _count(self, size: int, read: bool) -> None:
        with self._lock:
            self.done += size
            if read:
                self.read += size

    def _extents(self, record: Record) -> Iterator[Extent]:
        arena, layer = self._arena, record.layer
        return record_extents(
            arena.program.expert_layers[layer], arena.layout.layers[layer], arena.model, record.expert
        )


def _pieces(extents: Iterable[Extent]) -> Iterator[Extent]:
    for extent in extents:
        for start in range(0, extent.size, _PIECE):
            size = min(_PIECE, extent.size - start)
            yield Extent(extent.shard, extent.source + start, extent.target + start, size)
