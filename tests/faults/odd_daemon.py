"""A daemon whose worker goes wrong on order (`odd_worker`), and which loses patience sooner than a real one."""

from __future__ import annotations

import os
from pathlib import Path

from daemon import Daemon

LOST_S, STUCK_S, DRAIN_S = 4.0, 6.0, 2.0
_SCRIPT = f"""
from sparkd.supervisor import children, pulse, supervisor
from sparkd.supervisor.main import main
children._MODULES["worker"] = "odd_worker"
pulse.LOST_S, pulse.STUCK_S, supervisor.DRAIN_S = {LOST_S}, {STUCK_S}, {DRAIN_S}
raise SystemExit(main())
"""


class OddDaemon(Daemon):
    """See above."""

    PROGRAM = ("-c", _SCRIPT)
    ENVIRONMENT = {  # noqa: RUF012
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    }
