"""What the processes of a daemon hold, to be compared before and after a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_client import Client


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process: who it is, open descriptors, threads, and bytes of memory that no other process shares."""

    pid: int
    descriptors: int
    threads: int
    own_bytes: int


def footprint(client: Client) -> dict[str, Held]:
    """Of every process, by role."""
    return {process["role"]: _held(process["pid"]) for process in client.status()["processes"]}


def growth(before: dict[str, Held], after: dict[str, Held]) -> dict[str, int]:
    """Bytes by which each process grew."""
    return {role: after[role].own_bytes - held.own_bytes for role, held in before.items()}


def same_handles(before: dict[str, Held], after: dict[str, Held]) -> bool:
    """Whether the same processes have as many descriptors and threads as before."""
    return _handles(before) == _handles(after)


def is_idle(status: dict[str, Any]) -> bool:
    """Whether nothing is left of any request or app, but for the app that asks."""
    requests = status["requests"]
    left = (requests["running"], requests["queued"], status["memory"]["state_used_bytes"])
    return status["state"] == "ready" and requests["clients"] == 1 and left == (0, 0, 0)


def _handles(held: dict[str, Held]) -> dict[str, tuple[int, int, int]]:
    return {role: (one.pid, one.descriptors, one.threads) for role, one in held.items()}


def _held(pid: int) -> Held:
    said = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Held(pid, descriptors, int(said["Threads"]), int(said["RssAnon"].split()[0]) << 10)
