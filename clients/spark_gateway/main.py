"""The gateway's process.

    sparkd-gateway [--host 127.0.0.1] [--port 8080] [--unix PATH] [--keys FILE] ...     serve
    sparkd-gateway key NAME                                                             make an API key

`sparkd serve` runs it when `gateway.enabled` is set.
"""

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
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from spark_client.address import find_socket
from spark_gateway.app import Config, Gateway
from spark_gateway.keys import Keys, KeysError, make
from spark_gateway.requests import defaults_of

#: Sampling where a request says nothing: what the makers of both families recommend has this in common.
SAMPLING = "temperature=1.0 top_p=0.95 top_k=20"
#: Connections at most; more are refused with 503.
_CONNECTIONS = 1024
_BACKLOG = 512
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("spark_gateway")


class _Unusable(Exception):
    """The gateway cannot serve as it is told: one line for people."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; one line on standard error and exit code 1 when that cannot be."""
    given = _parser().parse_args(argv)
    if given.command == "key":
        return _make_key(given.name)
    if given.parent is not None and not _die_with(given.parent):
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=given.log_level.upper())
    try:
        sockets = _sockets(given)
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
    except (_Unusable, KeysError, ValueError) as error:
        print(f"sparkd-gateway: {error}", file=sys.stderr)
        return 1
    options = uvicorn.Config(
        Gateway(config).app(),
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        ws="none",
        lifespan="on",
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(options).run(sockets=sockets)
    if given.unix is not None:
        given.unix.unlink(missing_ok=True)
    return 0


def _sockets(given: argparse.Namespace) -> list[socket.socket]:
    """What is listened at."""
    made = []
    if given.port is not None:
        family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
        try:
            tcp = socket.socket(family, socket.SOCK_STREAM)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((given.host, given.port))
        except OSError as error:
            why = f"{given.host} port {given.port}: {error.strerror}"
            raise _Unusable(f"{why}; name another with --port, or gateway.port") from None
        made.append(tcp)
        print(f"sparkd-gateway: http://{given.host}:{tcp.getsockname()[1]}/", file=sys.stderr, flush=True)
    if given.unix is not None:
        made.append(_unix(given.unix))
    if not made:
        raise _Unusable("nothing to listen at: give --port or --unix")
    for one in made:
        one.listen(_BACKLOG)
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


def _make_key(name: str) -> int:
    key, line = make(name)
    print(f"the key, which is shown only once:\n  {key}\nthe line for the file that gateway.keys names:\n  {line}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparkd-gateway", description="HTTP in front of a running sparkd.")
    parser.add_argument("--socket", type=Path, help="client socket of the daemon (default: as for sparkctl)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8080, help="TCP port; 0: any free; none: no TCP (default: 8080)")
    parser.add_argument("--unix", type=Path, metavar="PATH", help="Unix socket to listen at as well")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="API keys, hashed; without it everybody may ask")
    parser.add_argument("--aliases", default="", help="other names of the model, with commas; * is any name")
    parser.add_argument("--sampling", default=SAMPLING, help=f"sampling where a request is silent ({SAMPLING!r})")
    parser.add_argument("--cors", default="", help="origins whose pages may ask, with commas (default: none)")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process ends, which started it")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    key = commands.add_parser("key", help="make an API key")
    key.add_argument("name", help="who will hold it")
    return parser


def _port(text: str) -> int | None:
    if text == "none":
        return None
    if text.isdecimal() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port")


if __name__ == "__main__":
    sys.exit(main())
