"""The calibrator's process: counts which experts the workers' tokens were routed to.

python -m sparkd.calibration.main --run-dir DIR --settings JSON [--parent PID]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sparkd import log
from sparkd.calibration.collector import Collector
from sparkd.config import Settings
from sparkd.ipc.child import parse_arguments, run_child

ROLE = "calibrator"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until Stop, SIGTERM, or a failure that the supervisor is told about."""
    given = parse_arguments(ROLE, argv)
    log.configure(ROLE, Settings.from_json(given.settings).log.level)
    return run_child(ROLE, given, lambda child: Collector(child, given))


if __name__ == "__main__":
    sys.exit(main())
