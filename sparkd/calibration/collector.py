"""The calibrator at work: takes routed ids from the ring, counts them, keeps the counts, and says what it counted."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np

from sparkd.calibration import profile
from sparkd.calibration.counts import RoutingCounts, RoutingError, busiest_share
from sparkd.ipc.child import Child, ChildArguments
from sparkd.ipc.internal import Ready, StatusAnswer, StatusQuery
from sparkd.ipc.memory import Region
from sparkd.ipc.messages import Json
from sparkd.ipc.routing import Routed, RoutingRing, TornError

#: Seconds between two looks at the ring, which holds far more than what comes meanwhile.
_POLL_S = 0.25
#: Steps that are taken before the supervisor is listened to again.
_BURST = 256
#: Seconds between two savings of the profile: what a crash can cost.
_SAVE_S = 60.0
_log = logging.getLogger(__name__)


class Collector:
    """Counts of one model, kept in memory and in its profile: ids and counts, never tokens."""

    def __init__(self, child: Child, given: ChildArguments) -> None:
        """Map the ring and load the profile of its model."""
        self._child = child
        self._region = Region.map(given.routing_fd)
        self._ring = RoutingRing(self._region)
        self._folder = profile.state_folder()
        self._note = ""
        self._counts = self._load()
        self._steps = 0
        self._refused = 0
        self._saved_steps = 0
        self._save_at = time.monotonic() + _SAVE_S

    def run(self) -> None:
        """Collect until told to stop."""
        self._child.send(Ready(self._child.role))
        behind = False
        while self._child.running:
            queries = self._child.wait(0.0 if behind else _POLL_S)
            behind = self._collect()
            for query in queries:
                if isinstance(query, StatusQuery):
                    self._child.send(StatusAnswer(query.job, self._child.role, self.status()))
            if time.monotonic() >= self._save_at:
                self._save()
        while self._collect():
            pass

    def close(self) -> None:
        """Keep what was counted, give up the ring."""
        self._save()
        self._region.close()

    def status(self) -> dict[str, Json]:
        """Counts per [expert layer][expert], and the share of work of the busiest quarter of each layer's experts."""
        counts = self._counts
        status: dict[str, Json] = {
            "steps": self._steps,
            "refused": self._refused,
            "dropped_steps": self._ring.dropped,
            "profile": {"path": self._where(), "note": self._note},
        }
        kinds = (("decode", counts.decode, counts.decode_rows), ("prefill", counts.prefill, counts.prefill_rows))
        for kind, table, rows in kinds:
            status[kind] = {"rows": rows, "counts": table.tolist(), "busiest_quarter": busiest_share(table)}
        return status

    def _collect(self) -> bool:
        """Count what is there; true when there may be more."""
        for _ in range(_BURST):
            try:
                routed = self._ring.peek()
                if routed is None:
                    return False
                self._count(routed)
                self._ring.advance(routed)
            except TornError as error:
                self._refused += 1
                _log.error("dropped what was in the ring: %s", error)
        return True

    def _count(self, routed: Routed) -> None:
        ids = np.frombuffer(routed.ids, "<i2").reshape(self._ring.layers, routed.rows, routed.top_k)
        try:
            self._counts.add(ids, np.frombuffer(routed.decode, np.uint8) != 0)
            self._steps += 1
        except RoutingError as error:
            self._refused += 1
            _log.warning("dropped a step of a worker: %s", error)

    def _load(self) -> RoutingCounts:
        ring = self._ring
        if self._folder is None:
            self._note = "there is no folder for state: set STATE_DIRECTORY or XDG_STATE_HOME"
            return RoutingCounts(ring.layers, ring.experts)
        try:
            counts, self._note = profile.load(self._folder, ring.fingerprint, ring.layers, ring.experts)
        except OSError as error:
            self._note = f"{self._where()}: cannot be read: {error.strerror}"
            counts = RoutingCounts(ring.layers, ring.experts)
        if self._note:
            _log.warning("%s", self._note)
        return counts

    def _save(self) -> None:
        self._save_at = time.monotonic() + _SAVE_S
        if self._folder is None or self._steps == self._saved_steps:
            return
        try:
            profile.save(self._folder, self._ring.fingerprint, self._counts)
            self._saved_steps = self._steps
        except OSError as error:
            note = f"{self._where()}: cannot be saved: {error.strerror}"
            if note != self._note:
                _log.warning("%s", note)
            self._note = note

    def _where(self) -> str:
        folder: Path | None = self._folder
        return "" if folder is None else str(profile.profile_path(folder, self._ring.fingerprint))
