"""sparkctl doctor: every check says what is wrong on a machine that has it, and what to do."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkctl import findings
from sparkctl.findings import Finding, Level
from sparkctl.main import main

ROOT = Path(__file__).parent.parent.parent
DEMO_MODEL = ROOT / "sparkd" / "demo" / "spark-demo-laguna.gguf"
GIB = 1 << 30
Start = Callable[..., Any]


def machine(root: Path, **files: str) -> Path:
    """A tree with the kernel's files of a machine; __ stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_small_limit_on_locked_memory_is_a_warning_with_both_numbers() -> None:
    found = findings.memlock(64 << 10, 20 * GIB)
    assert (found.level, found.what) == (
        Level.WARN,
        "64.0 KiB may be locked, the weights take 20.0 GiB: the rest may be swapped out",
    )
    assert "LimitMEMLOCK=infinity" in found.fix
    assert findings.memlock(-1, 20 * GIB).level is findings.memlock(21 * GIB, 20 * GIB).level is Level.OK
    assert findings.memlock(64 << 10, 0).level is Level.WARN


def test_what_a_daemon_could_not_lock_is_a_warning_in_its_own_words() -> None:
    found = findings.locked(GIB, 2 * GIB, "the limit on locked memory is 1073741824 bytes")
    assert (found.level, found.what) == (
        Level.WARN,
        "1.0 GiB of 2.0 GiB of weights are locked: the limit on locked memory is 1073741824 bytes",
    )
    assert findings.locked(GIB, GIB, "") == Finding(
        "locked memory", Level.OK, "1.0 GiB of 1.0 GiB of weights are locked"
    )


SWAPS = "Filename\tType\tSize\tUsed\tPriority\n/dev/sda2 partition 2097152 0 -2\n/swapfile file 1048576 0 -3\n"


def test_swap_matters_only_when_the_weights_are_not_locked(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__swaps=SWAPS)
    assert findings.swap(True, root) == Finding(
        "swap", Level.OK, "3.0 GiB; the weights are locked, it does not concern them"
    )
    found = findings.swap(False, root)
    assert found.level is Level.WARN and found.what.startswith("3.0 GiB") and "swapoff" in found.fix
    assert findings.swap(False, tmp_path / "none") == Finding("swap", Level.OK, "none")


def test_huge_pages_come_from_the_pool_or_a_kernel_that_joins_pages(tmp_path: Path) -> None:
    root = machine(tmp_path)
    pool = root / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    old = findings.huge_pages(True, GIB, root, "5.15.0-91-generic")
    assert old.level is Level.WARN and old.fix == "sysctl vm.nr_hugepages=512, or Linux 6.1"
    assert findings.huge_pages(True, GIB, root, "6.1.0-18-amd64").level is Level.OK
    assert findings.huge_pages(False, GIB, root, "5.15.0").what == 'memory.huge_pages is "off"'
    pool.parent.mkdir(parents=True)
    pool.write_text("512\n")
    assert findings.huge_pages(True, GIB, root, "5.15.0").what == "the system's pool has 1.0 GiB free"


@pytest.mark.parametrize(("online", "nodes"), [("0\n", 1), ("0-1\n", 2), ("0,2-3\n", 3), ("", 1)])
def test_more_than_one_memory_node_is_a_warning(tmp_path: Path, online: str, nodes: int) -> None:
    found = findings.numa(machine(tmp_path, sys__devices__system__node__online=online))
    assert (found.level is Level.OK) == (nodes == 1)
    assert nodes == 1 or (found.what.startswith(f"{nodes} nodes") and "numactl" in found.fix)


@pytest.mark.parametrize(
    ("isa", "best", "level"),
    [
        ("auto", "x86-64-v3", Level.OK),
        ("auto", "x86-64-v3-vnni", Level.OK),
        ("x86-64-v4", "x86-64-v4", Level.OK),
        ("x86-64", "x86-64-v3", Level.WARN),
        ("auto", "x86-64", Level.WARN),
        ("auto", "portable", Level.WARN),
    ],
)
def test_a_slow_instruction_set_is_a_warning(isa: str, best: str, level: Level) -> None:
    found = findings.processor(isa, best, 8)
    assert found.level is level and f"{best}, 8 processors" in found.what and bool(found.fix) == (level is Level.WARN)


def mounts(model: Path, kind: str) -> str:
    point = str(model.parent).replace(" ", r"\040")
    return f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / {point} rw shared:1 - {kind} server:/x rw\n"


@pytest.mark.parametrize(
    ("kind", "level"),
    [("ext4", Level.OK), ("xfs", Level.OK), ("nfs4", Level.WARN), ("fuse.sshfs", Level.WARN), ("tmpfs", Level.WARN)],
)
def test_the_file_system_of_the_model_is_named(tmp_path: Path, kind: str, level: Level) -> None:
    model = tmp_path / "my models" / "a.gguf"
    model.parent.mkdir()
    model.write_bytes(b"x" * 4096)
    root = machine(tmp_path / "root", proc__self__mountinfo=mounts(model, kind))
    found = findings.model_disk(model, root)
    assert found.level is level and found.what.startswith(f"{kind} at {model}")
    assert findings.file_system(Path("/elsewhere"), root) == "ext4"
    assert findings.file_system(model, tmp_path / "none") == "unknown"


def test_room_for_profiles_is_looked_at_where_they_will_be(tmp_path: Path) -> None:
    found = findings.state_disk(tmp_path / "not" / "yet")
    assert found.level is Level.OK and found.what.endswith(f"are free at {tmp_path / 'not' / 'yet'}")
    assert findings.state_disk(None).level is Level.WARN


def test_a_run_directory_too_long_for_its_sockets_fails(tmp_path: Path) -> None:
    room = 107 - len("/calibrator.sock")
    fits = Path("/" + "x" * (room - 1))
    assert findings.socket_path(tmp_path / "run" / "client.sock").level is Level.OK
    found = findings.socket_path(fits / "longer" / "client.sock")
    assert found.level is Level.FAIL and "a socket may have 107" in found.what and "SPARKD_RUN_DIR" in found.fix


def test_few_descriptors_are_a_warning() -> None:
    assert findings.descriptors(256, None).level is Level.WARN
    assert findings.descriptors(1024, 40) == Finding("descriptors", Level.OK, "1024 files may be open, 40 are")
    assert findings.descriptors(-1, None).level is Level.OK


# ---- the command ----


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SPARKD_", "XDG_", "RUNTIME_", "STATE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json", "--config", os.devnull, *arguments])
    return code, {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}


CHECKS = {
    "daemon", "settings", "model", "model's disk", "memory", "cgroup", "locked memory", "swap", "huge pages", "NUMA",
    "processor", "profiles", "sockets", "descriptors",
}  # fmt: skip


def test_every_check_is_made_and_every_problem_has_a_fix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = examined(capsys, str(DEMO_MODEL), "--socket", str(tmp_path / "client.sock"))
    assert found.keys() == CHECKS
    assert found["model"]["what"].startswith(f"{DEMO_MODEL}: laguna, ")
    assert found["memory"]["what"].startswith("fits: needs ")
    assert all(finding["level"] == "ok" or finding["fix"] for finding in found.values())
    assert code == 0, found


def test_the_daemon_that_runs_is_examined(
    fake_daemon: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkctl.process._command", lambda pid: ["sparkd", "serve"])
    memory = {"arena_bytes": GIB, "need_bytes": 2 * GIB, "limit_bytes": 4 * GIB, "limit": "memory.host_gib"}
    memory |= {"locked_bytes": GIB, "lock_note": ""}
    status = {"state": "degraded", "reason": "the worker was killed", "memory": memory}
    daemon = fake_daemon(status=status | {"model": {"path": str(DEMO_MODEL)}})
    code, found = examined(capsys, "--socket", str(daemon.path))
    assert code == 1
    assert found["daemon"] == {
        "check": "daemon", "level": "fail", "fix": "sparkctl logs",
        "what": f"process {os.getpid()}: degraded: the worker was killed",
    }  # fmt: skip
    assert found["memory"]["what"] == "served; it needs 2.0 GiB of 4.0 GiB (memory.host_gib)"
    assert found["model"]["what"].startswith(str(DEMO_MODEL))
    tier = {"partial": True, "slots": 6, "records": 8}
    scarce = fake_daemon(status=status | {"model": {"path": str(DEMO_MODEL)}, "residency": tier})
    _, with_less = examined(capsys, "--socket", str(scarce.path))
    assert with_less["memory"]["level"] == "warn"
    assert with_less["memory"]["what"].endswith("room for 6 of 8 experts, the others are read from disk when used")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found["descriptors"]["what"].startswith(f"{soft} files may be open, ")


def test_a_model_that_cannot_be_served_fails_with_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, found = examined(capsys, str(tmp_path / "none.gguf"), "--socket", str(tmp_path / "client.sock"))
    assert (code, found["model"]["level"]) == (1, "fail")
    assert found["model"]["what"] == f"{tmp_path / 'none.gguf'}: no such file or folder"
    assert "memory" not in found


def test_wrong_settings_are_a_finding_and_the_rest_is_examined(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKD_CPU_THREADS", "many")
    code, found = examined(capsys, str(DEMO_MODEL), "--socket", str(tmp_path / "client.sock"))
    assert (code, found["settings"]["level"], found["model"]["level"]) == (1, "fail", "ok")
    assert "SPARKD_CPU_THREADS" in found["settings"]["what"]


def test_another_user_is_told_the_folder_that_is_closed_to_them_and_how_to_open_it(
    capsys: pytest.CaptureFixture[str], open_folder: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to look with the eyes of another user")
    closed = open_folder / "data" / "closed"
    closed.mkdir(parents=True)
    model = Path(shutil.copy(DEMO_MODEL, closed))
    closed.chmod(0o700)
    code, found = examined(capsys, str(model), "--user", "nobody", "--socket", str(open_folder / "client.sock"))
    assert (code, found["model"]["level"]) == (1, "fail")
    assert found["model"]["what"] == f"{model}: user nobody may not pass through the folder {closed}"
    assert found["model"]["fix"] == f"allow it (setfacl -m u:nobody:x {closed}) or move the model"
    closed.chmod(0o711)
    assert examined(capsys, str(model), "--user", "nobody")[1]["model"]["level"] == "ok"


def test_an_unknown_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--user", "no-such-user"]) == 1
    assert capsys.readouterr().err == "sparkctl: no user 'no-such-user' on this machine\n"


def test_people_get_a_table_with_the_fix_below(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--config", os.devnull, "--socket", str(tmp_path / "client.sock")]) == 0
    shown = capsys.readouterr().out
    assert "none is set" in shown and "→ set model.path, or: sparkctl doctor MODEL.gguf" in shown
