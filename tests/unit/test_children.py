"""The supervisor's children on a clock of the tests' own: when they are missed, when they begin again."""

from __future__ import annotations

from pathlib import Path
from subprocess import Popen
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.ipc.child import HEARTBEAT_S
from sparkd.ipc.internal import Heartbeat
from sparkd.ipc.sockets import RunDirectory
from sparkd.supervisor.children import ChildProcess, Children, Condition
from sparkd.supervisor.pulse import Pulse
from sparkd.supervisor.supervisor import _TICK_S


class Ended:
    """A process that has just been killed."""

    pid = 1

    def wait(self) -> int:
        return -9


def children() -> tuple[Children, ChildProcess]:
    """All of a daemon, of which the worker serves (no process exists)."""
    made = Children(RunDirectory(Path("/nowhere")), "", "", {"arena": -1, "routing": -1}, lambda processes: None)
    worker = made["worker"]
    worker.process, worker.condition, worker.pulse = cast("Popen[bytes]", Ended()), Condition.READY, Pulse.since(0.0)
    return made, worker


@given(
    stops=st.floats(0.0, 20.0),
    phase=st.floats(0.0, HEARTBEAT_S),
    wakes=st.lists(st.floats(0.0, 25.0), max_size=40),
)
def test_a_child_that_stops_at_whatever_moment_is_known_to_be_silent_within_two_seconds(
    stops: float, phase: float, wakes: list[float]
) -> None:
    made, worker = children()
    beats = [phase + n * HEARTBEAT_S for n in range(50) if phase + n * HEARTBEAT_S <= stops]
    arrivals = sorted([*beats, *wakes])  # whatever else comes in lets the supervisor look, too
    now = 0.0
    while worker.condition is Condition.READY:
        coming = next((at for at in arrivals if at > now), now + _TICK_S)
        now = min(now + _TICK_S, max(now, made.due()), coming)
        if now in beats:
            made.heartbeat(worker, Heartbeat("worker", 1, False), now)
        silent = list(made.listen(now))
    assert silent == [worker] and "no life" in worker.reason
    assert stops < now <= stops + 1.5


def test_the_first_restart_is_made_at_once_and_those_that_follow_wait_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.close", lambda fd: None)
    made, worker = children()
    waited = []
    for crash in range(5):
        now = 10.0 + crash
        worker.process, worker.restart_at = cast("Any", Ended()), None
        made.reap(worker, now)
        assert worker.restart_at is not None and made.due() == worker.restart_at
        waited.append(round(worker.restart_at - now, 3))
    assert waited == [0.0, 0.1, 0.2, 0.4, 0.8]
    worker.process, worker.restart_at = cast("Any", Ended()), None
    made.reap(worker, 16.0)
    assert worker.condition is Condition.FAILED and worker.restart_at is None
    assert "6 times within 6 s" in worker.reason
