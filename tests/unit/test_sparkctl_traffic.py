"""What sparkctl shows of apps and requests, and the status over and over."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from spark_client import messages as m
from sparkctl.main import main

Start = Callable[..., Any]

TRAFFIC: dict[str, Any] = {
    "requests": {"running": 2, "queued": 7},
    "clients": [
        {"name": "editor\x1b[31m", "requests": 2, "waiting_bytes": 2048, "silent_s": 1.5},
        {"name": "sparkctl", "requests": 0, "waiting_bytes": 0, "silent_s": 0.0},
    ],
    "open_requests": [
        {
            "request": 7, "client": "editor\x1b[31m", "stage": "decode", "position": None, "prompt_tokens": 31,
            "output_tokens": 12, "waiting_bytes": 2048, "age_s": 75.0, "resumed": 1,
        },
        {
            "request": 8, "client": "editor\x1b[31m", "stage": "queued", "position": 3, "prompt_tokens": 0,
            "output_tokens": 0, "waiting_bytes": 0, "age_s": 2.0, "resumed": 0,
        },
    ],
}  # fmt: skip


def cells(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_clients_are_listed_with_what_waits_for_them(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clients", "--socket", str(fake_daemon(status=TRAFFIC).path)]) == 0
    shown = cells(capsys.readouterr().out)
    assert ["editor\\x1b[31m", "2", "2.0 KiB", "1.5 s"] in shown
    assert ["sparkctl", "0", "0.0 s"] in shown


def test_requests_are_listed_with_their_stage_and_the_rest_is_counted(
    fake_daemon: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["requests", "--socket", str(fake_daemon(status=TRAFFIC).path)]) == 0
    shown = cells(capsys.readouterr().out)
    assert ["7", "editor\\x1b[31m", "decode", "31", "12", "2.0 KiB", "1 min 15 s", "1"] in shown
    assert ["8", "editor\\x1b[31m", "queued, 3 before it", "0", "0", "2.0 s"] in shown
    assert ["and 7 more"] in shown


def test_an_idle_daemon_has_no_open_request(fake_daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    idle = {"requests": {"running": 0, "queued": 0}, "clients": [], "open_requests": []}
    assert main(["requests", "--socket", str(fake_daemon(status=idle).path)]) == 0
    assert capsys.readouterr().out == "no request is open\n"


@pytest.mark.parametrize(("command", "member"), [("clients", "clients"), ("requests", "open_requests")])
def test_programs_get_the_list_as_it_is(
    command: str, member: str, fake_daemon: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--json", "--socket", str(fake_daemon(status=TRAFFIC).path)]) == 0
    assert json.loads(capsys.readouterr().out) == TRAFFIC[member]


def watching(*arguments: str, **files: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "sparkctl", "status", "--watch", "0.05", *arguments], **files)


def test_a_watched_status_is_redrawn_in_place_and_leaves_the_terminal_as_it_was(fake_daemon: Start) -> None:
    daemon = fake_daemon(status={"state": "ready", "reason": ""})
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while piece := os.read(ours, 4096):
                shown.extend(piece)
        except OSError:  # A pty whose other end is closed reports EIO, not an empty read.
            pass

    reader = threading.Thread(target=read)
    with watching("--socket", str(daemon.path), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        reader.start()
        daemon.wait_for(m.StatusRequest, 5)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    reader.join()
    os.close(ours)
    assert shown.count(b"ready") >= 4
    assert b"\x1b[2J" not in shown, "clearing the screen makes it flicker"
    assert shown.index(b"\x1b[?1049h") < shown.index(b"\x1b[?1049l")
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"Traceback" not in shown


def test_a_watched_status_outlives_the_daemon_and_finds_the_next(fake_daemon: Start) -> None:
    first = fake_daemon(status={"state": "ready", "reason": ""})
    with watching("--json", "--socket", str(first.path), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == first.status
        first.__exit__()
        while (seen := json.loads(process.stdout.readline())) == first.status:
            pass
        assert seen["state"] == "unreachable"
        assert "no daemon" in seen["reason"] or "ended" in seen["reason"]
        first.path.unlink(missing_ok=True)
        second = fake_daemon(status={"state": "loading", "reason": ""})
        while (seen := json.loads(process.stdout.readline())) != second.status:
            assert seen["state"] == "unreachable"
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 0
