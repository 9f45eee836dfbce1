"""The supervisor's process: plans, makes the arena, starts the others, serves the client socket.

python -m sparkd.supervisor.main --settings JSON [--run-dir DIR]     (`sparkd serve` is the command for people)
"""

from __future__ import annotations

import argparse
import grp
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import zmq

from sparkd import log
from sparkd.config import Settings
from sparkd.errors import ConfigError, SparkError
from sparkd.ipc.memory import Region
from sparkd.ipc.sockets import RunDirectory
from sparkd.supervisor.planning import plan
from sparkd.supervisor.run_lock import RunLock
from sparkd.supervisor.supervisor import ClientSocket, Supervisor


def run(settings: Settings, run_dir: RunDirectory, ready: Callable[[], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; `ready` is called once when requests are answered. Returns the exit code.

    SparkError when the daemon cannot start: the plan does not fit, another daemon is there, a child refuses.
    """
    log.configure("sparkd", settings.log.level)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    client = ClientSocket(_client_path(settings, run_dir), _group(settings.socket.group))
    with RunLock(run_dir, client.path, client.group):
        planned = plan(settings)
        with (
            Region.create(planned.arena_bytes) as arena,
            zmq.Context() as context,
            closing(Supervisor(settings, run_dir, planned, arena, context, client)) as supervisor,
        ):
            supervisor.run(ready)
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
        sys.stderr.write(f"sparkd: {error}\n")
        return 1


def _client_path(settings: Settings, run_dir: RunDirectory) -> Path:
    return Path(settings.socket.path).expanduser().absolute() if settings.socket.path else run_dir.client


def _group(name: str) -> int:
    if not name:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"no group {name!r} on this machine", where="socket.group") from None


if __name__ == "__main__":
    sys.exit(main())
