"""sparkctl and a real daemon: who asks what, its log, reading settings again, draining and stopping it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon import PATIENCE_S, Daemon, alive, daemon, until
from other_user import as_nobody

from spark_client import RequestFailed
from sparkctl import logs
from sparkctl.main import main
from sparkd.demo.main import MODEL as DEMO

LIMITS = {"context": 40_000, "sequences": 1, "queue": 8}


@pytest.fixture
def laguna(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Daemon]:
    with daemon(model_path("laguna-tiny-s1-f32"), tmp_path / "run", limits=LIMITS) as one:
        yield one


def sparkctl(one: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkctl", *arguments, "--socket", str(one.socket)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_apps_and_requests_are_listed_while_they_run_and_logged_when_they_end(laguna: Daemon) -> None:
    with laguna.client() as client:
        running = client.generate(tokens=[1, 2, 3], max_tokens=39_000, ignore_eos=True)
        next(iter(running.events()))
        queued = client.generate(prompt="a secret", max_tokens=7)
        listed = json.loads(sparkctl(laguna, "requests", "--json").stdout)
        assert [request["request"] for request in listed] == [running.request, queued.request]
        assert listed[0]["stage"] in ("prefill", "decode") and listed[0]["prompt_tokens"] == 3
        assert (listed[1]["stage"], listed[1]["position"]) == ("queued", 0)
        apps = {app["name"]: app["requests"] for app in json.loads(sparkctl(laguna, "clients", "--json").stdout)}
        assert apps == {"spark_client": 2, "sparkctl": 0}
        running.close()
        queued.read()
    until(lambda: laguna.said().count("request ended") == 2)
    ended = re.findall(r"info sparkd: request ended: request=(\d+) client=spark_client reason=(\w+)", laguna.said())
    assert ended == [(str(running.request), "cancelled"), (str(queued.request), queued.finish_reason)]
    assert "secret" not in laguna.said()


def test_logs_shows_the_end_of_the_file_the_daemon_writes(laguna: Daemon) -> None:
    before = len(laguna.said().splitlines())
    shown = sparkctl(laguna, "logs", "--lines", "3")
    lines = laguna.said().splitlines()
    # The daemon may have written more by the time the command read.
    ends = [lines[end - 3 : end] for end in range(before, len(lines) + 1)]
    assert (shown.returncode, shown.stderr) == (0, "") and shown.stdout.splitlines() in ends


def test_followed_logs_go_on_until_the_daemon_ends(laguna: Daemon) -> None:
    command = [sys.executable, "-m", "sparkctl", "logs", "-f", "-n", "1", "--socket", str(laguna.socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().rstrip("\n") == laguna.said().splitlines()[-1]
        laguna.stop()
        rest = process.stdout.read()
        assert process.wait() == 0
    assert "sparkd: stopping: SIGTERM" in rest and laguna.said().endswith(rest)


def test_without_a_daemon_logs_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "_journal_has", lambda unit: False)
    assert main(["logs", "--socket", str(tmp_path / "none.sock")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"sparkctl: no daemon at {tmp_path / 'none.sock'}") and error.count("\n") == 1


def test_a_drained_daemon_lets_open_requests_finish_and_refuses_new_ones(laguna: Daemon) -> None:
    with laguna.client() as client:
        # More chunks than the credit of a stream that is not read: it stays open until it is.
        open_one = client.generate(tokens=[1, 2, 3], max_tokens=400, ignore_eos=True)
        drain = subprocess.Popen(
            [sys.executable, "-m", "sparkctl", "drain", "--socket", str(laguna.socket)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until(lambda: client.status()["state"] == "stopping", laguna.said)
        with pytest.raises(RequestFailed, match="being stopped") as refused:
            client.generate(tokens=[1], max_tokens=4)
        assert refused.value.retry
        open_one.read()
        assert (open_one.finish_reason, len(open_one.tokens)) == ("length", 400)
        said, progress = drain.communicate(timeout=PATIENCE_S)
    assert (drain.returncode, said) == (0, f"process {laguna.process.pid} has ended\n")
    assert all(line.startswith(("ready: ", "stopping: ")) for line in progress.splitlines())
    assert laguna.process.wait(PATIENCE_S) == 0


def test_a_stopped_daemon_ends_at_once_with_the_reason(laguna: Daemon) -> None:
    pids = laguna.pids()
    with laguna.client() as client:
        running = client.generate(tokens=[1, 2, 3], max_tokens=39_000, ignore_eos=True)
        next(iter(running.events()))
        stopped = sparkctl(laguna, "stop")
        assert (stopped.returncode, stopped.stdout) == (0, f"process {laguna.process.pid} has ended\n")
        with pytest.raises(RequestFailed, match="being stopped"):
            running.read()
    assert laguna.process.wait(PATIENCE_S) == 0
    assert not any(alive(pid) for pid in pids)
    (line,) = (line for line in laguna.said().splitlines() if "request ended" in line)
    assert "request=1 client=spark_client reason=failed code=unavailable prompt_tokens=3 " in line


@pytest.mark.parametrize("command", ["stop", "drain", "reload"])
def test_a_process_that_is_no_sparkd_is_left_alone(command: str, tmp_path: Path) -> None:
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
        "print('up', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "other.sock"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"up\n"
        done = subprocess.run(
            [sys.executable, "-m", "sparkctl", command, "--socket", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr == f"sparkctl: {path}: process {other.pid} listens there, and is no sparkd: left alone\n"
        assert other.poll() is None
        other.communicate()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """`sparkd serve` with a settings file of its own, which is what reload reads; folder and process."""
    (tmp_path / "own.toml").write_text("[limits]\nqueue = 5\n")
    command = [sys.executable, "-m", "sparkd.cli", "serve", str(DEMO), "--config", str(tmp_path / "own.toml")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPARKD_")}
    with subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stderr is not None
        while "ready; ask it" not in process.stderr.readline():
            assert process.poll() is None
        yield tmp_path, process
        process.send_signal(signal.SIGINT)
        process.communicate()


def test_reload_tells_what_took_effect_what_needs_a_restart_and_what_is_wrong(
    served: tuple[Path, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = served
    reload = ["reload", "--wait", str(PATIENCE_S), "--socket", str(folder / "run" / "client.sock")]
    (folder / "own.toml").write_text("[limits]\nqueue = 6\n[cpu]\nthreads = 1\n")
    assert main(reload) == 0
    assert capsys.readouterr().out == "applied: limits.queue\nneed a restart: cpu.threads\n"
    (folder / "own.toml").write_text("[limits]\nqueue = -1\n")
    assert main(reload) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith(f"sparkctl: {folder / 'own.toml'}:2: limits.queue = -1 is refused") and "\n" not in error[:-1]
    )
    assert main([*reload, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["count"] == 3


def test_a_log_that_goes_into_a_pipe_is_named(
    served: tuple[Path, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, process = served
    assert main(["logs", "--socket", str(folder / "run" / "client.sock")]) == 1
    error = capsys.readouterr().err
    assert re.match(
        rf"sparkctl: process {process.pid} writes its log to pipe:\[\d+\], which cannot be read back", error
    )


def test_reload_does_not_hang_up_a_daemon_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = pty.openpty()
    path = tmp_path / "client.sock"
    script = "import sys; sys.argv[0] = 'sparkd'; from fake_daemon import FakeDaemon; from pathlib import Path\n"
    script += "with FakeDaemon(Path(sys.argv[1])):\n    print('up', flush=True); sys.stdin.read()"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent / "unit")}
    command = [sys.executable, "-c", script, str(path), "sparkd"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert main(["reload", "--socket", str(path)]) == 1
        assert f"process {process.pid} runs on the terminal /dev/pts/" in capsys.readouterr().err
        assert process.poll() is None
        process.communicate()
    os.close(ours)
    os.close(theirs)


def test_a_daemon_of_another_user_is_named_and_not_signalled(
    model_path: Callable[[str], Path], open_folder: Path
) -> None:
    with daemon(model_path("laguna-tiny-s1-f32"), open_folder / "run", limits=LIMITS) as one:
        one.run_dir.chmod(0o711)
        one.socket.chmod(0o666)
        for command in ("stop", "reload"):
            done = as_nobody("-m", "sparkctl", command, "--socket", str(one.socket))
            assert done.returncode == 1
            assert (
                done.stderr
                == f"sparkctl: process {one.process.pid} belongs to root: run this as that user or as root\n"
            )
        done = as_nobody("-m", "sparkctl", "logs", "--socket", str(one.socket))
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"process {one.process.pid} belongs to root, who alone may see where its log goes" in done.stderr
        assert one.status()["state"] == "ready"
