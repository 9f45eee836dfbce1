"""sparkd: serve a model, or show what sparkd does with the built-in one.

Exit codes: 0 done, 1 failed (one line on standard error), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from sparkctl import shell
from sparkd import __version__, log
from sparkd.config import Settings, documented, keys, load, load_with_origins
from sparkd.errors import ConfigError, SparkError

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    return shell.run("sparkd", (SparkError,), lambda: _dispatch(_parsed(argv)))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; one that a command does not know is refused with the usage of that command."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _dispatch(args: argparse.Namespace) -> int:
    match args.command:
        case "serve":
            return _serve(args)
        case "config":
            return _config(args)
        case _:
            from sparkd.demo.main import run

            return run(args.max_tokens)


def _serve(args: argparse.Namespace) -> int:
    settings = load(_files(args), flags=_flags(args))
    if not settings.model.path:
        raise ConfigError(
            "no model to serve",
            fix="name one: sparkd serve MODEL.gguf, or set model.path; 'sparkd demo' shows the built-in one",
        )
    from spark_client.address import find_socket
    from sparkd.ipc.sockets import RunDirectory
    from sparkd.supervisor.main import run

    run_dir = RunDirectory(args.run_dir.absolute()) if args.run_dir else RunDirectory.default()
    socket = Path(settings.socket.path).expanduser().absolute() if settings.socket.path else run_dir.client
    option = "" if find_socket() == socket else f" --socket {shlex.quote(str(socket))}"

    def ready() -> None:
        _say(f"ready; ask it in another terminal: sparkctl generate{option} --chat 'Who are you?'; Ctrl-C stops it")

    _say(f"socket {socket}; loading is shown by: sparkctl status{option}")
    try:
        return run(settings, run_dir, ready, lambda: load(_files(args), flags=_flags(args)))
    except SparkError as error:
        log.last_words(error)
        return 1


def _say(line: str) -> None:
    print(f"sparkd: {line}", file=sys.stderr)


def _config(args: argparse.Namespace) -> int:
    loaded = load_with_origins(_files(args), flags=_flags(args))
    document = loaded.settings.to_dict()
    if args.json:
        print(json.dumps(document, indent=2))
        return 0
    for section, body in document.items():
        print(f"[{section}]")
        for key, value in body.items():
            # JSON's literals of these types are TOML's as well.
            print(f"{key} = {json.dumps(value, ensure_ascii=False)}".ljust(40) + f"  # {loaded.origins[section, key]}")
        print()
    return 0


def _files(args: argparse.Namespace) -> list[Path] | None:
    return [args.config] if args.config else None


def _flags(args: argparse.Namespace) -> dict[tuple[str, str], str]:
    """The settings given on the command line; `serve MODEL` is model.path."""
    given = {(section, key): getattr(args, f"{section}.{key}") for section, key, _ in keys()}
    if args.model is not None:
        if given["model", "path"] is not None:
            raise ConfigError("the model is named twice", where="flag --model-path")
        given["model", "path"] = args.model
    return {key: value for key, value in given.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkd",
        description="Serve a big Mixture-of-Experts model from a GGUF file to the apps of this machine.",
        epilog="'sparkd COMMAND --help' shows options and an example; 'sparkctl' talks to a running daemon. "
        "Example: sparkd serve model.gguf",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparkd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _command(
        commands,
        "serve",
        "[MODEL] [--config FILE] [--run-dir DIR] [--SECTION-KEY VALUE ...]",
        "serve a model in the foreground, until Ctrl-C or SIGTERM",
        "  sparkd serve model.gguf\n  sparkd serve model-00001-of-00003.gguf --memory-host-gib 24 --cpu-threads 6",
    )
    serve.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file, any part of a split set, or its folder")
    serve.add_argument("--run-dir", type=_path, metavar="DIR", help="folder for the sockets")
    _add_settings(serve)
    demo = _command(
        commands,
        "demo",
        "[--max-tokens N]",
        "serve the small built-in model, ask it about several topics, show where its experts lie",
        "  sparkd demo",
    )
    demo.add_argument(
        "--max-tokens", type=_positive, default=60, metavar="N", help="most tokens of an answer (default: 60)"
    )
    shown = _command(
        commands,
        "config",
        "[--json] [--config FILE] [--SECTION-KEY VALUE ...]",
        "print the settings that 'serve' would use, and whether file, variable, flag or default gave them",
        "  sparkd config\n  SPARKD_CPU_THREADS=2 sparkd config --json",
    )
    shown.add_argument("--json", action="store_true", help="write JSON instead of TOML")
    shown.set_defaults(model=None)
    _add_settings(shown)
    return parser


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a path is not empty")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _command(commands: _Commands, name: str, usage: str, summary: str, example: str) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n{example}",
        usage=f"sparkd {name} {usage}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.set_defaults(parser=made)
    return made


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; `sparkd.config` checks the values, so that every place refuses them alike."""
    parser.add_argument(
        "--config", type=_path, metavar="FILE", help="read this file instead of /etc/sparkd and ~/.config/sparkd"
    )
    values = {int: "N", float: "X", bool: "true|false", str: "VALUE"}
    groups: dict[str, argparse._ArgumentGroup] = {}
    said = documented()
    for section, key, kind in keys():
        body = getattr(Settings(), section)
        if section not in groups:
            groups[section] = parser.add_argument_group(f"settings [{section}]", type(body).__doc__)
        groups[section].add_argument(
            f"--{section}-{key}".replace("_", "-"),
            dest=f"{section}.{key}",
            metavar=values[kind],
            help=f"{said[section, key]} Default: {json.dumps(getattr(body, key))}".replace("%", "%%"),
        )


if __name__ == "__main__":
    sys.exit(main())
