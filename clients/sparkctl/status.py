"""`sparkctl status`: the status document (docs/status.md) as tables. Parts that are not known yet are left out."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spark_client import Client, SparkClientError
from sparkctl.plain import printable, write_json
from sparkctl.tables import bar, console, duration, facts, size, strip, table

Document: TypeAlias = Mapping[str, Any]

_COLOURS = {"ready": "green", "starting": "yellow", "loading": "yellow", "stopping": "yellow"}

#: What becomes of experts that a card misses, by policy.
_MISSES = {"in_place": "read in host memory", "copy": "copied to the card first", "host": "computed by the CPU"}


def run(args: argparse.Namespace) -> int:
    """Print the status of the daemon, once or over and over."""
    if args.watch is not None:
        return _watch(args)
    with Client(args.socket, timeout=args.timeout, name="sparkctl") as client:
        document = client.status()
    if args.json:
        write_json(document)
    else:
        show(document)
    return 0


def show(document: Document, out: Console | None = None) -> None:
    """Print a status document."""
    out = out or console()
    for part in _parts(document):
        out.print(part, soft_wrap=isinstance(part, Text))


def _parts(document: Document) -> Iterator[Text | Table]:
    yield _headline(document)
    yield facts(_facts(document))
    if document.get("processes"):
        yield _processes(document["processes"])
    if _part(document, "residency").get("layers"):
        yield _residency(document)
    profile = _part(_part(document, "calibration"), "profile")
    for note in (*document.get("notes", ()), profile.get("note")):
        if note:
            yield Text(f"note: {printable(note)}")


# ---- over and over ----


def _watch(args: argparse.Namespace) -> int:
    """Until Ctrl-C, which is how one leaves: exit code 0. A daemon that goes away is waited for."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with suppress(KeyboardInterrupt):
        if args.json:
            for document in _documents(args):
                print(json.dumps(document, ensure_ascii=False), flush=True)
        elif not sys.stdout.isatty():
            for document in _documents(args):
                show(document)
                sys.stdout.flush()
        else:
            with Live(console=console(), screen=True, auto_refresh=False) as live:
                for document in _documents(args):
                    live.update(Group(*_parts(document)), refresh=True)
    return 0


def _documents(args: argparse.Namespace) -> Iterator[Document]:
    """The status every `args.watch` seconds; where no daemon answers, one that says only that."""
    while True:
        try:
            with Client(args.socket, timeout=args.timeout, name="sparkctl") as client:
                while True:
                    yield client.status()
                    time.sleep(args.watch)
        except SparkClientError as error:
            yield {"state": "unreachable", "reason": str(error)}
        time.sleep(args.watch)


# ---- the parts ----


def _part(document: Document, name: str) -> Document:
    part: Document = document.get(name) or {}
    return part


def _state(name: object) -> Text:
    return Text(printable(name), style=f"bold {_COLOURS.get(str(name), 'red')}")


def _headline(document: Document) -> Text:
    line = _state(document.get("state", "unknown"))
    if document.get("reason"):
        line.append(f": {printable(document['reason'])}", style="default not bold")
    return line


def _facts(document: Document) -> Iterator[tuple[str, str | Text]]:
    if "version" in document:
        up = duration(document.get("uptime_s", 0.0))
        yield "daemon", f"sparkd {document['version']}, process {document.get('pid')}, up {up}"
    if model := _part(document, "model"):
        yield "model", f"{model.get('name')} ({model.get('architecture')}), context {model.get('context')}"
        yield "file", str(model.get("path"))
    loading = _part(document, "loading")
    if document.get("state") == "loading" and loading.get("total_bytes"):
        yield "loading", _of(loading["done_bytes"], loading["total_bytes"])
    yield from _memory(_part(document, "memory"))
    yield from _tier(_part(document, "residency"))
    yield from _card(_part(document, "device"))
    if requests := _part(document, "requests"):
        yield (
            "requests",
            f"{requests.get('running')} running, {requests.get('queued')} queued, {requests.get('clients')} connected; "
            f"so far {requests.get('finished')} finished, {requests.get('refused', 0)} refused, "
            f"{requests.get('failed')} failed, {requests.get('cancelled')} cancelled, "
            f"{requests.get('output_tokens')} tokens",
        )
    if speed := _part(document, "speed"):
        yield (
            "speed",
            f"decode {speed.get('decode_tokens_s', 0):.1f}, prefill {speed.get('prefill_tokens_s', 0):.1f} tokens/s",
        )
    if executor := _part(document, "executor"):
        how = str(executor.get("kind"))
        if "isa" in executor:
            how += f" {executor['isa']}, {executor.get('threads')} threads"
        yield "computes", f"{how}, keys and values {executor.get('kv_type')}"


def _memory(memory: Document) -> Iterator[tuple[str, Text]]:
    if memory.get("limit_bytes"):
        need = _of(memory["need_bytes"], memory["limit_bytes"])
        yield "memory", need.append(f" ({printable(memory.get('limit', 'limit'))})")
    if memory.get("arena_bytes"):
        locked = _of(memory.get("locked_bytes", 0), memory["arena_bytes"]).append(" of the weights locked")
        if memory.get("lock_note"):
            locked.append(f": {printable(memory['lock_note'])}")
        yield "", locked
    if memory.get("arena_bytes") and memory.get("huge_kind", "none") != "none":
        huge = _of(memory["huge_bytes"], memory["arena_bytes"]).append(f" in huge pages ({memory['huge_kind']})")
        yield "", huge.append(f": {printable(memory['huge_note'])}" if memory.get("huge_note") else "")
    if memory.get("state_bytes"):
        yield "", _of(memory.get("state_used_bytes", 0), memory["state_bytes"]).append(" for contexts in use")


def _tier(residency: Document) -> Iterator[tuple[str, str | Text]]:
    """Of a host tier that is smaller than the model: its slots, what was missed, and what that cost."""
    if not residency.get("partial"):
        return
    slots, records = residency["slots"], residency["records"]
    yield "experts", bar(slots / records).append(f" room for {slots} of {records}, the others are read when used")
    yield from _slots(residency, "in memory")
    if residency.get("uses"):
        yield (
            "",
            f"{size(residency['read_bytes'])} read from disk since the start, {size(residency['moved_bytes'])} moved",
        )
    yield from _placement(residency.get("placement", {}))


def _card(device: Document) -> Iterator[tuple[str, str | Text]]:
    """Of a card: its memory, the slots for experts, what was missed, and how the others are read."""
    if not device:
        return
    yield "card", _of(device["used_bytes"], device["limit_bytes"]).append(f", {size(device['free_bytes'])} free")
    if device["given_back_bytes"]:
        yield "", f"{size(device['given_back_bytes'])} of slots given back, since others use the card"
    slots, records = device["slots"], device["records"]
    yield "on the card", bar(slots / max(records, 1)).append(f" room for {slots} of {records} experts")
    yield from _slots(device, "on the card")
    yield "", f"{size(device['moved_bytes'])} copied to the card since the start"
    misses = device["misses"]
    yield "missed experts", f"{_MISSES[misses['policy']]}: {printable(misses['why'])}"
    elsewhere = records - device["in_place"]
    if elsewhere and misses["policy"] == "in_place":
        why = f": {printable(device['in_place_note'])}" if device["in_place_note"] else " yet"
        yield "", f"{elsewhere} experts cannot be read in host memory, and are copied when used{why}"
    yield from _placement(device["placement"])


def _slots(tier: Document, where: str) -> Iterator[tuple[str, str]]:
    slabs = tier.get("slabs", ())
    if slabs:
        said = {name: sum(slab[name] for slab in slabs) for name in ("hot", "ring", "reserve", "spare")}
        yield "", ", ".join(f"{count} {name}" for name, count in said.items())
    for name, counts in tier.get("uses", {}).items():
        if counts["uses"]:
            hits = 1 - counts["misses"] / counts["uses"]
            yield "", f"{name}: {hits:.1%} of {counts['uses']} uses found their expert {where}"


def _placement(placement: Document) -> Iterator[tuple[str, str]]:
    if placement.get("refused"):
        yield "", f"refused {printable(placement['refused'])}"
    elif placement.get("swaps_left"):
        yield "", f"placement {placement['version']}: {placement['swaps_left']} swaps are left"


def _of(part: float, whole: float) -> Text:
    return bar(part / whole).append(f" {size(part)} of {size(whole)}")


def _processes(processes: list[Document]) -> Table:
    made = table("process", "state", "pid>", "memory>", "restarts>", "heartbeat>", "")
    for process in processes:
        beat, rss = process.get("heartbeat_s"), process.get("rss_bytes")
        made.add_row(
            Text(printable(process.get("role"))),
            _state(process.get("state")),
            "" if process.get("pid") is None else str(process["pid"]),
            "" if rss is None else size(rss),
            str(process.get("restarts", 0)),
            "" if beat is None else f"{beat:.1f} s ago",
            Text(printable(process.get("reason") or process.get("url") or "")),
        )
    return made


def _residency(document: Document) -> Table:
    """Where the experts of each layer lie and, when the calibrator counts, how unevenly decoding uses them."""
    layers = document["residency"]["layers"]
    on_card = _part(document, "device").get("layers") or []
    decode = _part(_part(document, "calibration"), "decode")
    counts, busiest = decode.get("counts") or [], decode.get("busiest_quarter") or []
    counted = len(counts) == len(busiest) == len(layers)
    card = ("on the card", "experts>") if on_card else ()
    used = ("used by decoding", "busiest quarter>") if counted else ()
    made = table("expert layer>", "in host memory", "experts>", *card, *used)
    for index, layer in enumerate(layers):
        row: list[str | Text] = [
            str(index),
            bar(layer["resident"] / max(layer["records"], 1)),
            f"{layer['resident']} of {layer['records']}",
        ]
        if on_card:
            there = on_card[index]
            row += [bar(there["resident"] / max(there["records"], 1)), f"{there['resident']} of {there['records']}"]
        if counted:
            row += [strip(counts[index]), f"{busiest[index]:.0%}"]
        made.add_row(*row)
    return made
