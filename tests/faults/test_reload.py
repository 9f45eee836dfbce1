"""SIGHUP: settings that can change do so at once, others are named, and a broken file changes nothing."""

from __future__ import annotations

import grp
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import PATIENCE_S, Daemon, running, until

from spark_client import RequestFailed

MODEL = "laguna-tiny-s1-q4_k_m"


class Configured(Daemon):
    """A daemon that reads a file of settings, as people start it."""

    PROGRAM = ("-m", "sparkd.cli", "serve")

    def __init__(self, model: Path, run_dir: Path) -> None:
        self.config = run_dir.with_suffix(".toml")
        self.write(model=model, sequences=1, queue=4)
        super().__init__(model, run_dir)

    def write(self, model: Path, **changed: Any) -> None:
        self.config.write_text(
            f'model.path = "{model}"\n'
            f"limits.context = 2048\nlimits.sequences = {changed['sequences']}\nlimits.queue = {changed['queue']}\n"
            f"limits.timeout_s = {changed.get('timeout_s', 600)}\n"
            f'log.level = "{changed.get("level", "info")}"\nscheduler.max_step_ms = {changed.get("step_ms", 250)}\n'
            f'socket.group = "{changed.get("group", "")}"\nmemory.lock = "off"\n'
        )

    def launch(self, log: Any) -> Any:
        self.command[-2:] = ["--config", str(self.config)]
        return super().launch(log)

    def reload(self) -> dict[str, Any]:
        before = self.status()["reload"].get("count", 0)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.status()["reload"].get("count", 0) == before + 1, self.said)
        return self.status()["reload"]


@pytest.fixture(scope="module")
def shared(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    with running(Configured(model_path(MODEL), tmp_path_factory.mktemp("daemon") / "run")) as one:
        one.ready()
        yield one


@pytest.fixture
def served(shared: Configured, model: Path) -> Configured:
    """With the settings it began with."""
    shared.write(model, sequences=1, queue=4)
    shared.reload()
    return shared


def test_what_can_change_changes_and_the_rest_is_named(served: Configured, model: Path) -> None:
    served.write(model, sequences=2, queue=0, timeout_s=500, level="debug", step_ms=3)
    outcome = served.reload()
    assert sorted(outcome["applied"]) == [
        "limits.queue",
        "limits.timeout_s",
        "log.level",
        "scheduler.max_step_ms",
    ]
    assert (outcome["restart"], outcome["error"]) == (["limits.sequences"], "")
    settings = served.status()["settings"]
    assert (settings["limits"]["queue"], settings["limits"]["sequences"], settings["log"]["level"]) == (0, 1, "debug")
    assert "need a restart: limits.sequences" in served.said()
    with served.client() as client:
        first = client.generate(tokens=[1], max_tokens=1500, ignore_eos=True)
        with pytest.raises(RequestFailed, match=r"limits\.queue is 0"):
            client.generate(tokens=[1], max_tokens=4)
        first.cancel()
        os.kill(served.pid("worker"), signal.SIGKILL)
        until(lambda: client.status()["state"] == "ready", served.said)
        # The prompt is read in small chunks by the new worker too.
        steps = client.status()["speed"]["steps"]
        client.generate(tokens=[5] * 1000, max_tokens=1).read(PATIENCE_S)
        assert client.status()["speed"]["steps"] - steps > 3


def test_a_broken_file_is_refused_and_the_old_settings_stay(served: Configured, model: Path) -> None:
    before = served.status()["settings"]
    served.config.write_text("limits.queue = 'many'\n")
    outcome = served.reload()
    assert outcome["applied"] == outcome["restart"] == [] and f"{served.config}:1" in outcome["error"]
    assert served.status()["settings"] == before and served.status()["state"] == "ready"
    served.write(model, sequences=1, queue=9, group="no-such-group")
    assert "no-such-group" in served.reload()["error"]
    assert served.status()["settings"] == before
    served.write(model, sequences=1, queue=9)
    assert served.reload()["applied"] == ["limits.queue"]


def test_another_group_may_connect_without_a_restart(served: Configured, model: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may give a socket to any group")
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, os.getegid()))
    served.write(model, sequences=1, queue=4, group=group.gr_name)
    assert served.reload()["applied"] == ["socket.group"]
    assert served.socket.stat().st_gid == served.run_dir.stat().st_gid == group.gr_gid
    assert stat.S_IMODE(served.run_dir.stat().st_mode) == 0o710
    served.write(model, sequences=1, queue=4)
    assert served.reload()["applied"] == ["socket.group"]
    assert served.socket.stat().st_gid == os.getegid()
    assert stat.S_IMODE(served.run_dir.stat().st_mode) == 0o700
