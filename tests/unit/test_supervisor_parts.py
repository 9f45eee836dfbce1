"""The supervisor's small parts: run directory, page locks, systemd, status rounds, and the worker's thread count."""

from __future__ import annotations

import math
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from sparkd.errors import ConfigError, UnavailableError
from sparkd.ipc.sockets import RunDirectory
from sparkd.supervisor.processes import Process
from sparkd.supervisor.run_lock import RunLock
from sparkd.supervisor.status import PATIENCE_S, Rounds
from sparkd.worker.threads import count_threads, cpu_quota, physical_cores

NOBODY = 65534


def lock(path: Path) -> RunLock:
    run_dir = RunDirectory(path)
    return RunLock(run_dir, run_dir.client)


def test_a_run_directory_is_private_and_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with lock(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with pytest.raises(UnavailableError, match=f"process {os.getpid()}"):
            lock(path)
    with lock(path):
        pass
    assert list(path.iterdir()) == []


def test_what_a_dead_daemon_left_is_reclaimed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    (path / "lock").write_text("4194304 1\n4194305 2 worker\nnonsense\n")
    for name in ("client.sock", "control.sock", "store.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path / name))
    (path / "notes.txt").write_text("somebody's own file")
    with lock(path):
        assert {p.name for p in path.iterdir()} == {"lock", "notes.txt"}
        assert (path / "lock").read_text().split()[0] == str(os.getpid())


@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (0o777, False), (0o1777, False), (0o750, True)])
def test_a_folder_that_others_use_is_refused_and_stays_open_to_them(tmp_path: Path, mode: int, used: bool) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(mode)
    if used:
        (path / "notes.txt").write_text("somebody's own file")
    before = sorted(path.iterdir())
    with pytest.raises(ConfigError, match=f"--run-dir {path}/sparkd"):
        lock(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert sorted(path.iterdir()) == before


def test_an_empty_folder_of_ones_own_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    with lock(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_client_socket_of_another_daemon_is_left_alone(tmp_path: Path) -> None:
    client = tmp_path / "apps.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(client))
        live.listen()
        with pytest.raises(UnavailableError, match=r"apps\.sock: another daemon answers"):
            RunLock(RunDirectory(tmp_path / "run"), client)
        assert client.is_socket()
    with RunLock(RunDirectory(tmp_path / "run"), client):
        assert not client.exists()


def test_processes_of_a_dead_daemon_are_ended_and_strangers_with_their_numbers_are_not(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with subprocess.Popen(["sleep", "600"]) as orphan, subprocess.Popen(["sleep", "600"]) as stranger:
        left, other = Process.of(orphan.pid), Process.of(stranger.pid)
        assert left is not None and other is not None
        (path / "lock").write_text(
            f"4194304 1\n{left.pid} {left.started} worker\n{other.pid} {other.started - 1} store\n"
        )
        with lock(path) as held:
            assert orphan.wait(60) == -signal.SIGKILL
            assert stranger.poll() is None
            held.record([("worker", stranger.pid)])
            own = Process.of(os.getpid())
            assert own is not None
            noted = (path / "lock").read_text().splitlines()
            assert noted == [f"{own.pid} {own.started}", f"{other.pid} {other.started} worker"]
        stranger.kill()


def test_a_process_that_has_ended_is_not_alive_even_before_anybody_has_noticed() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Process.of(child.pid) is None
    assert Process(child.pid, 1).end()


def test_a_place_that_cannot_be_a_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run.*--run-dir"):
        lock(tmp_path / "file" / "run")


def test_a_group_may_pass_through_to_the_client_socket_and_no_further(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    with RunLock(run_dir, run_dir.client, group=os.getgid()):
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o710
        assert run_dir.path.stat().st_gid == os.getgid()


def test_one_round_of_questions_serves_all_who_ask_meanwhile() -> None:
    rounds = Rounds()
    assert rounds.ask((b"a", 1), ["store", "worker"], now=0.0) == 1
    assert rounds.ask((b"b", 2), ["store", "worker"], now=0.1) is None
    rounds.answered(1, "store")
    assert rounds.finished(0.1) == []
    rounds.answered(1, "worker")
    assert rounds.finished(0.2) == [(b"a", 1), (b"b", 2)]
    assert rounds.finished(0.3) == []


def test_a_child_that_is_known_to_be_silent_delays_the_status_no_longer() -> None:
    rounds = Rounds()
    assert rounds.due() == math.inf
    rounds.ask((b"a", 1), ["store", "worker"], now=0.0)
    rounds.answered(1, "store")
    rounds.lost("worker")
    assert rounds.finished(0.1) == [(b"a", 1)]


def test_a_child_that_does_not_answer_delays_the_status_only_so_long() -> None:
    rounds = Rounds()
    rounds.ask((b"a", 1), ["worker"], now=0.0)
    assert rounds.finished(PATIENCE_S * 0.9) == [] and rounds.due() == PATIENCE_S
    assert rounds.finished(PATIENCE_S * 1.1) == [(b"a", 1)]
    assert rounds.ask((b"a", 2), ["worker"], now=5.0) == 2
    rounds.answered(1, "worker")
    assert rounds.finished(5.1) == []


def machine(root: Path, siblings: list[str], cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """A tree with the parts of /proc and /sys that tell about processors."""
    made = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": text for n, text in enumerate(siblings)}
    for name, text in {**made, "proc/self/cgroup": cgroup, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_threads_are_physical_cores_within_affinity(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"])
    assert physical_cores(range(8), root) == 4
    assert physical_cores([0, 4, 1], root) == 2
    assert physical_cores([0, 1], tmp_path / "empty") == 2
    assert count_threads(7, root) == 7


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/", {}, None),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ("0::/", {"sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        (
            "0::/a/b",
            {"sys/fs/cgroup/a/b/cpu.max": "800000 100000", "sys/fs/cgroup/a/cpu.max": "150000 100000"},
            1.5,
        ),
        (
            "4:cpu,cpuacct:/x\n1:name=systemd:/y",
            {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        (
            "4:cpu,cpuacct:/x",
            {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_a_cgroup_bounds_the_processors(tmp_path: Path, cgroup: str, files: dict[str, str], quota: float) -> None:
    root = machine(tmp_path, ["0", "1"], cgroup, files)
    assert cpu_quota(root) == quota
    if quota is not None:
        cores = physical_cores(os.sched_getaffinity(0), root)
        assert count_threads(0, root) == min(cores, int(quota))
