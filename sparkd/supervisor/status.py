"""Puts the status document together (docs/status.md) from what the supervisor knows and its children tell.

One round of questions serves everybody who asks meanwhile. It ends when all children have answered or after
`PATIENCE_S`: a child that is busy or dead is shown as it was last.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from sparkd import __version__
from sparkd.config import Settings
from sparkd.ipc.messages import Json
from sparkd.store.planned import Plan
from sparkd.supervisor.children import Children
from sparkd.supervisor.front_door import FrontDoor
from sparkd.supervisor.holding import Holding
from sparkd.supervisor.processes import rss_bytes

#: Seconds a child has to answer.
PATIENCE_S = 0.5


@dataclass(slots=True)
class Round:
    """Who has asked, whose answers are missing, until when they are waited for."""

    job: int
    waiting: set[str]
    until: float
    askers: list[tuple[bytes, int]] = field(default_factory=list)


class Rounds:
    """At most one round of questions at a time."""

    def __init__(self) -> None:
        self._last = 0
        self._round: Round | None = None

    def ask(self, asker: tuple[bytes, int], roles: Collection[str], now: float) -> int | None:
        """Note an asker; returns the job to question `roles` with if a round begins."""
        if self._round is not None:
            self._round.askers.append(asker)
            return None
        self._last += 1
        self._round = Round(self._last, set(roles), now + PATIENCE_S, [asker])
        return self._last

    def answered(self, job: int, role: str) -> None:
        """A child has answered."""
        if self._round is not None and self._round.job == job:
            self._round.waiting.discard(role)

    def lost(self, role: str) -> None:
        """A child will not answer."""
        if self._round is not None:
            self._round.waiting.discard(role)

    def due(self) -> float:
        """When the round is over at the latest; infinity: there is none."""
        return math.inf if self._round is None else self._round.until

    def finished(self, now: float) -> list[tuple[bytes, int]]:
        """The askers whose round is over."""
        if self._round is None or (self._round.waiting and now < self._round.until):
            return []
        askers, self._round = self._round.askers, None
        return askers


def document(
    state: str,
    reason: str,
    started: float,
    now: float,
    settings: Settings,
    plan: Plan,
    door: FrontDoor,
    children: Children,
    gateway: dict[str, Json] | None,
    holding: Holding,
    loading: tuple[int, int],
    reload: dict[str, Json],
) -> dict[str, Json]:
    """The document; `loading` are bytes done and total, as the store told them last."""
    store = children["store"].status
    worker = children["worker"].status
    calibrator = children.by_role["calibrator"].status if "calibrator" in children.by_role else {}
    return {
        "version": __version__,
        "pid": os.getpid(),
        "started": round(time.time() - (now - started)),
        "uptime_s": now - started,
        "state": state,
        "reason": reason,
        "model": {
            "name": plan.model,
            "architecture": plan.architecture,
            "path": plan.path,
            "fingerprint": plan.fingerprint,
            "context": plan.context,
            "model_context": plan.model_context,
            "vocab": plan.vocab,
        },
        "memory": {
            "arena_bytes": plan.arena_bytes,
            "core_bytes": plan.core_bytes,
            "records_bytes": plan.records_bytes,
            "locked_bytes": holding.lock.locked,
            "lock_note": holding.lock.note,
            "huge_bytes": holding.pages.bytes,
            "huge_kind": holding.pages.kind,
            "huge_note": holding.pages.note,
            "state_bytes": worker.get("state_bytes", plan.state_bytes),
            "state_used_bytes": worker.get("state_used_bytes", 0),
            "need_bytes": plan.need_bytes,
            "limit": plan.limit,
            "limit_bytes": plan.limit_bytes,
        },
        "processes": [_own_process(state), *_processes(children, now), *([] if gateway is None else [gateway])],
        "loading": {
            "done_bytes": loading[0],
            "total_bytes": loading[1],
            "read_bytes": store.get("bytes_read", 0),
            "reading": store.get("reading", []),
        },
        "residency": _residency(plan, store),
        "device": worker.get("device", {}),
        "requests": {
            "running": door.running,
            "queued": door.queued,
            "clients": door.clients,
            "accepted": door.totals.accepted,
            "finished": door.totals.finished,
            "refused": door.totals.refused,
            "failed": door.totals.failed,
            "cancelled": door.totals.cancelled,
            "output_tokens": door.totals.output_tokens,
        },
        **door.overview(now),
        "speed": worker.get("speed", {}),
        "chat": worker.get("chat", {}),
        "executor": worker.get("executor", {}),
        "calibration": calibrator,
        "settings": settings.to_dict(),
        "reload": reload,
        "notes": plan.notes,
    }


def _own_process(state: str) -> dict[str, Json]:
    rss = rss_bytes(os.getpid())
    return {
        "role": "supervisor",
        "pid": os.getpid(),
        "state": state,
        "rss_bytes": rss,
        "restarts": 0,
        "heartbeat_s": None,
        "reason": "",
    }


def _processes(children: Children, now: float) -> list[dict[str, Json]]:
    return [
        {
            "role": child.role,
            "pid": child.pid,
            "state": child.condition.value,
            "rss_bytes": 0 if child.pid is None else rss_bytes(child.pid),
            "restarts": max(0, child.restarts),
            "heartbeat_s": None if child.pulse is None else now - child.pulse.heard,
            "reason": child.reason,
        }
        for child in children.all()
    ]


def _residency(plan: Plan, store: dict[str, Json]) -> dict[str, Json]:
    parts = ("resident", "layers", "slabs", "uses", "read_bytes", "moved_bytes", "placement")
    none: dict[str, Json] = {"resident": 0, "layers": [], "slabs": []}
    told = {part: store[part] for part in parts} if store else none
    return {"records": plan.records, "slots": plan.slots, "partial": plan.partial, **told}
