"""The supervisor's process: plans, makes the arena, starts the others, serves the client socket.

python -m sparkd.supervisor.main --settings JSON [--run-dir DIR]     (`sparkd serve` is the command for people)
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import zmq

from sparkd import log
from sparkd.config import Settings
from sparkd.errors import SparkError
from sparkd.ipc.sockets import RunDirectory
from sparkd.supervisor.arena import prepare
from sparkd.supervisor.notify import Notifier, take_kept
from sparkd.supervisor.reload import group_id
from sparkd.supervisor.run_lock import RunLock
from sparkd.supervisor.supervisor import Supervisor

#: Exit code after a fault of its own: a service manager may try again, unlike after one that people must mend.
_FAULT = 70
_log = logging.getLogger(__name__)


def run(
    settings: Settings,
    run_dir: RunDirectory,
    ready: Callable[[], None] | None = None,
    read: Callable[[], Settings] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; `ready` is called once when requests are answered. Returns the exit code.

    `read` gives the settings as they are written now, for SIGHUP. SparkError when the daemon cannot start: the plan
    does not fit, another daemon is there, a child refuses.
    """
    log.configure("sparkd", settings.log.level)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    notify, kept = Notifier.take(os.environ), take_kept(os.environ)
    try:
        with RunLock(run_dir, _client_path(settings, run_dir), group_id(settings.socket.group)) as lock:
            notify.status("planning")
            plan, region = prepare(settings, notify, kept)
            with (
                region as arena,
                zmq.Context() as context,
                closing(Supervisor(settings, plan, arena, context, lock, notify, read)) as supervisor,
            ):
                supervisor.run(ready)
    except SparkError:
        raise
    except Exception:
        _log.critical("the daemon ends by a fault of its own", exc_info=True)
        return _FAULT
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon; one line on standard error and exit code 1 when it cannot start."""
    parser = argparse.ArgumentParser(prog="sparkd-supervisor", description=main.__doc__)
    parser.add_argument("--settings", required=True, help="all settings, as JSON")
    parser.add_argument("--run-dir", type=Path, help="folder of the sockets")
    given = parser.parse_args(argv)
    try:
        run_dir = RunDirectory(given.run_dir.absolute()) if given.run_dir else RunDirectory.default()
        return run(Settings.from_json(given.settings), run_dir)
    except SparkError as error:
        log.last_words(error)
        return 1


def _client_path(settings: Settings, run_dir: RunDirectory) -> Path:
    return Path(settings.socket.path).expanduser().absolute() if settings.socket.path else run_dir.client


if __name__ == "__main__":
    sys.exit(main())
