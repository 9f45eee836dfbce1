"""The command line of `sparkd-gateway`; it needs none of the libraries that serving does."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Sampling where a request says nothing: what the makers of both families recommend has this in common.
SAMPLING = "temperature=1.0 top_p=0.95 top_k=20"
_EXAMPLE = """\
example, beside a running sparkd:
  sparkd-gateway key alice >> keys
  sparkd-gateway --keys keys --port 8080 &
  curl http://127.0.0.1:8080/v1/models -H 'Authorization: Bearer KEY'
"""
_KEY = """\
Prints the line for the file that --keys (gateway.keys) names to standard output, and the key itself, which nothing
keeps, to standard error: 'sparkd-gateway key alice >> keys' adds the line and shows the key.
"""


def parser() -> argparse.ArgumentParser:
    """What may be given; `command` is None (serve) or "key"."""
    made = argparse.ArgumentParser(
        prog="sparkd-gateway",
        description="HTTP in front of a running sparkd.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"sparkd-gateway {_version()}")
    made.add_argument("--socket", type=Path, help="client socket of the daemon (default: as for sparkctl)")
    made.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    made.add_argument("--port", type=_port, default=8080, help="TCP port; 0: any free; none: no TCP (default: 8080)")
    made.add_argument("--unix", type=Path, metavar="PATH", help="Unix socket to listen at as well")
    made.add_argument("--keys", type=Path, metavar="FILE", help="API keys, hashed; without it everybody may ask")
    made.add_argument("--aliases", default="", help="other names of the model, with commas; * is any name")
    made.add_argument("--sampling", default=SAMPLING, help=f"sampling where a request is silent ({SAMPLING!r})")
    made.add_argument("--cors", default="", help="origins whose pages may ask, with commas (default: none)")
    made.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    # The daemon that starts it: it ends with that, and tells it on standard output where it listens, or why not.
    made.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    commands = made.add_subparsers(dest="command", metavar="[COMMAND]")
    key = commands.add_parser("key", help="make an API key", description=_KEY)
    key.add_argument("name", help="who will hold it: up to 64 letters, digits, '_', '.' and '-'")
    return made


def _version() -> str:
    try:
        return version("sparkd")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def _port(text: str) -> int | None:
    if text == "none":
        return None
    if text.isdecimal() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port")
