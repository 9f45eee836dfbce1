"""spark-chat against a daemon that only speaks the protocol: over a pipe, and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spark_chat.conversation import Conversation
from spark_client import messages as m

Start = Callable[..., Any]
USER, ASSISTANT = "user", "assistant"


def said(*turns: str) -> list[dict[str, str]]:
    """A conversation that begins with the user."""
    return [{"role": (USER, ASSISTANT)[n % 2], "content": text} for n, text in enumerate(turns)]


def answer(ask: m.Generate) -> list[str]:
    assert ask.chat is not None
    return [f"answer {sum(turn['role'] == USER for turn in ask.chat)}", "!"]


def piped(path: os.PathLike[str], text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spark_chat", "--socket", str(path), *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_a_conversation_is_kept_turn_by_turn() -> None:
    talk = Conversation("Be brief.")
    talk.say("a")
    talk.hear("b")
    talk.say("c")
    talk.take_back()
    assert talk.messages == [{"role": "system", "content": "Be brief."}, *said("a", "b")] and talk.turns == 1
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


# ---- over a pipe ----


def test_each_line_of_a_pipe_is_a_turn_and_only_answers_come_out(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=answer)
    done = piped(daemon.path, "one\n\ntwo\n", "--system", "Be brief.", "--seed", "7", "--max-tokens", "5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "answer 1!\nanswer 2!\n", "")
    first, second = daemon.of(m.Generate)
    system = {"role": "system", "content": "Be brief."}
    assert first.chat == [system, *said("one")]
    assert second.chat == [system, *said("one", "answer 1!", "two")]
    assert (first.max_tokens, first.sampling.seed, first.sampling.temperature) == (5, 7, 0.7)
    assert daemon.of(m.Hello)[0].client == "spark-chat"


def test_commands_work_in_a_pipe_and_say_their_words_aside(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=answer)
    text = "one\n/clear\n/system Be kind.\n/nothing\n//slash\ntwo \\\nlines\n/quit\nnever\n"
    done = piped(daemon.path, text)
    assert (done.returncode, done.stdout) == (0, "answer 1!\nanswer 1!\nanswer 2!\n")
    assert "forgot 1 turn\n" in done.stderr and "no command /nothing" in done.stderr
    asks = daemon.of(m.Generate)
    kind = {"role": "system", "content": "Be kind."}
    assert [ask.chat for ask in asks] == [
        said("one"),
        [kind, *said("/slash")],
        [kind, *said("/slash", "answer 1!", "two \nlines")],
    ]


def test_a_refused_turn_ends_a_pipe_with_one_line(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: m.Failed(None, None, "request", "too long: 9 of 8"))
    done = piped(daemon.path, "one\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "spark-chat: too long: 9 of 8\n")
    assert len(daemon.of(m.Generate)) == 1


def test_without_a_daemon_one_line_names_the_path(tmp_path: Any) -> None:
    done = piped(tmp_path / "none.sock", "one\n")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"spark-chat: no daemon at {tmp_path / 'none.sock'}: ")


def test_a_reader_that_leaves_early_causes_no_complaint(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: ["line\n"] * 20_000)
    command = [sys.executable, "-m", "spark_chat", "--socket", str(daemon.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_the_chat_loads_nothing_of_the_daemon_or_its_dependencies() -> None:
    program = "import sys, spark_chat.main; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sparkd", "numpy", "rich"} & set(loaded)


# ---- on a terminal ----


class Terminal:
    """The other end of the terminal that the chat runs on; `seen` is all it has shown."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        self.fd = fd
        self.process = process
        self.seen = ""
        self._from = 0

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, pattern: str) -> str:
        """Wait for a pattern in what was shown since the last one; pytest's timeout bounds the wait."""
        while not (found := re.search(pattern, self.seen[self._from :], re.DOTALL)):
            assert select.select([self.fd], [], [], 30)[0], f"never showed {pattern!r}, but {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode()
        self._from += found.end()
        return found[0]

    def ended(self) -> int:
        try:
            while select.select([self.fd], [], [], 30)[0] and (piece := os.read(self.fd, 4096)):
                self.seen += piece.decode()
        except OSError:  # A pty whose other end is closed reports EIO, not an empty read.
            pass
        return self.process.wait(30)


@contextmanager
def terminal(path: os.PathLike[str], *options: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "spark_chat", "--socket", str(path), *options]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=own_terminal, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours, process)
        finally:
            process.kill()
            os.close(ours)


def test_answers_stream_on_a_terminal_and_control_d_leaves(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=answer)
    with terminal(daemon.path) as screen:
        screen.until("model on fake; /help lists commands.*> ")
        screen.type("hello\r")
        screen.until("answer 1!.*> ")
        screen.type("/help\r")
        screen.until("/clear .*> ")
        screen.type("\x04")
        assert screen.ended() == 0
    assert "Traceback" not in screen.seen


def test_control_c_ends_the_answer_alone_and_what_came_is_remembered(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: ["part", " of it"] if len(ask.chat or ()) == 1 else ["more"], endless=True)
    with terminal(daemon.path) as screen:
        screen.until("> ")
        screen.type("first\r")
        screen.until("part of it")
        screen.type("\x03")
        screen.until(r"\(cut short\).*> ")
        assert daemon.wait_for(m.Cancel) == [m.Cancel(1000)]
        daemon.endless = False
        screen.type("second\r")
        screen.until("more.*> ")
        screen.type("/quit\r")
        assert screen.ended() == 0
    assert daemon.of(m.Generate)[1].chat == said("first", "part of it", "second")
    assert "Traceback" not in screen.seen


def test_control_c_at_the_prompt_drops_the_line_and_stays(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=answer)
    with terminal(daemon.path) as screen:
        screen.until("> ")
        screen.type("unwanted")
        screen.until("unwanted")
        # An interrupt just before the editor waits for a key is seen with the next one: press until it answers.
        while not select.select([screen.fd], [], [], 1)[0]:
            screen.type("\x03")
        screen.until(r"/quit leaves\).*> ")
        screen.type("wanted\r")
        screen.until("answer 1!.*> ")
        screen.type("/quit\r")
        assert screen.ended() == 0
    assert daemon.of(m.Generate)[0].chat == said("wanted")


def test_a_refused_turn_is_said_and_forgotten(fake_daemon: Start) -> None:
    daemon = fake_daemon(
        plan=lambda ask: m.Failed(None, None, "request", "too \x1b[31mlong") if "big" in str(ask.chat) else ["fine"]
    )
    with terminal(daemon.path) as screen:
        screen.until("> ")
        screen.type("big\r")
        screen.until(r"spark-chat: too \\x1b\[31mlong.*> ")
        screen.type("small\r")
        screen.until("fine.*> ")
        screen.type("/quit\r")
        assert screen.ended() == 0
    assert daemon.of(m.Generate)[1].chat == said("small")


def test_the_conversation_outlives_the_daemon(fake_daemon: Start) -> None:
    first = fake_daemon(plan=answer)
    with terminal(first.path) as screen:
        screen.until("> ")
        screen.type("one\r")
        screen.until("answer 1!.*> ")
        first.__exit__()
        first.path.unlink(missing_ok=True)
        screen.type("two\r")
        screen.until(r"spark-chat: .*(ended|no daemon).*> ")
        second = fake_daemon(plan=answer)
        screen.type("three\r")
        screen.until("answer 2!.*> ")
        screen.type("/quit\r")
        assert screen.ended() == 0
    assert second.of(m.Generate)[0].chat == said("one", "answer 1!", "three")


@pytest.mark.parametrize(
    ("stage", "shown"), [(("queued", 0, 0, 3), "3 requests before"), (("prefill", 9, 18, 0), "reading, 50 %")]
)
def test_waiting_is_shown_until_the_answer_begins(
    stage: tuple[str, int, int, int], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from spark_chat.session import _doing

    assert shown in _doing(m.Progress(1, *stage))
