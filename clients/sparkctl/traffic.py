"""`sparkctl clients` and `sparkctl requests`: who is connected, and what each request is doing."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table
from rich.text import Text

from spark_client import Client
from sparkctl.plain import printable, write_json
from sparkctl.tables import console, duration, size, table


def clients(args: argparse.Namespace) -> int:
    """Print the connections."""
    listed = _asked(args)["clients"]
    if args.json:
        write_json(listed)
        return 0
    made = table("app", "requests>", "waiting>", "silent for>")
    for client in listed:
        made.add_row(
            Text(printable(client["name"])),
            str(client["requests"]),
            _waiting(client["waiting_bytes"]),
            duration(client["silent_s"]),
        )
    console().print(made)
    return 0


def requests(args: argparse.Namespace) -> int:
    """Print the open requests; of a queue that is longer than the daemon lists, how many are not shown."""
    document = _asked(args)
    listed = document["open_requests"]
    if args.json:
        write_json(listed)
        return 0
    console().print(_requests(listed) if listed else "no request is open")
    hidden = document["requests"]["running"] + document["requests"]["queued"] - len(listed)
    if hidden > 0:
        console().print(f"and {hidden} more")
    return 0


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    with Client(args.socket, timeout=args.timeout, name="sparkctl") as client:
        return client.status()


def _requests(listed: list[dict[str, Any]]) -> Table:
    made = table("request>", "app", "stage", "prompt>", "output>", "waiting>", "age>", "resumed>")
    for request in listed:
        stage = printable(request["stage"])
        made.add_row(
            str(request["request"]),
            Text(printable(request["client"])),
            stage if request["position"] is None else f"{stage}, {request['position']} before it",
            str(request["prompt_tokens"]),
            str(request["output_tokens"]),
            _waiting(request["waiting_bytes"]),
            duration(request["age_s"]),
            str(request["resumed"] or ""),
        )
    return made


def _waiting(count: int) -> str:
    return size(count) if count else ""
