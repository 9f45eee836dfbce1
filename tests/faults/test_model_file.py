"""The model's file changes under a running daemon: what is loaded is served, what is not is refused in clear words."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon import Daemon, alive, daemon, until

from spark_client import RequestFailed
from sparkd.config import ModelSettings, Settings
from sparkd.residency.budget import GIB, Limit
from sparkd.store.plan import make_plan

NAME = "qwen35moe-tiny-s1-q4_k_m"


@pytest.fixture
def path(model_path: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(model_path(NAME), tmp_path / f"{NAME}.gguf"))


@pytest.fixture
def served(path: Path, tmp_path: Path) -> Iterator[Daemon]:
    with daemon(path, tmp_path / "run", limits={"context": 256}) as one:
        yield one


def _tokens(one: Daemon) -> list[int]:
    with one.client() as client, client.generate(tokens=[5, 6, 7], max_tokens=8, ignore_eos=True) as stream:
        stream.read()
        return stream.tokens


def _identity(path: Path) -> str:
    found = path.stat()
    seconds, nanoseconds = divmod(found.st_mtime_ns, 10**9)
    return f"inode {found.st_ino} size {found.st_size} modified {seconds}.{nanoseconds:09d}"


def _replace(path: Path) -> None:
    copy = path.with_suffix(".new")
    shutil.copy2(path, copy)
    copy.rename(path)


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [_replace, _touch, _truncate])
def test_a_changed_file_is_refused_with_both_identities_and_what_is_loaded_is_served_on(
    served: Daemon, path: Path, change: Callable[[Path], None]
) -> None:
    before = _identity(path)
    expected = _tokens(served)
    change(path)
    after = _identity(path)
    assert _tokens(served) == expected
    served.kill("store")

    def refused() -> bool:
        status = served.status()
        return status["state"] == "degraded" and "is not the file" in status["reason"]

    until(refused, served.said)
    reason = served.status()["reason"]
    assert f"{path}: is not the file that was opened first: now " in reason
    assert before in reason and after in reason
    assert "\n" not in reason
    assert _tokens(served) == expected
    pids = served.pids()
    assert served.stop() == 0
    until(lambda: not any(alive(pid) for pid in pids), served.said)


def test_with_little_memory_a_changed_file_ends_requests_with_the_reason(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copy(model_path("laguna-tinyk-s1-f32"), tmp_path / "model.gguf"))
    # 12 of the 20 MiB of an arena that has room for every expert.
    with daemon(path, tmp_path / "run", limits={"context": 256}, memory={"host_gib": 12 / 1024}) as one:
        assert len(_tokens(one)) == 8
        _touch(path)
        with pytest.raises(RequestFailed, match=r"expert \d+ of expert layer \d+ cannot be had: .* is not the file"):
            _tokens(one)
        one.kill("store")
        until(lambda: "is not the file" in one.status()["reason"], one.said)
        with pytest.raises(RequestFailed, match="is not the file that was opened first"):
            _tokens(one)
        assert one.stop() == 0


def test_what_a_small_tier_cannot_read_any_more_fails_by_name_and_the_daemon_lives(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "laguna-tinyk-s1-f32"
    path = Path(shutil.copy(model_path(name), tmp_path / f"{name}.gguf"))
    whole = make_plan(Settings(model=ModelSettings(path=str(path))), limits=[Limit("enough", 99 * GIB)])
    half = (whole.arena_bytes - whole.records_bytes // 2) / GIB
    with daemon(path, tmp_path / "run", limits={"context": 256}, memory={"host_gib": half}) as one:
        assert one.status()["residency"]["partial"]
        _touch(path)
        with pytest.raises(RequestFailed) as caught:
            for _ in range(20):
                _tokens(one)
        assert f"{path}: is not the file that was opened first" in str(caught.value)
        assert one.status()["state"] == "ready"
        pids = one.pids()
        with pytest.raises(RequestFailed, match="is not the file"):
            for _ in range(20):
                _tokens(one)
        assert one.pids() == pids
