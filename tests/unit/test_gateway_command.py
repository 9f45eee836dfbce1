"""The command `sparkd-gateway`: what it says before it serves, how it begins and ends, and the keys it makes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_gateway import main
from spark_gateway.__main__ import LIBRARIES, run
from spark_gateway.arguments import parser
from spark_gateway.keys import Keys
from spark_gateway.requests import defaults_of
from sparkd.supervisor import gateway

ROOT = Path(__file__).parents[2]
_BARE = f"import sys; sys.modules.update(dict.fromkeys({[name.replace('-', '_') for name in LIBRARIES]}))\n"


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where none of the libraries is installed that serving takes."""
    code = f"{_BARE}from spark_gateway.__main__ import run\nsys.exit(run({list(arguments)}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, killed at the end of the block if it still runs."""
    command = [sys.executable, "-m", "spark_gateway", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """The log up to the line that has `words` in it."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(f"{words!r} never came: {lines}")


def test_without_its_libraries_it_says_what_to_install_and_does_what_needs_none() -> None:
    done = bare()
    install = f"{sys.executable} -m pip install {' '.join(LIBRARIES)}"
    assert (done.returncode, done.stderr) == (1, f"sparkd-gateway: uvicorn is not installed; {install}\n")
    assert bare("--version").stdout.startswith("sparkd-gateway 0.")
    shown = bare("--help").stdout
    assert "example" in shown and "--parent" not in shown
    assert "standard error" in bare("key", "--help").stdout
    assert bare("key", "me").stdout.startswith("me sha256:")


def test_what_is_said_to_be_missing_is_what_the_extra_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {requirement.partition(">")[0] for requirement in project["optional-dependencies"]["gateway"]}
    assert extra == set(LIBRARIES) == set(gateway._LIBRARIES)


def test_what_cannot_be_served_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.log, "configure", lambda level: None)

    def said(*arguments: str) -> str:
        assert main.serve(parser().parse_args(arguments)) == 1
        return capsys.readouterr().err

    assert "can be reached from other machines" in said("--host", "0.0.0.0", "--port", "0")
    assert "nothing to listen at" in said("--port", "none")
    assert "unknown sampling default 'heat'" in said("--port", "0", "--sampling", "heat=1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use" in said("--port", str(taken.getsockname()[1]))
    with pytest.raises(ValueError, match="could not convert"):
        defaults_of("temperature=hot")


def test_its_address_is_told_once_it_answers_and_its_end_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    none = tmp_path / "none.sock"
    with running("--port", "0", "--unix", str(path), "--socket", str(none)) as process:
        log = lines_until(process, "listens at http://127.0.0.1:")
        assert log[-1].split(" ")[2:5] == ["info", "gateway:", "listens"] and f"unix:{path}" in log[-1]
        port = int(log[-1].split("127.0.0.1:")[1].split("/")[0])
        socket.create_connection(("127.0.0.1", port)).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0 and not path.exists()


def test_one_that_is_ended_while_it_begins_ends_well(tmp_path: Path) -> None:
    with running("--port", "0", "--unix", str(tmp_path / "g.sock")) as process:
        while b"SigCgt" not in (status := Path(f"/proc/{process.pid}/status").read_bytes()) or not _catches(status):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0 and not (tmp_path / "g.sock").exists()


def _catches(status: bytes) -> bool:
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith(b"SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_daemon_that_starts_it_hears_where_it_listens_or_why_not() -> None:
    parent = ("--parent", str(os.getpid()))
    with running("--port", "0", *parent) as process:
        assert process.stdout is not None
        what, url = process.stdout.readline().split()
        assert what == "listens" and url.startswith("http://127.0.0.1:")
        with running("--port", url.rstrip("/").rpartition(":")[2], *parent) as second:
            assert "Address already in use" in second.communicate()[0] and second.returncode == 1


def test_a_unix_socket_is_for_owner_and_group_and_takes_over_from_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    with main._unix(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(main._Unusable, match="another program listens"):
            main._unix(path)
    with main._unix(path) as second:
        assert second.getsockname() == str(path)


def test_a_key_is_shown_apart_from_the_line_that_the_file_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    assert run(["key", "me"]) == 0
    line, said = capsys.readouterr()
    path.write_text(line)
    key = said.split()[-1]
    assert key.startswith("spark-") and key not in line
    assert Keys(path).holder({"authorization": f"Bearer {key}"}).name == "me"


@pytest.mark.parametrize("name", ["", "a b", "a#", "ä\n", "x" * 65])
def test_a_name_that_the_file_would_refuse_gets_no_key(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(["key", name]) == 1
    line, said = capsys.readouterr()
    assert not line and said.startswith("sparkd-gateway: a name has up to 64 letters")


def test_the_file_of_keys_in_the_documentation_is_one(tmp_path: Path) -> None:
    told = (ROOT / "docs/clients.md").read_text().partition("holds hashes alone:\n\n")[2].partition("\n\n")[0]
    path = tmp_path / "keys"
    path.write_text(textwrap.dedent(told))
    holders = {holder.name: (holder.requests, holder.per_minute) for holder in (Keys(path)._holders or {}).values()}
    assert holders == {"alice": (0, 0), "nightly-job": (1, 20)}
