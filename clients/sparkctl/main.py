"""sparkctl: look at a running daemon, ask it for text, inspect model files.

Exit codes: 0 done, 1 failed (one line on standard error), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from spark_client.errors import SparkClientError
from sparkctl.plain import one_line
from sparkd import __version__
from sparkd.errors import SparkError

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = _dispatch(args, parser)
        sys.stdout.flush()
        return code
    except (SparkClientError, SparkError) as error:
        print(f"sparkctl: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Import what the command needs, and nothing more, then run it."""
    match args.command:
        case "status":
            from sparkctl import status

            return status.run(args)
        case "inspect":
            from sparkctl import inspect

            return inspect.run(args)
        case "generate":
            from sparkctl import generate

            return generate.run(args, parser)
        case "config":
            from sparkctl import config

            return config.run(args)
        case _:
            from sparkctl import tokenize

            return tokenize.run(args, parser)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkctl",
        description="Look at a running sparkd, ask it for text, inspect model files.",
        epilog="The socket is found through $SPARKD_SOCKET_PATH, $SPARKD_RUN_DIR, $RUNTIME_DIRECTORY, then "
        "$XDG_RUNTIME_DIR/sparkd and /run/sparkd. 'sparkctl COMMAND --help' shows options and an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparkctl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_status(commands)
    _add_generate(commands)
    _add_tokenize(commands)
    _add_inspect(commands)
    _add_config(commands)
    return parser


def _command(commands: _Commands, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a path is not empty")
    return Path(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from None
    return text


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", type=_path, metavar="PATH", help="client socket of the daemon")
    parser.add_argument(
        "--timeout", type=_seconds, default=10.0, metavar="S", help="seconds to wait for an answer (default: 10)"
    )


def _add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"write JSON: {what}")


def _add_status(commands: _Commands) -> None:
    parser = _command(
        commands,
        "status",
        "show what the daemon does and where the weights are",
        "  sparkctl status\n  sparkctl status --json | jq .state",
    )
    _add_connection(parser)
    _add_json(parser, "the whole status document")


def _add_inspect(commands: _Commands) -> None:
    parser = _command(
        commands,
        "inspect",
        "show what a model file holds; needs no daemon",
        "  sparkctl inspect model.gguf\n  sparkctl inspect model-00001-of-00003.gguf --json",
    )
    parser.add_argument("file", type=Path, help="GGUF file, any part of a split set, or a folder that holds one model")
    parser.add_argument("--layers", action="store_true", help="also list every block")
    _add_json(parser, "the report")


def _add_generate(commands: _Commands) -> None:
    parser = _command(
        commands,
        "generate",
        "continue a text or, with --chat, answer a message",
        "  sparkctl generate --max-tokens 40 'And the LORD spake unto Moses, saying,'\n"
        "  sparkctl generate --chat 'Who are you?'\n"
        "  sparkctl generate --chat --json < question.txt",
    )
    parser.add_argument(
        "prompt", nargs="*", type=_text, help="the prompt (several words are joined); default: standard input"
    )
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--system", type=_text, metavar="TEXT", help="system message before it (with --chat)")
    parser.add_argument("--think", action="store_true", help="let the model think first (with --chat)")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most output tokens (default: 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token each time (default: 0)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K best (default: 0, all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the best that sum up to P (default: 1, all)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: drawn)")
    parser.add_argument(
        "--stop", action="append", type=_text, default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    parser.add_argument("--stats", action="store_true", help="tokens and speed on standard error at the end")
    _add_connection(parser)
    _add_json(parser, "text, tokens and figures, all at the end")


def _add_tokenize(commands: _Commands) -> None:
    parser = _command(
        commands,
        "tokenize",
        "show the token ids of a text",
        "  sparkctl tokenize 'Hello world'\n  sparkctl tokenize --json < file.txt",
    )
    parser.add_argument(
        "text", nargs="*", type=_text, help="the text (several words are joined); default: standard input"
    )
    parser.add_argument("--special", action="store_true", help="control tokens spelled in the text become their ids")
    _add_connection(parser)
    _add_json(parser, "the ids")


def _add_config(commands: _Commands) -> None:
    parser = _command(
        commands,
        "config",
        "show each setting, where its value came from, and what the running daemon goes by",
        "  sparkctl config\n  SPARKD_CPU_THREADS=2 sparkctl config --json",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read this file instead of /etc/sparkd and ~/.config/sparkd"
    )
    _add_connection(parser)
    _add_json(parser, "value, origin and running value of each setting")
