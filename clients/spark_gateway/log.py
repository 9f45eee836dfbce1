"""Logs as the daemon does (sparkd/log.py): one line an event, details as `key=value`, priorities for the journal.

Texts of requests are never logged, at any level.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time

_PLAIN = re.compile(r"[\w.:/+@%-]+")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def configure(level: str) -> None:
    """Log to standard error from now on: the gateway's lines from `level` on, its libraries' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("spark_gateway").setLevel(level.upper())


def details(**values: object) -> str:
    """`key=value` for each that is not None; text that holds more than a word is quoted."""
    return " ".join(f"{key}={_written(value)}" for key, value in values.items() if value is not None)


def _written(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else '"' + _one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _one_line(text: str) -> str:
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        stat = os.fstat(sys.stderr.fileno())
        self._journal = os.environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"

    def format(self, record: logging.LogRecord) -> str:
        lines = [f"gateway: {_one_line(record.getMessage())}"]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if self._journal:
            return "\n".join(f"<{_PRIORITIES.get(record.levelno, 6)}>{line}" for line in lines)
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{at}.{int(record.msecs):03d} {record.levelname.lower()} " + "\n".join(lines)
