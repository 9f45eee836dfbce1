"""`sparkctl config`: each setting, where its value came from, and what the daemon that runs now goes by."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from spark_client import Client, SparkClientError
from sparkctl.plain import printable, write_json
from sparkctl.tables import console, table
from sparkd.config import DEFAULT, Loaded, load_with_origins


def run(args: argparse.Namespace) -> int:
    """Print the settings that `sparkd serve` would find here and now; differences to a running daemon are marked."""
    loaded = load_with_origins([args.config] if args.config else None)
    running = _running(args)
    if args.json:
        write_json(_document(loaded, running))
        return 0
    made = table("setting", "value", "from", *(["running daemon"] if running is not None else []))
    for name, row in _document(loaded, running).items():
        origin = Text(printable(row["from"]), style="dim" if row["from"] == DEFAULT else "")
        cells = [Text(name), Text(_written(row["value"])), origin]
        if "running" in row:
            differs = row["running"] != row["value"]
            cells.append(Text(_written(row["running"]) if differs else "same", style="yellow" if differs else "dim"))
        made.add_row(*cells)
    console().print(made)
    return 0


def _running(args: argparse.Namespace) -> Mapping[str, Any] | None:
    """The settings of the daemon at the socket; None when there is none."""
    try:
        with Client(args.socket, timeout=args.timeout, name="sparkctl") as client:
            settings: Mapping[str, Any] = client.status()["settings"]
            return settings
    except (SparkClientError, KeyError):
        return None


def _document(loaded: Loaded, running: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    values = loaded.settings.to_dict()
    document = {}
    for (section, key), origin in loaded.origins.items():
        document[f"{section}.{key}"] = {"value": values[section][key], "from": origin}
        if running is not None:
            document[f"{section}.{key}"]["running"] = running.get(section, {}).get(key)
    return document


def _written(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False))
