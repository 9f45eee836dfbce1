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

from sparkd.ipc.directory import Entry, State
from sparkd.store.arena import Arena
from sparkd.store.layout import Extent, core_extent, record_extents
from sparkd.store.reading import ShardFile, new_buffer

#: Threads that read at the same time.
READERS = 4
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

    def __init__(self, arena: Arena, readers: int = READERS) -> None:
        self.done = 0
        self.read = 0
        self.reading: list[str] = []
        self._arena = arena
        self._readers = readers
        self._core = [core_extent(arena.layout, arena.model, name) for name in arena.layout.core]
        self._records = [
            (layer, expert) for layer, records in enumerate(arena.layout.layers) for expert in range(records.experts)
        ]
        core = sum(extent.size for extent in self._core)
        self.total = core + sum(extent.size for job in self._records for extent in self._extents(*job))
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
            self._run(self._records, self._load_record)

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

    def _extents(self, layer: int, expert: int) -> Iterator[Extent]:
        arena = self._arena
        return record_extents(arena.program.expert_layers[layer], arena.layout.layers[layer], arena.model, expert)


def _pieces(extents: Iterable[Extent]) -> Iterator[Extent]:
    for extent in extents:
        for start in range(0, extent.size, _PIECE):
            size = min(_PIECE, extent.size - start)
            yield Extent(extent.shard, extent.source + start, extent.target + start, size)
