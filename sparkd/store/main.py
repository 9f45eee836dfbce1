"""The store's process: fills the arena, then answers workers on store.sock.

python -m sparkd.store.main --run-dir DIR --settings JSON --arena-fd N [--parent PID]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sparkd import log
from sparkd.config import Settings
from sparkd.ipc.child import parse_arguments, run_child
from sparkd.ipc.turns import take_short_turns
from sparkd.store.server import StoreServer

ROLE = "store"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until Stop, SIGTERM, or a failure that the supervisor is told about."""
    given = parse_arguments(ROLE, argv)
    log.configure(ROLE, Settings.from_json(given.settings).log.level)
    # Steps wait for it, beside the threads that compute them.
    take_short_turns()
    return run_child(ROLE, given, lambda child: StoreServer(child, given))


if __name__ == "__main__":
    sys.exit(main())
