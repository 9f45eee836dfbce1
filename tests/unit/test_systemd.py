"""The unit files: nothing in them is unknown to systemd, and the service is as locked up as its comment says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sparkd.supervisor.children import STOP_S
from sparkd.supervisor.supervisor import DRAIN_S

UNITS = Path(__file__).parent.parent.parent / "systemd"
#: The comment in sparkd.service says the same.
THRESHOLD = 1.0


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed here")
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def installed(unit: str, tmp_path: Path) -> str:
    """A unit whose program exists on this machine, as it does where sparkd is installed."""
    text, count = re.subn(r"(?m)^ExecStart=\S+", "ExecStart=/bin/sh", (UNITS / unit).read_text())
    assert count == 1
    (tmp_path / unit).write_text(text)
    return str(tmp_path / unit)


@pytest.mark.parametrize(
    ("unit", "options"), [("sparkd.service", []), ("sparkd-user.service", ["--user"]), ("sparkd-gateway.service", [])]
)
def test_systemd_finds_nothing_to_say_about_the_units(unit: str, options: list[str], tmp_path: Path) -> None:
    path = installed(unit, tmp_path)
    done = run("systemd-analyze", "verify", *options, path, XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_wrong_unit_would_be_found(tmp_path: Path) -> None:
    path = Path(installed("sparkd.service", tmp_path))
    path.write_text(path.read_text().replace("FileDescriptorStoreMax", "FileDescriptorStorMax"))
    assert "FileDescriptorStorMax" in run("systemd-analyze", "verify", str(path)).stderr


def test_the_service_is_exposed_no_more_than_its_comment_says(tmp_path: Path) -> None:
    path = installed("sparkd.service", tmp_path)
    assert f"at most {THRESHOLD}" in Path(path).read_text()
    limit = f"--threshold={THRESHOLD * 10:.0f}"
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", limit, path)
    assert done.returncode == 0, done.stdout[-500:]


def test_the_manager_waits_longer_than_the_daemon_takes_to_end() -> None:
    for unit in ("sparkd.service", "sparkd-user.service"):
        found = re.search(r"(?m)^TimeoutStopSec=(\d+)$", (UNITS / unit).read_text())
        assert found is not None and int(found[1]) > DRAIN_S + 2 * STOP_S


def test_the_user_and_the_folders_can_be_made(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root makes users and gives folders to them")
    (tmp_path / "etc").mkdir()
    done = run("systemd-sysusers", f"--root={tmp_path}", str(UNITS / "sparkd.sysusers"))
    assert done.returncode == 0, done.stderr
    assert "sparkd:" in (tmp_path / "etc" / "passwd").read_text()
    done = run("systemd-tmpfiles", "--create", f"--root={tmp_path}", str(UNITS / "sparkd.tmpfiles"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "var/lib/sparkd/models").is_dir() and (tmp_path / "etc/sparkd").is_dir()
