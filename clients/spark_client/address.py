"""Where the client socket of a daemon lies, and what is wrong with it where none answers."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from spark_client.errors import ConnectionFailed

SOCKET_NAME = "client.sock"
SYSTEM_SOCKET = Path("/run/sparkd") / SOCKET_NAME
#: Longest path of a socket file on Linux.
_PATH_BYTES = 107
#: struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("=iII")


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


def probe(path: Path) -> int:
    """The process that listens at `path`, as the kernel knows it (0: outside of this process's sight).

    ConnectionFailed when nobody does: ZeroMQ's connect never fails, a plain one says at once what is wrong.
    """
    try:
        length = len(str(path).encode())
    except UnicodeEncodeError:
        raise ConnectionFailed(f"{path}: a socket path is UTF-8; use another one") from None
    if length > _PATH_BYTES:
        raise ConnectionFailed(f"{path}: a socket path has at most {_PATH_BYTES} bytes; use a shorter one")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            raise ConnectionFailed(_explain(path, error)) from None
        (pid, _, _) = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return int(pid)


def _explain(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"no daemon at {path}: start one with 'sparkd serve MODEL', or name its socket in SPARKD_SOCKET_PATH"
    if error.errno == errno.ECONNREFUSED and not path.is_socket():
        return f"{path} is not a socket; the daemon says where its client socket lies when it starts"
    if error.errno == errno.ECONNREFUSED:
        return f"no daemon listens at {path} (it ended and left its socket): start one with 'sparkd serve MODEL'"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path}: permission denied; its owner can let a group in with the setting socket.group"
    return f"{path}: {error.strerror or error}"
