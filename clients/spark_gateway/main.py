"""The gateway's process: what it listens at, and how it begins and ends."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import socket
import stat
import sys
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from spark_client.address import find_socket
from spark_gateway import log
from spark_gateway.app import Config, Gateway
from spark_gateway.keys import Keys, KeysError
from spark_gateway.requests import defaults_of

#: Connections at most; more are refused with 503.
_CONNECTIONS = 1024
_BACKLOG = 512
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("spark_gateway")


class _Unusable(Exception):
    """The gateway cannot serve as it is told: one line for people."""


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    def __init__(self, config: uvicorn.Config, parent: bool) -> None:
        super().__init__(config)
        self._parent = parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        if self.started:
            where = " ".join(_address(one) for one in sockets or [])
            _log.info("listens at %s", where)
            if self._parent:
                _tell("listens", where)


def serve(given: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; one line on standard error and exit code 1 when that cannot be."""
    if given.parent is not None and not _die_with(given.parent):
        return 0
    log.configure(given.log_level)
    try:
        app = Gateway(_config(given)).app()
        sockets = _sockets(given)
    except (_Unusable, KeysError, ValueError) as error:
        print(f"sparkd-gateway: {error}", file=sys.stderr)
        if given.parent is not None:
            _tell("unusable", str(error))
        return 1
    options = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        ws="none",
        lifespan="on",
    )
    server = _Server(options, given.parent is not None)
    try:
        # When it is done, uvicorn raises the signal that ended it once more: SIGTERM leaves with code 0 (`__main__`).
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=sockets)
    finally:
        if given.unix is not None:
            given.unix.unlink(missing_ok=True)
    return 0 if server.started else 1


def _config(given: argparse.Namespace) -> Config:
    config = Config(
        socket=given.socket or find_socket(),
        keys=Keys(given.keys),
        aliases=frozenset(name.strip() for name in given.aliases.split(",") if name.strip()),
        defaults=defaults_of(given.sampling),
        cors=tuple(origin.strip() for origin in given.cors.split(",") if origin.strip()),
        local=_is_local(given.host),
    )
    if not config.local and not config.keys.needed:
        raise _Unusable(f"{given.host} can be reached from other machines: give API keys (--keys FILE)")
    return config


def _tell(what: str, text: str) -> None:
    """A line for the daemon that started this process."""
    with contextlib.suppress(OSError):
        print(what, " ".join(text.split()), flush=True)


def _address(one: socket.socket) -> str:
    if one.family == socket.AF_UNIX:
        return f"unix:{one.getsockname()}"
    host, port = one.getsockname()[:2]
    return f"http://[{host}]:{port}/" if one.family == socket.AF_INET6 else f"http://{host}:{port}/"


def _sockets(given: argparse.Namespace) -> list[socket.socket]:
    """What is listened at."""
    made = []
    if given.port is not None:
        family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
        try:
            tcp = socket.socket(family, socket.SOCK_STREAM)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((given.host, given.port))
            tcp.listen(_BACKLOG)
        except OSError as error:
            why = f"{given.host} port {given.port}: {error.strerror}"
            raise _Unusable(f"{why}; name another with --port, or gateway.port") from None
        made.append(tcp)
    if given.unix is not None:
        made.append(_unix(given.unix))
    if not made:
        raise _Unusable("nothing to listen at: give --port or --unix")
    for one in made:
        one.setblocking(False)
    return made


def _unix(path: Path) -> socket.socket:
    """A Unix socket for owner and group; one that a dead gateway left is replaced."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            try:
                made.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                made.close()
                made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            else:
                raise _Unusable(f"{path}: another program listens there")
        mask = os.umask(0o117)
        try:
            made.bind(str(path))
        finally:
            os.umask(mask)
        made.listen(_BACKLOG)
    except OSError as error:
        raise _Unusable(f"{path}: {error.strerror or error}") from None
    return made


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        raise _Unusable(f"--host {host!r} is not an address") from None


def _die_with(parent: int) -> bool:
    """Have the kernel end this process when the one that started it ends; false when it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
