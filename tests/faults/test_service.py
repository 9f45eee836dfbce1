"""sparkd as a service: what it tells its manager, how it ends, and what it keeps when it is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import PATIENCE_S, until
from daemon import running as killed_at_the_end
from odd_daemon import OddDaemon
from service_manager import WATCHDOG_S, Managed

from spark_client import Client, RequestFailed
from sparkd.supervisor.front_door import LEASE_S

LIMITS = {"context": 4096, "sequences": 2, "queue": 8}


@pytest.fixture
def managed(model: Path, tmp_path: Path) -> Iterator[Managed]:
    one = Managed(model, tmp_path / "run", limits=LIMITS)
    try:
        yield one
    finally:
        one.close()


def start(client: Client, count: int = 2000) -> Any:
    return client.generate(tokens=[1, 2, 3], max_tokens=count, ignore_eos=True, temperature=1.0, seed=3)


def test_the_manager_hears_how_the_start_goes_and_that_it_is_done_after_a_real_token(managed: Managed) -> None:
    managed.ready()
    with managed.client() as client:
        assert client.status()["speed"]["steps"] > 0
    names = [name for name, _ in managed.assignments]
    assert names.index("STATUS") < names.index("FDSTORE") < names.index("EXTEND_TIMEOUT_USEC") < names.index("READY")
    assert managed.heard("STATUS")[-1] == "ready"
    assert managed.heard("FDNAME") == list(managed.kept)
    until(lambda: len(managed.heard("WATCHDOG")) >= 3, managed.said)
    assert WATCHDOG_S < PATIENCE_S and managed.strangers == 0
    assert managed.stop() == 0
    assert managed.heard("STOPPING")


def test_a_worker_that_cannot_compute_a_token_is_never_called_ready(model: Path, tmp_path: Path) -> None:
    class Wrong(OddDaemon):
        ENVIRONMENT = {**OddDaemon.ENVIRONMENT, "ODD_FIRST_TOKEN": "refuse"}  # noqa: RUF012

    with killed_at_the_end(Wrong(model, tmp_path / "run", limits=LIMITS)) as one:
        assert one.process.wait(PATIENCE_S) == 1
        assert "the first token cannot be computed: the logits are not finite" in one.said().splitlines()[-1]
        assert "is served" not in one.said()


def test_what_runs_may_finish_when_the_daemon_is_asked_to_stop_and_nothing_else_begins(managed: Managed) -> None:
    """Even if a worker dies meanwhile."""
    with managed.ready().client() as client, managed.client() as other:
        undisturbed = start(client).read(PATIENCE_S)
        streams = [start(client), start(other)]
        waiting = start(client)
        next(streams[1].events())
        worker = managed.pid("worker")
        managed.process.terminate()
        with pytest.raises(RequestFailed, match="being stopped") as ended:
            waiting.read(PATIENCE_S)
        with pytest.raises(RequestFailed, match="being stopped") as refused:
            start(other)
        assert ended.value.retry and refused.value.retry
        assert client.status()["state"] == "stopping"
        os.kill(worker, signal.SIGKILL)
        assert [stream.read(PATIENCE_S) for stream in streams] == [undisturbed] * 2
        assert managed.process.wait(PATIENCE_S) == 0
    assert list(managed.run_dir.iterdir()) == [] and list(managed.temporary.iterdir()) == []


def test_patience_with_running_requests_has_an_end(model: Path, tmp_path: Path) -> None:
    with killed_at_the_end(OddDaemon(model, tmp_path / "run", limits={"context": 1 << 17, "sequences": 1})) as one:
        with one.ready().client() as client:
            endless = start(client, 100_000)
            next(endless.events())
            one.process.terminate()
            with pytest.raises(RequestFailed, match="being stopped"):
                endless.read(PATIENCE_S)
        assert one.process.wait(PATIENCE_S) == 0


def test_an_arena_of_other_files_is_given_back_and_one_of_the_same_is_used(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "model.gguf"
    own.write_bytes(model.read_bytes())
    one = Managed(own, tmp_path / "run", limits=LIMITS)
    try:
        one.ready()
        first = dict(one.kept)
        one.ready_again()
        assert one.kept == first and one.status()["loading"]["read_bytes"] == 0
        os.utime(own)
        one.ready_again()
        loading = one.status()["loading"]
        assert loading["read_bytes"] == loading["total_bytes"] > 0
        assert len(one.kept) == 1 and one.kept.keys() != first.keys()
    finally:
        one.close()


def test_an_arena_that_is_half_filled_is_filled_to_the_end(managed: Managed) -> None:
    until(lambda: bool(managed.kept), managed.said)
    for _ in range(3):
        managed.process.kill()
        managed.process.wait()
        managed.start()
        time.sleep(0.5)
    with managed.client() as client:
        until(lambda: client.status()["state"] == "ready", managed.said)
        loading = client.status()["loading"]
        assert loading["done_bytes"] == loading["total_bytes"] >= loading["read_bytes"]
        assert start(client, 20).read(PATIENCE_S)


def test_an_app_that_vanishes_while_it_waits_is_noticed_long_before_its_lease_lapses(managed: Managed) -> None:
    script = (
        "import sys; from spark_client import Client; c = Client(sys.argv[1]);"
        "s = c.generate(tokens=[1], max_tokens=9, ignore_eos=True); print('waits', flush=True); sys.stdin.read()"
    )
    with managed.ready().client() as client:
        running = [start(client, 4000) for _ in range(2)]
        app = subprocess.Popen(
            [sys.executable, "-c", script, str(managed.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert app.stdout is not None and app.stdout.readline() == b"waits\n"
        os.kill(managed.pid("worker"), signal.SIGSTOP)
        assert client.status()["requests"]["queued"] == 1
        killed = time.monotonic()
        app.kill()
        app.communicate()
        until(lambda: client.status()["requests"]["queued"] == 0, managed.said)
        assert time.monotonic() - killed < LEASE_S / 2
        os.kill(managed.pid("worker"), signal.SIGCONT)
        for stream in running:
            stream.cancel()
