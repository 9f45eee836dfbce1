"""The command line of sparkctl: every command with its options and an example."""

from __future__ import annotations

import argparse
import math
import threading
from pathlib import Path
from typing import TypeAlias

from sparkctl.shell import add_socket, path
from sparkd import __version__

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def make_parser() -> argparse.ArgumentParser:
    """All commands; `command` in the result names the one that was given."""
    parser = argparse.ArgumentParser(
        prog="sparkctl",
        description="Look at a running sparkd, ask it for text, inspect model files.",
        epilog="The socket is found through $SPARKD_SOCKET_PATH, $SPARKD_RUN_DIR, $RUNTIME_DIRECTORY, then "
        "$XDG_RUNTIME_DIR/sparkd and /run/sparkd. 'sparkctl COMMAND --help' shows options and an example. "
        "Example: sparkctl status --watch",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparkctl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_status(commands)
    _add_generate(commands)
    _add_tokenize(commands)
    _add_inspect(commands)
    _add_plan(commands)
    _add_profile(commands)
    _add_trace(commands)
    _add_config(commands)
    _add_traffic(commands)
    _add_control(commands)
    _add_logs(commands)
    _add_doctor(commands)
    return parser


def _command(commands: _Commands, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.set_defaults(parser=made)
    return made


def _add_connection(parser: argparse.ArgumentParser) -> None:
    add_socket(parser)
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
        "  sparkctl status\n  sparkctl status --watch\n  sparkctl status --json | jq .state",
    )
    parser.add_argument(
        "--watch", type=_seconds, nargs="?", const=1.0, metavar="S", help="show it every S seconds (1) until Ctrl-C"
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


def _add_plan(commands: _Commands) -> None:
    parser = _command(
        commands,
        "plan",
        "tell what serving a model would take and how fast it would be; reads headers only, needs no daemon",
        "  sparkctl plan model.gguf\n"
        "  sparkctl plan model.gguf --gpu rtx-3090 --vram 16 --context 32768\n"
        "  sparkctl plan model.gguf --host 16 --vram 8 --link pcie3x16 --json",
    )
    parser.add_argument("model", type=path, help="GGUF file, any part of a split set, or a folder that holds one model")
    parser.add_argument(
        "--host", type=_size, metavar="GIB", help="host memory for the weights (default: what this machine has)"
    )
    parser.add_argument("--context", type=int, metavar="N", help="positions of a sequence (default: the setting)")
    parser.add_argument("--sequences", type=int, metavar="N", help="sequences at once (default: the setting)")
    parser.add_argument("--gpu", type=_text, metavar="NAME", help="a card, such as rtx-3090")
    parser.add_argument(
        "--vram", type=_size, metavar="GIB", help="memory of the card to use (default: all of it but a margin)"
    )
    parser.add_argument(
        "--link", type=_text, metavar="NAME|GB/s", help="between host and card (default: the card's own; pcie4x16, 25)"
    )
    parser.add_argument("--ring", type=_slots, metavar="N", help="ring slots of each expert layer (default: 32)")
    parser.add_argument(
        "--host-bandwidth",
        type=_rate,
        metavar="GB/s",
        help="of the host's memory (default: 51.2)",
    )
    parser.add_argument("--disk-bandwidth", type=_rate, metavar="GB/s", help="of the disk (default: 3)")
    parser.add_argument(
        "--config", type=path, metavar="FILE", help="read this file instead of /etc/sparkd and ~/.config/sparkd"
    )
    _add_json(parser, "bytes per tier, residency, hits, and every term of both speeds")


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
    _add_sampling(parser)
    parser.add_argument(
        "--stop", action="append", type=_text, default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    parser.add_argument(
        "--deadline", type=_seconds, metavar="S", help="fail when it takes longer (default: the daemon's limit)"
    )
    parser.add_argument(
        "--tag", default="", metavar="NAME", help="a name for the kind of traffic, under which its experts are learned"
    )
    parser.add_argument("--stats", action="store_true", help="tokens and speed on standard error at the end")
    _add_connection(parser)
    _add_json(parser, "text, tokens and figures, all at the end")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the best token each time (default: 0)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K best (default: 0, all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the best that sum up to P (default: 1, all)"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="only those P times as likely as the best (default: 0, all)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="make what prompt or output hold less likely (default: 1, no)",
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="make what the output holds less likely (default: 0, no)",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="F",
        help="the same, by how often it is there (default: 0, no)",
    )
    parser.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        default=[],
        metavar="ID=B",
        help="make a token more likely, or less (B from -100 to 100); repeatable",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: drawn)")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log probabilities of each token and the N best ones"
    )


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


def _add_profile(commands: _Commands) -> None:
    parser = _command(
        commands,
        "profile",
        "show what was learned of a model's traffic and what that is worth; carry its counts in and out",
        "  sparkctl profile\n"
        "  sparkctl profile model.gguf --json\n"
        "  sparkctl profile model.gguf --export counts.csv --tag coding",
    )
    parser.add_argument("model", nargs="?", type=path, help="model file (default: the one that is served)")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--export", type=path, metavar="FILE", help="write the counts: layer,expert,count; a new file")
    way.add_argument(
        "--import", dest="import_", type=path, metavar="FILE", help="take counts from such a file; no daemon may run"
    )
    parser.add_argument("--tag", metavar="NAME", help="with --export or --import: the counts of this tag alone")
    _add_connection(parser)
    _add_json(parser, "hits, speeds, drift, tags")


def _add_trace(commands: _Commands) -> None:
    parser = _command(
        commands,
        "trace",
        "record which experts tokens are routed to, ids of experts alone, until Ctrl-C",
        "  sparkctl trace monday.npz --seconds 3600\n  python bench/policies.py --trace monday.npz",
    )
    parser.add_argument("file", type=path, help="file to write (.npz); it must not exist yet")
    parser.add_argument(
        "--tokens", type=_tokens, default=1_000_000, metavar="N", help="end after so many tokens (default: 1000000)"
    )
    parser.add_argument("--seconds", type=_seconds, metavar="S", help="end after so many seconds")
    _add_connection(parser)
    _add_json(parser, "the file and its tokens")


def _add_config(commands: _Commands) -> None:
    parser = _command(
        commands,
        "config",
        "show each setting, where its value came from, and what the running daemon goes by",
        "  sparkctl config\n  SPARKD_CPU_THREADS=2 sparkctl config --json",
    )
    parser.add_argument(
        "--config", type=path, metavar="FILE", help="read this file instead of /etc/sparkd and ~/.config/sparkd"
    )
    _add_connection(parser)
    _add_json(parser, "value, origin and running value of each setting")


def _add_traffic(commands: _Commands) -> None:
    for name, summary in (
        ("clients", "list the apps that are connected"),
        ("requests", "list the requests that run or wait, never what they say"),
    ):
        parser = _command(commands, name, summary, f"  sparkctl {name}\n  sparkctl {name} --json")
        _add_connection(parser)
        _add_json(parser, "the list as in the status document")


def _add_control(commands: _Commands) -> None:
    wait = "seconds to wait for the end (default: 60)"
    for name, summary in (
        ("stop", "end the daemon; running requests end with the reason"),
        ("drain", "end the daemon once running requests have finished, or it loses patience"),
    ):
        parser = _command(commands, name, summary, f"  sparkctl {name}")
        parser.add_argument("--wait", type=_seconds, default=60.0, metavar="S", help=wait)
        _add_connection(parser)
        _add_json(parser, "the process that has ended")
    parser = _command(
        commands, "reload", "have the daemon read its settings again, and show what has changed", "  sparkctl reload"
    )
    parser.add_argument(
        "--wait", type=_seconds, default=10.0, metavar="S", help="seconds to wait for the outcome (default: 10)"
    )
    _add_connection(parser)
    _add_json(parser, "the outcome as in the status document")


def _add_logs(commands: _Commands) -> None:
    parser = _command(
        commands,
        "logs",
        "show the daemon's log, from the journal or its file",
        "  sparkctl logs --lines 200\n  sparkctl logs --follow",
    )
    parser.add_argument("-n", "--lines", type=_lines, default=50, metavar="N", help="the last N lines (default: 50)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is written from now on")
    _add_connection(parser)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, as in 17=-5") from None


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from None
    return text


def _add_doctor(commands: _Commands) -> None:
    parser = _command(
        commands,
        "doctor",
        "examine limits, memory, model, disk and the daemon; each finding with its fix",
        "  sparkctl doctor model.gguf\n  sudo sparkctl doctor --user sparkd --json",
    )
    parser.add_argument("model", nargs="?", help="model file to examine (default: the setting, or what is served)")
    parser.add_argument("--user", metavar="NAME", help="examine as this user, for example the service's (needs root)")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="read this file instead of /etc/sparkd and ~/.config/sparkd"
    )
    _add_connection(parser)
    _add_json(parser, "check, level (ok, warn, fail), what and fix of each finding")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _size(text: str) -> float:
    return _number(text, 0, 65536, "a number of GiB")


def _rate(text: str) -> float:
    return _number(text, 1e-3, 1e6, "a number of GB/s")


def _tokens(text: str) -> int:
    return int(_number(text, 1, 10_000_000, "a number of tokens"))


def _lines(text: str) -> int:
    return int(_number(text, 0, 10_000_000, "a number of lines"))


def _slots(text: str) -> int:
    return int(_number(text, 0, 1 << 16, "a number of slots"))


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {least:g} to {most:g}")
    return value
