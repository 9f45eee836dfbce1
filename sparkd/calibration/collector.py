"""The calibrator at work: takes routed ids from the ring, counts and keeps them, and advises tiers that lack room.

What it decides is elsewhere and pure: `counts`, `adviser`, `worth`. Placements go to the tier through the supervisor.
"""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparkd.calibration import profile
from sparkd.calibration.adviser import Adviser, Tier
from sparkd.calibration.counts import RoutingCounts, RoutingError, busiest_share
from sparkd.calibration.recorder import Recorder
from sparkd.calibration.worth import describe
from sparkd.ipc import internal
from sparkd.ipc.child import Child, ChildArguments
from sparkd.ipc.internal import Ready, StatusAnswer, StatusQuery
from sparkd.ipc.memory import Region
from sparkd.ipc.messages import Json, Message
from sparkd.ipc.routing import Routed, RoutingRing, TornError
from sparkd.residency.placement import Placement
from sparkd.residency.slabs import LayerSize

#: Seconds between two looks at the ring, which holds far more than what comes meanwhile.
_POLL_S = 0.25
#: Steps that are taken before the supervisor is listened to again, and at a time.
_BURST = 256
_TOGETHER = 32
#: Rows of a step that is counted together with others: no chunk of a prompt.
_FEW_ROWS = 16
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
        self._tags = [""]
        self._recorder = Recorder()
        self._adviser: Adviser | None = None
        self._model = ""
        #: Of the last placement, by this calibrator or one before.
        self._version = 0
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
                self._answer(query)
            if time.monotonic() >= self._save_at:
                self._save()
        while self._collect():
            pass

    def close(self) -> None:
        """Keep what was counted, give up the ring."""
        self._save()
        self._region.close()

    def status(self) -> dict[str, Json]:
        """Counts per [expert layer][expert], what they are worth, and what the tier was told."""
        counts = self._counts
        status: dict[str, Json] = {
            "steps": self._steps,
            "refused": self._refused,
            "dropped_steps": self._ring.dropped,
            "profile": {"path": self._where(), "note": self._note, "saved": self._saved_at()},
            "worth": describe(self._counts),
            "tier": self._tier(),
        }
        kinds = (("decode", counts.decode, counts.decode_rows), ("prefill", counts.prefill, counts.prefill_rows))
        for kind, table, rows in kinds:
            status[kind] = {"rows": rows, "counts": table.tolist(), "busiest_quarter": busiest_share(table)}
        return status

    def _answer(self, msg: Message) -> None:
        match msg:
            case StatusQuery():
                self._child.send(StatusAnswer(msg.job, self._child.role, self.status()))
            case internal.TraceQuery():
                self._child.send(self._trace(msg))
            case internal.Placement():
                self._version = msg.version
            case internal.Tier():
                self._advise_on(msg)

    def _trace(self, msg: internal.TraceQuery) -> internal.TraceAnswer:
        told = self._recorder.since(msg.after, time.monotonic())
        ring = self._ring
        return internal.TraceAnswer(msg.job, told.last, told.missed, ring.layers, ring.experts, ring.tags, told.data)

    def _advise_on(self, told: internal.Tier) -> None:
        """Advise this tier from now on; the profile is what it is filled by."""
        layers = tuple(map(LayerSize, told.slabs, told.experts))
        tier = Tier(told.tier, layers, tuple(told.record_bytes), tuple(told.slots), tuple(told.spare))
        self._model = told.model
        self._adviser = Adviser(tier, self._version)
        self._publish(self._adviser.warm(self._counts.blended()))

    def _publish(self, placement: Placement | None) -> None:
        if placement is None or self._adviser is None:
            return
        hot = [list(experts) for experts in placement.hot]
        tier = self._adviser.tier.name
        self._child.send(
            internal.Placement(placement.version, self._model, tier, hot, placement.ring, placement.half_life)
        )
        self._version = placement.version
        _log.info("placement %d for the %s: %s", placement.version, tier, self._adviser.rule.name)

    def _collect(self) -> bool:
        """Count what is there; true when there may be more."""
        for _ in range(_BURST // _TOGETHER):
            try:
                steps = self._ring.waiting(_TOGETHER)
            except TornError as error:
                self._refused += 1
                _log.error("dropped what was in the ring: %s", error)
                continue
            if not steps:
                return False
            for (_, few), alike in itertools.groupby(steps, lambda step: (step.top_k, step.rows <= _FEW_ROWS)):
                for part in [list(alike)] if few else ([step] for step in alike):
                    self._count(part)
            self._ring.advance(*steps)
        return True

    def _count(self, steps: list[Routed]) -> None:
        """Count steps whose rows choose the same number of experts: together, which costs little more than one."""
        layers = self._ring.layers
        ids = [np.frombuffer(step.ids, "<i2").reshape(layers, step.rows, step.top_k) for step in steps]
        kinds = np.frombuffer(b"".join(step.kinds for step in steps), np.uint8)
        decode = (kinds & 1) != 0
        try:
            numbers = self._counts.add(np.concatenate(ids, axis=1), decode, self._tags_of(kinds))
        except RoutingError as error:
            if len(steps) > 1:
                for step in steps:
                    self._count([step])
                return
            self._refused += 1
            _log.warning("dropped a step of a worker: %s", error)
            return
        self._steps += len(steps)
        ends = np.cumsum([step.rows for step in steps])
        first = 0
        for step, last in zip(steps, np.cumsum(decode)[ends - 1].tolist(), strict=True):
            self._recorder.take(step, time.monotonic())
            self._advise(numbers[first:last])
            first = last

    def _advise(self, numbers: NDArray[np.int64]) -> None:
        """A step's decode rows used these records."""
        adviser = self._adviser
        if adviser is not None and len(numbers):
            adviser.step(numbers)
            if adviser.due:
                self._publish(adviser.advise(self._counts.blended()))

    def _tags_of(self, kinds: NDArray[np.uint8]) -> list[str] | None:
        """The tag of each row; None: none has one."""
        numbers = kinds >> 1
        return [self._tag(number) for number in numbers.tolist()] if numbers.any() else None

    def _tag(self, number: int) -> str:
        if number >= len(self._tags):
            self._tags = self._ring.tags
        return self._tags[number] if number < len(self._tags) else ""

    def _tier(self) -> dict[str, Json]:
        adviser = self._adviser
        if adviser is None:
            return {}
        tier, rates = adviser.tier, adviser.tuner.rates()
        return {
            "name": tier.name,
            "slots": sum(tier.slots),
            "records": tier.records,
            "placement": adviser.version,
            "rule": adviser.rule.name,
            "hit_rates": {rule.name: rate for rule, rate in rates.items()},
        }

    def _saved_at(self) -> float | None:
        try:
            return Path(self._where()).stat().st_mtime
        except OSError:
            return None

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
