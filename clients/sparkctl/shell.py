"""What a command line program does around its work: standard streams, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sparkctl.plain import one_line


def run(program: str, failures: tuple[type[Exception], ...], work: Callable[[], int]) -> int:
    """The exit code of `work`; 130 when it is interrupted; 1 after one of `failures`, said in one line.

    A reader of standard output that has left is no reason for words; one that cannot be written to is.
    """
    _open_streams()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except failures as error:
        print(f"{program}: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"{program}: {one_line(error)}", file=sys.stderr)
        # Python flushes standard output once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def add_socket(parser: argparse.ArgumentParser) -> None:
    """Which daemon: `socket` is None unless it was named, by itself or by the folder it lies in."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--socket", type=path, metavar="PATH", help="client socket of the daemon")
    where.add_argument(
        "--run-dir",
        dest="socket",
        type=_in_run_dir,
        metavar="DIR",
        help="run directory of the daemon, as of sparkd serve",
    )


def path(text: str) -> Path:
    """An argument that names a file or folder; an empty one is refused."""
    if not text:
        raise argparse.ArgumentTypeError("a path is not empty")
    return Path(text)


def _in_run_dir(text: str) -> Path:
    # With it comes the client, which takes time that a command of another kind has no use for.
    from spark_client.address import SOCKET_NAME

    return path(text) / SOCKET_NAME


def _open_streams() -> None:
    """Let streams that the caller closed lead nowhere; the next file or socket would be taken for one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
