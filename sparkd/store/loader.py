"""Fills the arena from the model's files: core first, then records in the order of the files.

A record is published as soon as its three pieces are complete and the file is still the same; what an earlier store
already published is not read again. Where not every record has a slot, as many are loaded as there are slots for, and
the copier goes on: what workers miss is read from the files that it has open.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator

from sparkd.errors import SparkError
from sparkd.residency.slots import Record
from sparkd.store.copier import Copier, Need
from sparkd.store.layout import Extent, core_extent
from sparkd.store.residents import Residents

#: Bytes of a core tensor that one reader takes at a time, so that all share a big one and a stop is noticed soon.
_PIECE = 8 << 20
_log = logging.getLogger(__name__)


class LoadCancelled(Exception):
    """`cancel` was called before everything was loaded."""


class Loader:
    """One filling of an arena: `done` of `total` bytes are in place."""

    def __init__(self, residents: Residents, copier: Copier) -> None:
        self._residents = residents
        self._copier = copier
        self._arena = arena = residents.arena
        self._core = [core_extent(arena.layout, arena.model, name) for name in arena.layout.core]
        core = sum(extent.size for extent in self._core)
        #: Bytes that are in place already, and bytes that have to be read.
        there = sum(residents.size(Record(layer, 0)) * n for layer, n in enumerate(residents.residents()))
        missing = sum(residents.size(record) for record in residents.absentees())
        self._there = there + (core if arena.core_loaded else 0)
        self._missing = missing + (0 if arena.core_loaded else core)
        self._loaded = False
        self._cancelled = threading.Event()
        self._changed = threading.Condition()
        self._core_pieces = 0
        self._core_error: SparkError | None = None

    @property
    def done(self) -> int:
        """Bytes in place."""
        return self.total if self._loaded else self._there + min(self._copier.read, self._missing)

    @property
    def total(self) -> int:
        """Bytes to be in place at the end."""
        return self._there + self._missing

    @property
    def missing(self) -> int:
        """Bytes that had to be read for that."""
        return self._missing

    def load(self) -> None:
        """Read everything that is not resident yet; returns when it is. The copier is closed if it was all there is.

        ModelFileError: a file is not the one that was opened first (names both identities), cannot be read, or ends
        early. BudgetError: memory ran out. LoadCancelled after `cancel`.
        """
        copier = self._copier
        kept_open = False
        try:
            copier.open()
            if not self._arena.core_loaded:
                self._load_core()
                self._arena.publish_core()
            self._residents.fill()
            self._residents.settle(self._stopped)
            self._check(self._residents.failure)
            if self._arena.layout.partial:
                copier.arena_filled()
                kept_open = True
            self._loaded = True
        finally:
            for note in copier.notes():
                _log.warning("%s", note)
            if not kept_open:
                copier.close()

    def cancel(self) -> None:
        """Make `load` stop soon; for another thread."""
        self._cancelled.set()
        with self._changed:
            self._changed.notify_all()
        self._residents.notify()

    def _load_core(self) -> None:
        pieces = list(_pieces(self._core))
        self._core_pieces = len(pieces)
        for number, piece in enumerate(pieces):
            self._copier.begin(("core", number), [piece], self._core_ended, Need.NOW)
        with self._changed:
            while self._core_pieces and self._core_error is None and not self._stopped():
                self._changed.wait(1.0)
        self._check(self._core_error)

    def _core_ended(self, error: SparkError | None) -> None:
        with self._changed:
            self._core_pieces -= 1
            self._core_error = self._core_error or error
            if not self._core_pieces or error is not None:
                self._changed.notify_all()

    def _stopped(self) -> bool:
        return self._cancelled.is_set() or self._copier.failure is not None

    def _check(self, error: SparkError | None) -> None:
        if self._copier.failure is not None:
            raise self._copier.failure
        if error is not None:
            raise error
        if self._cancelled.is_set():
            raise LoadCancelled


def _pieces(extents: Iterable[Extent]) -> Iterator[Extent]:
    for extent in extents:
        for start in range(0, extent.size, _PIECE):
            size = min(_PIECE, extent.size - start)
            yield Extent(extent.shard, extent.source + start, extent.target + start, size)
