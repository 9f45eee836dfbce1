"""What every child does, whatever its work: hello, heartbeats, the reason of its end, and an end in any case."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from control import Control, control

from sparkd.ipc.internal import ChildFailed, ChildHello, Heartbeat

_CHILD = """
import sys, time
from sparkd.errors import ModelFileError
from sparkd.ipc.child import parse_arguments, run_child
from sparkd.ipc.sockets import Router

class Work:
    def __init__(self, child, given):
        self.child = child
        self.router = Router(child.context, given.run_dir.store)

    def run(self):
        {run}

    def close(self):
        {close}

given = parse_arguments("odd")
sys.exit(run_child("odd", given, lambda child: Work(child, given)))
"""


@pytest.fixture
def link(tmp_path):
    with control(tmp_path) as link:
        yield link


def _start(link: Control, run: str, close: str = "self.router.close()") -> tuple[subprocess.Popen, bytes]:
    command = [sys.executable, "-c", _CHILD.format(run=run, close=close), "--run-dir", str(link.run_dir.path)]
    command += ["--settings", "{}", "--parent", str(os.getpid())]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    link.children.append(child)
    return child, f"odd/{child.pid}".encode()


def test_a_failure_for_people_is_told_to_the_supervisor_and_not_printed(link):
    child, name = _start(link, "raise ModelFileError('is odd', where='m.gguf', fix='use another')")
    assert link.wait(name, ChildFailed) == ChildFailed("odd", "model_file", "m.gguf: is odd; use another")
    assert link.ended(child) == (1, "")
    assert link.heard[name][0] == ChildHello("odd", child.pid)


@pytest.mark.parametrize("close", ["self.router.close()", "pass", "raise ValueError('also')"])
def test_an_impossible_failure_keeps_its_traceback_and_ends_the_child(link, close):
    child, _ = _start(link, "raise RuntimeError('impossible')", close)
    code, said = link.ended(child)
    assert code == 1
    assert "RuntimeError: impossible" in said


def _beats(link: Control, name: bytes, enough: Callable[[list[Heartbeat]], bool]) -> list[Heartbeat]:
    beats: list[Heartbeat] = []
    while not enough(beats):
        assert link.router.socket.poll(10_000)
        peer, message = link.router.receive()
        if peer == name + b"/beat":
            beats.append(message)
    return beats


def test_a_child_that_does_not_come_back_from_its_work_beats_on_without_progress(link):
    _, name = _start(link, "self.child.wait(0); self.child.wait(0); time.sleep(600)")
    beats = _beats(link, name, lambda beats: sum(beat.progress == 2 for beat in beats) == 3)
    assert beats[-1] == Heartbeat("odd", 2, True)


def test_a_child_that_waits_for_work_is_not_busy(link):
    _, name = _start(link, "[self.child.wait(600) for _ in range(1000)]")
    _beats(link, name, lambda beats: any(not beat.busy for beat in beats))


def test_work_in_other_threads_is_watched_by_its_own_counter(link):
    run = "done = iter(range(10**9)); self.child.watch(lambda: next(done)); [self.child.wait(600) for _ in range(9)]"
    _, name = _start(link, run)
    beats = _beats(link, name, lambda beats: len(beats) == 4)
    rising = [beat.progress for beat in beats if beat.busy]
    assert rising[-3:] == sorted(set(rising[-3:]))


def test_words_said_last_arrive(link):
    run = "[self.child.send(__import__('sparkd.ipc.internal').ipc.internal.Abort(n)) for n in range(1000)]"
    child, name = _start(link, run)
    assert link.ended(child)[0] == 0
    while len(link.heard.get(name, [])) < 1001:
        link.hear(1.0)
    assert [message.request for message in link.heard[name][1:]] == list(range(1000))
