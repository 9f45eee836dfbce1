"""Threads that bring bytes into the arena: from the model's files, or from another place of the arena.

The first time, bytes go through a buffer, for memory that nobody used yet is filled fastest by the kernel
(`Region.write`). Once the arena is filled, a read goes straight to its place, which costs the processor least.

A *job* is a set of extents and what is to be done at its end. Its extents are copied by whichever threads are free, all
at the same time if there are enough, each through a buffer of its own; neither a read nor a copy holds the GIL. Urgent
jobs (a step waits for them) come first; of the others only a few extents are under way at a time, so that a job that
becomes urgent finds a free thread. Within a class jobs begin in the order they came.

Urgent jobs, and those that soon may be, have threads of their own if all of their extents can go straight to their
places (`readers.cpp`): these need no turn of the interpreter, and while it is computed, turns are scarce. They read
ahead of need only while nobody waits. What they do not get to its end goes the other way, which finds out why.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack, closing
from dataclasses import astuple
from enum import Enum
from typing import TYPE_CHECKING

from sparkd.errors import SparkError
from sparkd.store._readers import Readers
from sparkd.store.arena import Arena
from sparkd.store.layout import IN_ARENA, Extent
from sparkd.store.reading import ShardFile, new_buffer

if TYPE_CHECKING:
    from sparkd.store._readers import Piece, Told

#: Threads that read at the same time: as many as make a difference (bench/README.md).
READERS = 8
#: The same for what a step waits for: the pieces of one record. More at a time would have all records come at the end,
#: when they could be computed one after another.
EXPRESS = 3
#: Extents of jobs nobody waits for that may be under way at a time, once the arena is filled.
BACKGROUND = 2
#: Called when all of a job has been copied, or with why it was not.
Ended = Callable[[SparkError | None], None]
#: Where no word has to be written when all is there.
NOBODY = (0, 0, 0)


class Need(Enum):
    """Who waits for a job: a step; maybe a step, soon; nobody."""

    NOW = "now"
    SOON = "soon"
    NONE = "none"


class _Job:
    def __init__(self, extents: Iterable[Extent], ended: Ended, told: Told) -> None:
        self.waiting = list(reversed(list(extents)))
        self.open = len(self.waiting)
        self.ended = ended
        self.told = told
        self.error: SparkError | None = None


class Copier:
    """The threads and the jobs that wait for them. `read` bytes came from files, `moved` bytes from the arena.

    `reading`: for each shard the way it is read, and why not the better one: known once it is open. `failure`: a thread
    ended by a fault of this program.
    """

    def __init__(self, arena: Arena, readers: int = READERS) -> None:
        self.read = 0
        self.moved = 0
        self.failure: BaseException | None = None
        self._arena = arena
        self._readers = readers
        #: Until the arena is filled, nobody waits for anything in particular.
        self._background = readers
        self._filled = False
        self._files: list[ShardFile] = []
        self._opened = ExitStack()
        self._threads: list[threading.Thread] = []
        self._urgent: OrderedDict[Hashable, _Job] = OrderedDict()
        self._others: OrderedDict[Hashable, _Job] = OrderedDict()
        self._in_background = 0
        self._changed = threading.Condition()
        self._closed = False
        #: Once the arena is filled; and what is read there: key, job and extents by number.
        self._express: Readers | None = None
        self._expressed: dict[int, tuple[Hashable, _Job, list[Extent]]] = {}
        #: Numbers of those that are read ahead of need, by key.
        self._ahead: dict[Hashable, int] = {}
        self._number = 0

    # ---- life ----

    def open(self) -> None:
        """Open the files and begin with the jobs. ModelFileError: a file is not the one that was opened first."""
        for shard in self._arena.model.shards:
            self._files.append(self._opened.enter_context(closing(ShardFile(shard))))
        self._threads = [threading.Thread(target=self._work, name=f"reader-{n}") for n in range(self._readers)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads after the extent they are at, and close the files. What waits is given up, untold."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._express is not None:
            self._express.close()
        for thread in self._threads:
            thread.join()
        self._opened.close()

    @property
    def reading(self) -> list[str]:
        """One line for each open file."""
        return [file.way.describe() for file in self._files]

    def notes(self) -> list[str]:
        """What should be known about the way that files are read."""
        return [f"{file.where}: {file.way.describe()}" for file in self._files if file.way.note]

    # ---- jobs ----

    def begin(
        self, key: Hashable, extents: Iterable[Extent], ended: Ended, need: Need = Need.NONE, told: Told = NOBODY
    ) -> None:
        """Add a job; `ended` is called by one of the threads, which holds no lock then.

        Where all goes straight to its place, `told` is, once it is there: before `ended` is called.
        """
        job = _Job(extents, ended, told)
        with self._changed:
            if need is Need.NONE or not self._express_takes(key, job, need):
                (self._urgent if need is Need.NOW else self._others)[key] = job
                self._changed.notify(job.open)

    def hurry(self, key: Hashable) -> None:
        """Somebody waits for a job now. Nothing, if all of it has begun."""
        with self._changed:
            if self._express is not None and (number := self._ahead.pop(key, None)) is not None:
                self._express.hurry(number)
            elif (job := self._others.pop(key, None)) is not None and not self._express_takes(key, job, Need.NOW):
                self._urgent[key] = job
                self._changed.notify(job.open)

    def withdraw(self, key: Hashable) -> bool:
        """Give a job up, unless it has begun; true: it was given up, and will not be told as ended."""
        with self._changed:
            number = self._ahead.get(key)
            if self._express is not None and number is not None and self._express.withdraw(number):
                del self._ahead[key], self._expressed[number]
                return True
            for jobs in (self._urgent, self._others):
                job = jobs.get(key)
                if job is not None and job.open == len(job.waiting):
                    del jobs[key]
                    return True
        return False

    @property
    def backlog(self) -> int:
        """Jobs nobody waits for that have not begun, or not with all of it."""
        return len(self._others)

    def arena_filled(self) -> None:
        """From now on keep threads free of jobs that nobody waits for, and read into places that have been used.

        BudgetError when there is no memory for those that have not.
        """
        self._arena.region.allocate()
        with self._changed:
            self._background = min(BACKGROUND, self._readers)
            self._filled = True
            files = {file.direct: astuple(file.identity) for file in self._files if file.way.block}
            self._express = Readers(min(EXPRESS, self._readers), files)
            self._threads.append(threading.Thread(target=self._end_express, args=[self._express], name="express"))
            self._threads[-1].start()

    # ---- inside ----

    def _express_takes(self, key: Hashable, job: _Job, need: Need) -> bool:
        """Have a job read by the threads for what somebody waits for, if all of it can go straight to its place."""
        if self._express is None:
            return False
        extents = job.waiting[::-1]
        pieces = [piece for extent in extents if (piece := self._piece(extent)) is not None]
        if len(pieces) < len(extents):
            return False
        job.waiting = []
        self._number += 1
        self._expressed[self._number] = key, job, extents
        if need is Need.SOON:
            self._ahead[key] = self._number
        self._express.begin(self._number, pieces, job.told, need is Need.SOON)
        return True

    def _piece(self, extent: Extent) -> Piece | None:
        """An extent for `Readers`; None: it cannot go straight to its place."""
        if extent.shard == IN_ARENA:
            return None
        straight = self._files[extent.shard].straight(extent.source, extent.size, extent.target)
        if straight is None:
            return None
        fd, first, needed, asked = straight
        return fd, first, needed, asked, self._arena.region.address + extent.target - (extent.source - first)

    def _end_express(self, express: Readers) -> None:
        """Tell of what `express` has read, until it is closed."""
        try:
            while ended := express.ended():
                for number, complete in ended:
                    self._end_one(number, complete)
        except BaseException as fault:
            self.failure = fault
            raise

    def _end_one(self, number: int, complete: bool) -> None:
        with self._changed:
            key, job, extents = self._expressed.pop(number)
            self._ahead.pop(key, None)
            if not complete:
                job.waiting = extents[::-1]
                self._urgent[key] = job
                self._changed.notify(len(extents))
                return
        self._count(sum(extent.size for extent in extents), 0)
        if self._did(job, None, len(extents)):
            job.ended(job.error)

    def _work(self) -> None:
        buffer = new_buffer()
        while (taken := self._next()) is not None:
            job, extent, urgent = taken
            error = None
            try:
                self._fill(extent, buffer)
            except SparkError as problem:
                error = problem
            except BaseException as fault:
                self.failure = fault
                raise
            last = self._did(job, error)
            if not urgent:
                with self._changed:
                    self._in_background -= 1
                    self._changed.notify()
            if last:
                job.ended(job.error)

    def _next(self) -> tuple[_Job, Extent, bool] | None:
        """The next extent and whether it is urgent, when there is one; None when there will be none."""
        with self._changed:
            while not self._closed:
                urgent = bool(self._urgent)
                if urgent or (self._others and self._in_background < self._background):
                    jobs = self._urgent if urgent else self._others
                    key, job = next(iter(jobs.items()))
                    extent = job.waiting.pop()
                    if not job.waiting:
                        del jobs[key]
                    self._in_background += not urgent
                    return job, extent, urgent
                self._changed.wait()
        return None

    def _did(self, job: _Job, error: SparkError | None, count: int = 1) -> bool:
        """Note that extents have ended; true when they were the last of their job."""
        with self._changed:
            job.error = job.error or error
            job.open -= count
            return job.open == 0

    def _fill(self, extent: Extent, buffer: memoryview) -> None:
        region = self._arena.region
        write = region.overwrite if self._filled else region.write
        if extent.shard == IN_ARENA:
            write(extent.target, region.view(extent.source, extent.size))
            self._count(0, extent.size)
            return
        file = self._files[extent.shard]
        done = 0
        if self._filled and file.read_straight(extent.source, extent.size, region.bytes, extent.target):
            done = extent.size
        while done < extent.size:
            data = file.read(extent.source + done, extent.size - done, buffer)
            write(extent.target + done, data)
            done += len(data)
        file.check()
        self._count(extent.size, 0)

    def _count(self, read: int, moved: int) -> None:
        with self._changed:
            self.read += read
            self.moved += moved
