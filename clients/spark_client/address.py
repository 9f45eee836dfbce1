"""Where the client socket of a daemon lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SOCKET_NAME = "client.sock"
SYSTEM_SOCKET = Path("/run/sparkd") / SOCKET_NAME


def find_socket(environment: Mapping[str, str] | None = None) -> Path:
    """The socket a client connects to when none is named.

    $SPARKD_SOCKET_PATH, $SPARKD_RUN_DIR and $RUNTIME_DIRECTORY decide alone, in this order. Without them the user's own
    daemon ($XDG_RUNTIME_DIR/sparkd) is taken if its socket exists, else the system's (/run/sparkd) if that exists.
    When there is no socket at all the first place is returned, for the error message.
    """
    env = os.environ if environment is None else environment
    if env.get("SPARKD_SOCKET_PATH"):
        return Path(env["SPARKD_SOCKET_PATH"])
    for variable in ("SPARKD_RUN_DIR", "RUNTIME_DIRECTORY"):
        if env.get(variable):
            # systemd puts several directories into one variable, separated by colons.
            return Path(env[variable].split(":")[0]) / SOCKET_NAME
    if not env.get("XDG_RUNTIME_DIR"):
        return SYSTEM_SOCKET
    own = Path(env["XDG_RUNTIME_DIR"]) / "sparkd" / SOCKET_NAME
    return SYSTEM_SOCKET if not own.exists() and SYSTEM_SOCKET.exists() else own
