"""Where sparkctl looks for the log of a daemon that systemd runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkctl import logs
from sparkctl.main import main
from sparkctl.process import DaemonProcess


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journalctl that writes down how it was called."""
    called = tmp_path / "called"
    program = tmp_path / "bin" / "journalctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {called}\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return called


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon whose standard error is the journal's stream."""
    daemon = DaemonProcess(os.getpid(), os.pidfd_open(os.getpid()))
    monkeypatch.setattr(DaemonProcess, "at", lambda socket: daemon)
    monkeypatch.setattr(DaemonProcess, "unit", "sparkd@big.service")
    monkeypatch.setattr(DaemonProcess, "log", "socket:[4711]")


def test_the_log_of_a_service_comes_from_its_journal(
    service: None, journalctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaemonProcess, "user_unit", False)
    assert main(["logs", "-n", "7"]) == 3
    assert journalctl.read_text() == "--unit sparkd@big.service --lines 7 --output cat --no-pager\n"


def test_the_log_of_a_users_own_service_is_followed_in_their_journal(
    service: None, journalctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaemonProcess, "user_unit", True)
    assert main(["logs", "--follow"]) == 3
    assert journalctl.read_text() == "--user --unit sparkd@big.service --lines 50 --output cat --follow\n"


def test_the_journal_of_the_service_is_shown_when_no_daemon_runs(
    tmp_path: Path, journalctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_journal_has", lambda unit: unit == "sparkd.service")
    assert main(["logs", "--socket", str(tmp_path / "none.sock")]) == 3
    assert journalctl.read_text().startswith("--unit sparkd.service ")


def test_a_service_is_recognised_by_its_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = DaemonProcess(7, -1)
    groups = {
        "0::/system.slice/sparkd.service": ("sparkd.service", False),
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/sparkd.service": ("sparkd.service", True),
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/terminal.service": ("", True),
        "0::/": ("", False),
    }
    for group, expected in groups.items():
        monkeypatch.setattr(Path, "read_text", lambda self, group=group: f"1:name=systemd:/\n{group}\n")
        assert (daemon.unit, daemon.user_unit) == expected
