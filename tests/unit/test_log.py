"""One line an event, for people and for the journal; details stay one value each, whatever an app calls itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkd.log import details

LOGS = """
import logging, sys
from sparkd import log
log.configure("worker", sys.argv[1])
made = logging.getLogger("sparkd.worker.server")
for level in ("debug", "info", "warning", "error"):
    getattr(made, level)("%s line", level)
logging.getLogger("library").info("chatter")
logging.getLogger("library").warning("trouble")
made.info("two\\nlines \\x1b[31m %s", log.details(client="a\\nb", pid=7))
try:
    1 / 0
except ZeroDivisionError:
    made.exception("impossible")
"""


def logged(level: str, **environment: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"} | environment
    done = subprocess.run([sys.executable, "-c", LOGS, level], stderr=subprocess.PIPE, text=True, env=env, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_lines_below_the_level_are_left_out_and_libraries_say_only_warnings(level: str, lines: int) -> None:
    shown = logged(level)
    assert sum(line.endswith(" line") for line in shown) == lines
    assert sum("trouble" in line for line in shown) == 1 and not any("chatter" in line for line in shown)


def test_a_line_says_when_how_bad_and_which_process() -> None:
    (line,) = (line for line in logged("info") if line.endswith("warning line"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} warning worker: warning line", line)


def test_nothing_in_a_message_can_end_its_line_or_steer_a_terminal() -> None:
    (line,) = (line for line in logged("info") if "two" in line)
    assert line.endswith(r'worker: two\nlines \x1b[31m client="a\nb" pid=7')


def test_the_journal_gets_a_priority_for_every_line_and_no_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with path.open("w") as stream:
        stat = os.fstat(stream.fileno())
        env = os.environ | {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
        subprocess.run([sys.executable, "-c", LOGS, "debug"], stderr=stream, env=env, check=True)
    lines = path.read_text().splitlines()
    expected = ["<7>worker: debug", "<6>worker: info", "<4>worker: warning", "<3>worker: error"]
    assert lines[:4] == [f"{start} line" for start in expected]
    traceback = lines[lines.index("<3>worker: impossible") + 1 :]
    assert len(traceback) > 2 and all(line.startswith("<3>") for line in traceback)


def test_details_are_plain_words_or_quoted_and_missing_ones_are_left_out() -> None:
    written = details(request=3, client='my "app"\\', seconds=0.12345, stop=None, path="/a/b.gguf", nothing="")
    assert written == r'request=3 client="my \"app\"\\" seconds=0.123 path=/a/b.gguf nothing=""'


def test_why_a_daemon_ends_is_a_plain_line_for_people_and_an_error_in_the_journal(tmp_path: Path) -> None:
    program = "from sparkd import log; log.last_words(ValueError('no model\\nto serve'))"
    shown = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert shown == "sparkd: no model\\nto serve\n"
    path = tmp_path / "journal"
    with path.open("w") as stream:
        stat = os.fstat(stream.fileno())
        env = os.environ | {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
        subprocess.run([sys.executable, "-c", program], stderr=stream, env=env, check=True)
    assert path.read_text() == "<3>sparkd: no model\\nto serve\n"
