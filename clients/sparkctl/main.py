"""sparkctl: look at a running daemon, ask it for text, inspect model files.

Exit codes: 0 done, 1 failed (one line on standard error), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from spark_client.errors import SparkClientError
from sparkctl import shell
from sparkctl.arguments import make_parser
from sparkd.errors import SparkError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    return shell.run("sparkctl", (SparkClientError, SparkError), lambda: _dispatch(_parsed(argv)))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; one that a command does not know is refused with the usage of that command."""
    args, unknown = make_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _dispatch(args: argparse.Namespace) -> int:
    """Import what the command needs, and nothing more, then run it."""
    match args.command:
        case "status":
            from sparkctl import status

            return status.run(args)
        case "inspect":
            from sparkctl import inspect

            return inspect.run(args)
        case "plan":
            from sparkctl import plan

            return plan.run(args)
        case "profile":
            from sparkctl import profile

            return profile.run(args)
        case "trace":
            from sparkctl import trace

            return trace.run(args)
        case "generate":
            from sparkctl import generate

            return generate.run(args)
        case "config":
            from sparkctl import config

            return config.run(args)
        case "clients" | "requests":
            from sparkctl import traffic

            return traffic.clients(args) if args.command == "clients" else traffic.requests(args)
        case "stop" | "drain" | "reload":
            from sparkctl import control

            return {"stop": control.stop, "drain": control.drain, "reload": control.reload}[args.command](args)
        case "doctor":
            from sparkctl import doctor

            return doctor.run(args)
        case "logs":
            from sparkctl import logs

            return logs.run(args)
        case _:
            from sparkctl import tokenize

            return tokenize.run(args)
