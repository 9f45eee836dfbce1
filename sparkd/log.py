"""How every process of the daemon logs: one line an event, to standard error, its details as `key=value`.

    2026-03-01 12:03:04.123 info worker: ready pid=4711       for people, on a terminal or in a file
    <6>worker: ready pid=4711                                 for the journal, which keeps time and level itself

`configure` is called once in each process. Texts and token ids of requests are never logged, at any level.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time

#: What a value may hold to be written without quotes.
_PLAIN = re.compile(r"[\w.:/+@%-]+")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: sd-daemon's number of each level.
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def configure(role: str, level: str) -> None:
    """Log as `role` from now on: sparkd's lines from `level` (debug, info, warning, error) on, others' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(role, _to_journal()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of this process."""
    logging.getLogger("sparkd").setLevel(level.upper())


def last_words(error: Exception) -> None:
    """Say why the daemon ends: one plain line for people, an error for the journal."""
    sys.stderr.write(f"{'<3>' if _to_journal() else ''}sparkd: {_one_line(str(error))}\n")


def details(**values: object) -> str:
    """`key=value` for each that is not None; text that holds more than a word is quoted, so that it stays one value."""
    return " ".join(f"{key}={_written(value)}" for key, value in values.items() if value is not None)


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else '"' + _one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _one_line(text: str) -> str:
    """Text in which nothing ends the line or steers a terminal."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def _to_journal() -> bool:
    """Whether standard error is the journal's stream (systemd names it in $JOURNAL_STREAM as device:inode)."""
    try:
        stat = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"


class _Formatter(logging.Formatter):
    def __init__(self, role: str, journal: bool) -> None:
        super().__init__()
        self._role = role
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        lines = [f"{self._role}: {_one_line(record.getMessage())}"]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if self._journal:
            # The journal takes each line by itself.
            return "\n".join(f"<{_PRIORITIES.get(record.levelno, 6)}>{line}" for line in lines)
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{at}.{int(record.msecs):03d} {record.levelname.lower()} " + "\n".join(lines)
