"""Whole daemons against the limits of the system: memory of a cgroup, locked memory, and a shared-memory folder."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon import PATIENCE_S, Daemon, daemon, until

from sparkd.config import KvSettings, LimitSettings, ModelSettings, Settings
from sparkd.residency.budget import GIB, Limit
from sparkd.store.layout import ArenaLayout
from sparkd.store.limits import pool_bytes
from sparkd.store.plan import host_needs, make_plan, open_model

NAME = "qwen35moe-tiny-s1-q4_k_m"
LIMITS = {"context": 256, "sequences": 2}


def _own_cgroups() -> Iterator[tuple[Path, str]]:
    """Folders in which a cgroup with a memory limit can be made, perhaps, and the name of its limit."""
    mounts = Path("/proc/self/mountinfo").read_text()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory" and (mount := re.search(r" (\S+) \S+ - cgroup \S+ \S*memory", mounts)):
            own = Path(mount[1] + path)
            yield own if own.exists() else Path(mount[1]), "memory.limit_in_bytes"
        if controllers == "" and (mount := re.search(r" (\S+) \S+ - cgroup2 ", mounts)):
            # A v2 cgroup that has processes cannot limit cgroups below it, so ours is made beside our own.
            yield Path(mount[1] + path).parent if path != "/" else Path(mount[1]), "memory.max"


@pytest.fixture
def cgroup(request) -> Iterator[Path]:
    """A cgroup of our own, whose memory limit has the name that the test asks for."""
    parent = next((parent for parent, limit in _own_cgroups() if limit == request.param), None)
    if parent is None:
        pytest.skip(f"this machine has no cgroup with {request.param}")
    made = parent / f"sparkd-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {parent}: {error.strerror}")
    try:
        if not (made / request.param).exists():
            pytest.skip(f"cgroups in {parent} have no {request.param}")
        yield made
    finally:
        until(lambda: not (made / "cgroup.procs").read_text())
        made.rmdir()


def _inside(cgroup: Path, *command: str) -> list[str]:
    """A command that runs in a cgroup."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(cgroup), *command]


def _limit(cgroup: Path, size: int) -> None:
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (cgroup / name).exists():
            (cgroup / name).write_text(str(size))


class _Within(Daemon):
    """A daemon whose command is run by way of another one."""

    def __init__(self, around: Callable[[list[str]], list[str]], *given: Any, **settings: dict[str, Any]) -> None:
        self._around = around
        super().__init__(*given, **settings)

    def start(self) -> subprocess.Popen[bytes]:
        self.command = self._around(self.command)
        return super().start()


@contextmanager
def _within(around: Callable[[list[str]], list[str]], *given: Any, **settings: dict[str, Any]) -> Iterator[_Within]:
    one = _Within(around, *given, **settings)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def _settings(path: Path) -> Settings:
    return Settings(model=ModelSettings(path=str(path)), kv=KvSettings(type="f32"), limits=LimitSettings(**LIMITS))


def _need(path: Path) -> int:
    """What a daemon takes that has all experts in memory."""
    return make_plan(_settings(path), limits=[Limit("enough", 99 * GIB)]).need_bytes


def _least(path: Path) -> int:
    """What one takes that reads almost all of them when they are used."""
    model, program = open_model(_settings(path))
    return host_needs(program, ArenaLayout.within(program, model, 0), _settings(path)).total


def _answer(one: Daemon) -> list[int]:
    with one.client() as client, client.generate(tokens=[5, 6, 7], max_tokens=8, ignore_eos=True) as stream:
        stream.read()
        return stream.tokens


versions = pytest.mark.parametrize("cgroup", ["memory.limit_in_bytes", "memory.max"], indirect=True)


@versions
def test_a_cgroup_one_percent_too_small_refuses_the_start_naming_need_and_limit(cgroup, model_path, tmp_path):
    need = _least(model_path(NAME))
    _limit(cgroup, need * 99 // 100)
    with _within(lambda command: _inside(cgroup, *command), model_path(NAME), tmp_path / "run", limits=LIMITS) as one:
        assert one.process.wait(PATIENCE_S) == 1
    assert f"({need} bytes) of host memory at least" in one.said()
    allowed = re.search(rf"of cgroup {re.escape(str(cgroup))} allows .* GiB \((\d+) bytes\)", one.said())
    assert int(allowed[1]) <= need * 99 // 100
    assert one.said().count("\n") == 1
    assert not list((tmp_path / "run").glob("*.sock"))


@versions
def test_a_cgroup_full_of_page_cache_takes_one_daemon_after_the_other(cgroup, model_path, tmp_path):
    size = _need(model_path(NAME)) + (64 << 20)
    _limit(cgroup, size)
    other = tmp_path / "other"
    with other.open("wb") as file:
        file.truncate(size + (64 << 20))
    for _ in range(2):
        subprocess.run(_inside(cgroup, "cat", str(other)), stdout=subprocess.DEVNULL, check=True)
        used = [cgroup / name for name in ("memory.usage_in_bytes", "memory.current") if (cgroup / name).exists()]
        assert int(used[0].read_text()) > size * 3 // 4
        with _within(
            lambda command: _inside(cgroup, *command), model_path(NAME), tmp_path / "run", limits=LIMITS
        ) as one:
            assert f"of cgroup {cgroup}" in one.ready().status()["memory"]["limit"]
            assert len(_answer(one)) == 8
            assert one.stop() == 0


def _limited(limit: int) -> Callable[[list[str]], list[str]]:
    """A command that may lock so much memory and has no privilege to lock more, whoever runs it."""
    code = (
        "import ctypes, os, resource, sys\n"
        "ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # drop CAP_IPC_LOCK from what an exec may gain\n"
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    return lambda command: [sys.executable, "-c", code, *command]


def _locked(one: Daemon) -> dict[str, Any]:
    """The memory part of the status, once locking has ended and a request was answered."""
    one.ready()
    assert len(_answer(one)) == 8

    def ended() -> bool:
        return one.status()["memory"]["lock_note"] != "locked once the weights are in place"

    until(ended, one.said)
    return one.status()["memory"]


def test_a_daemon_serves_with_what_could_be_locked_and_says_how_much_and_what_it_costs(model_path, tmp_path):
    limit = 64 << 10
    with _within(_limited(limit), model_path(NAME), tmp_path / "run", limits=LIMITS) as one:
        memory = _locked(one)
        assert 0 < memory["locked_bytes"] <= limit < memory["arena_bytes"]
        note = memory["lock_note"]
        assert f"{memory['locked_bytes']} of {memory['arena_bytes']} bytes are locked" in note
        assert f"the limit on locked memory is {limit} bytes" in note
        assert "waits for the disk" in note or "has no swap" in note
        assert note in one.said()


def _resident(pid: int) -> int:
    """Bytes of the arena in this process's own mapping, which the lock is about."""
    smaps = Path(f"/proc/{pid}/smaps").read_text()
    arena = re.search(r"^\S+ .*/memfd:sparkd-arena .*\n(?:\w+:.*\n)+", smaps, re.MULTILINE)[0]
    return int(re.search(r"^Rss: +(\d+) kB", arena, re.MULTILINE)[1]) << 10


@pytest.mark.parametrize("limit", [4 << 20, GIB, resource.RLIM_INFINITY])
def test_a_limit_that_the_weights_stay_below_locks_them_all(model_path, tmp_path, limit):
    around = _limited(limit)
    if subprocess.run(around(["/bin/true"]), capture_output=True, check=False).returncode != 0:
        if os.getuid() != 0 or limit != resource.RLIM_INFINITY:
            pytest.skip(f"this user cannot raise the limit on locked memory to {limit}")
        around = list  # root's privilege knows no limit
    with _within(around, model_path(NAME), tmp_path / "run", limits=LIMITS) as one:
        memory = _locked(one)
        assert (memory["locked_bytes"], memory["lock_note"]) == (memory["arena_bytes"], "")
        assert _resident(one.process.pid) == memory["arena_bytes"]


def _huge(one: Daemon) -> dict[str, Any]:
    """The memory part of the status, once joining has ended."""
    one.ready()
    until(lambda: one.status()["memory"]["huge_note"] != "joined once the weights are in place", one.said)
    return one.status()["memory"]


@pytest.mark.parametrize("huge_pages", ["auto", "off"])
def test_the_status_tells_what_huge_pages_were_got_and_the_answer_is_the_same(model_path, tmp_path, huge_pages):
    settings = {"limits": LIMITS, "memory": {"huge_pages": huge_pages}}
    with daemon(model_path(NAME), tmp_path / "run", **settings) as one:
        memory = _huge(one)
        assert len(_answer(one)) == 8
        assert (memory["huge_bytes"] == memory["arena_bytes"]) == (memory["huge_note"] == "")
        assert (memory["huge_kind"] == "none") == (memory["huge_bytes"] == 0)
        if huge_pages == "off":
            assert (memory["huge_bytes"], memory["huge_note"]) == (0, 'memory.huge_pages is "off"')


@pytest.mark.skipif(pool_bytes() < 4 << 20, reason="the pool of huge pages is empty (vm.nr_hugepages)")
def test_a_daemon_takes_its_weights_from_the_pool_and_gives_them_back(model_path, tmp_path):
    before = pool_bytes()
    with daemon(model_path(NAME), tmp_path / "ordinary", limits=LIMITS, memory={"huge_pages": "off"}) as one:
        expected = _answer(one)
    with daemon(model_path(NAME), tmp_path / "run", limits=LIMITS) as one:
        memory = _huge(one)
        assert (memory["huge_kind"], memory["huge_note"], memory["lock_note"]) == ("hugetlb", "", "")
        assert memory["huge_bytes"] == memory["locked_bytes"] == memory["arena_bytes"] == before - pool_bytes()
        assert _answer(one) == expected
        one.kill("store")
        until(lambda: one.status()["state"] == "ready" and one.status()["loading"]["read_bytes"] == 0, one.said)
        assert _answer(one) == expected
        one.stop()
    assert pool_bytes() == before


@pytest.fixture(params=["ro,size=64m", "size=4k"])
def without_shm(request) -> Callable[[list[str]], list[str]]:
    """A command that finds a useless /dev/shm."""
    mount = f"mount -t tmpfs -o {request.param} none /dev/shm"
    for unshare in (["unshare", "-m"], ["unshare", "-Ur", "-m"]):
        if (
            shutil.which("unshare")
            and subprocess.run([*unshare, "sh", "-c", mount], capture_output=True).returncode == 0
        ):
            return lambda command: [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    pytest.skip("no folder can be mounted for a process of this user")


def test_a_useless_folder_for_shared_memory_does_not_matter(without_shm, model_path, tmp_path):
    with daemon(model_path(NAME), tmp_path / "usual", limits=LIMITS) as usual:
        expected = _answer(usual)
    with _within(without_shm, model_path(NAME), tmp_path / "run", limits=LIMITS) as one:
        assert _answer(one.ready()) == expected
        for pid in one.pids():
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
            assert list(Path(f"/proc/{pid}/root/dev/shm").iterdir()) == []
        assert "/memfd:sparkd-arena" in Path(f"/proc/{one.pid('worker')}/maps").read_text()
        assert one.stop() == 0


def test_nothing_named_appears_for_shared_memory_and_nothing_is_left(model_path, tmp_path):
    def named() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if "spark" in path.name}

    before = named()
    with daemon(model_path(NAME), tmp_path / "run", limits=LIMITS) as one:
        assert named() == before
        one.stop()
    assert named() == before
    assert list((tmp_path / "run").iterdir()) == []
