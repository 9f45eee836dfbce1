"""`sparkctl logs`: the last lines of the daemon's log, wherever its standard error goes."""

from __future__ import annotations

import argparse
import shutil
import stat
import subprocess
import sys
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import TextIO

from spark_client import SparkClientError
from spark_client.address import find_socket
from sparkctl.plain import printable
from sparkctl.process import DaemonProcess

#: The service of the unit files that come with sparkd; asked when no daemon runs.
_SERVICE = "sparkd.service"
_LOOK_S = 0.25


def run(args: argparse.Namespace) -> int:
    """Print the log, from the journal or a file; one that goes elsewhere is named."""
    try:
        daemon = DaemonProcess.at(args.socket or find_socket())
    except SparkClientError as error:
        if not _journal_has(_SERVICE):
            raise SparkClientError(f"{error}; a log in a file of your own can be read there") from None
        return _journal(_SERVICE, False, args)
    with closing(daemon):
        # Of another user's service one may not see where its log goes; a service's goes to the journal.
        if daemon.unit and (daemon.log.startswith("socket:") or not daemon.log):
            return _journal(daemon.unit, daemon.user_unit, args)
        return _file(daemon, args)


def _journal(unit: str, of_user: bool, args: argparse.Namespace) -> int:
    """Leave it to journalctl, which knows how to follow."""
    command = ["journalctl", *(["--user"] if of_user else []), "--unit", unit, "--lines", str(args.lines)]
    command += ["--output", "cat" if not sys.stdout.isatty() else "short-iso"]
    command += ["--follow"] if args.follow else ["--no-pager"]
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise SparkClientError(f"the log is in the journal, and journalctl cannot be run: {error.strerror}") from None


def _journal_has(unit: str) -> bool:
    return shutil.which("journalctl") is not None and any(
        (Path(folder) / unit).exists() for folder in ("/etc/systemd/system", "/usr/lib/systemd/system")
    )


def _file(daemon: DaemonProcess, args: argparse.Namespace) -> int:
    where = daemon.log
    if not where:
        raise SparkClientError(
            f"process {daemon.pid} belongs to {daemon.user}, who alone may see where its log goes: run this as them"
        )
    # The link's own target may have been renamed or removed; the descriptor is the file that is written.
    path = Path(f"/proc/{daemon.pid}/fd/2")
    if not stat.S_ISREG(path.stat().st_mode):
        what = "the terminal " + where if daemon.on_terminal else where
        raise SparkClientError(
            f"process {daemon.pid} writes its log to {what}, which cannot be read back: look there, or start it with"
            " '2> FILE' or as a service"
        )
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in deque(log, args.lines):
            _write(line)
        if args.follow:
            _follow(log, daemon)
    return 0


def _follow(log: TextIO, daemon: DaemonProcess) -> None:
    """Until the daemon ends, or Ctrl-C."""
    over = False
    while not over:
        over = daemon.ended(_LOOK_S)
        for line in log:
            _write(line)


def _write(line: str) -> None:
    sys.stdout.write(printable(line))
    sys.stdout.flush()
