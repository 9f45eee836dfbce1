"""spark-chat: talk to the model that sparkd serves.

On a terminal lines are edited and remembered as long as the program runs; nothing is written to disk. From a pipe, each
line is a turn, and only the answers come out.

Exit codes: 0 done, 1 failed (one line on standard error), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version

from spark_chat.session import Session
from spark_client import Parameters, SparkClientError
from sparkctl import shell


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the input ends; returns the exit code."""
    return shell.run("spark-chat", (SparkClientError,), lambda: _chat(_parser().parse_args(argv)))


def _chat(args: argparse.Namespace) -> int:
    parameters: Parameters = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "max_tokens": args.max_tokens,
        "parts": True,
    }
    if args.seed is not None:
        parameters["seed"] = args.seed
    if args.tag:
        parameters["traffic_tag"] = args.tag
    session = Session(args.socket, args.system, {"enable_thinking": True} if args.think else {}, parameters)
    with closing(session):
        return session.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spark-chat",
        description="Talk to the model that sparkd serves. /help lists what can be typed besides text.",
        epilog="examples:\n  spark-chat --system 'Answer in one sentence.'\n"
        "  printf 'Who are you?\\nSay it shorter.\\n' | spark-chat",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"spark-chat {version('sparkd')}")
    shell.add_socket(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--think", action="store_true", help="let the model think first")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="most tokens of an answer (1024)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 takes the best token (0.7)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="from the best that sum up to P (0.95)")
    parser.add_argument("--tag", default="", metavar="NAME", help="learn what experts this traffic uses as NAME's")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answers (drawn)")
    return parser
