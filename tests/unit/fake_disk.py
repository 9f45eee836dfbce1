"""A disk that finishes, fails and forgets when the test says so, and in the order it says."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from filled_arena import Filled

from sparkd.errors import ModelFileError
from sparkd.store.copier import Ended, Need
from sparkd.store.layout import IN_ARENA, Extent


@dataclass
class Job:
    extents: list[Extent]
    ended: Ended
    urgent: bool
    begun: bool = False


class FakeDisk:
    """Stands in for the copier; `jobs` are open, in the order they came."""

    def __init__(self) -> None:
        self.jobs: dict[Hashable, Job] = {}
        self.one: Filled | None = None
        #: Extents that were read from files, and records' worth of copies within the arena.
        self.reads: list[Extent] = []
        self.moves = 0

    def begin(
        self, key: Hashable, extents: Iterable[Extent], ended: Ended, need: Need = Need.NONE, told: object = None
    ) -> None:
        assert key not in self.jobs, "two copies into one slot"
        self.jobs[key] = Job(list(extents), ended, need is Need.NOW)

    def hurry(self, key: Hashable) -> None:
        if key in self.jobs:
            self.jobs[key].urgent = True

    def withdraw(self, key: Hashable) -> bool:
        if self.jobs[key].begun:
            return False
        del self.jobs[key]
        return True

    @property
    def backlog(self) -> int:
        return sum(not job.urgent for job in self.jobs.values())

    def finish(self, key: Hashable) -> None:
        """Write what is asked for into the arena, and say that it is there."""
        job = self.jobs.pop(key)
        assert self.one is not None
        region, model = self.one.region, self.one.model
        for extent in job.extents:
            if extent.shard == IN_ARENA:
                data = bytes(region.view(extent.source, extent.size))
                self.moves += 1
            else:
                with model.shards[extent.shard].path.open("rb") as file:
                    file.seek(extent.source)
                    data = file.read(extent.size)
                self.reads.append(extent)
            region.view(extent.target, extent.size)[:] = data
        job.ended(None)

    def finish_all(self) -> None:
        while self.jobs:
            self.finish(next(iter(self.jobs)))

    def fail(self, key: Hashable) -> None:
        """Leave rubbish where the record should be, and say that it cannot be read."""
        job = self.jobs.pop(key)
        assert self.one is not None
        first = job.extents[0]
        self.one.region.view(first.target, first.size)[:] = b"\xa5" * first.size
        job.ended(ModelFileError("cannot read 100 bytes"))
