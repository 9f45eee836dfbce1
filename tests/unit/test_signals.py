"""Signals become facts that a loop reads."""

from __future__ import annotations

import os
import select
import signal

import pytest

from sparkd.supervisor.signals import Signals


@pytest.mark.parametrize(("terminal", "stops", "reload"), [(False, ["SIGTERM", "SIGINT"], True), (True, None, False)])
def test_each_signal_wakes_the_loop_and_is_noted(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, stops: list[str] | None, reload: bool
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: terminal)
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert select.select([signals.socket], [], [], 10)[0]
            signals.clear()
            assert not select.select([signals.socket], [], [], 0)[0]
        assert signals.stops == (stops or ["SIGTERM", "SIGHUP", "SIGINT"]) and signals.reload is reload
    assert signal.getsignal(signal.SIGTERM) is before
    signals.close()
