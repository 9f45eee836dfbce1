"""`sparkctl profile`: what was learned of a model's traffic, what that is worth, and the counts for other programs."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.text import Text

from spark_client import Client, SparkClientError
from sparkctl.plain import printable, write_json
from sparkctl.plan import DISK, HOST_MEMORY
from sparkctl.tables import bar, console, duration, facts, table
from sparkd.calibration import profile
from sparkd.calibration.counts import HALF_LIFE, RoutingCounts
from sparkd.calibration.csv_counts import CountsFileError, read_counts, write_counts
from sparkd.calibration.worth import describe
from sparkd.config import ModelSettings, Settings, load
from sparkd.errors import ConfigError, RequestError, SparkError
from sparkd.planning.roofline import PROMPT, Processor, cpu_decode
from sparkd.planning.shape import Shape
from sparkd.tags import TRAFFIC_TAG

#: Largest file of counts that is read.
_MAX_BYTES = 64 << 20


def run(args: argparse.Namespace) -> int:
    """Print what the profile of a model is worth, or carry its counts out of it or into it."""
    if TRAFFIC_TAG.fullmatch(args.tag or "") is None:
        raise RequestError(f"{args.tag[:100]!r} is no tag of traffic", fix="tags are of a to z, 0 to 9, _ and -")
    status = _status(args)
    path = args.model or status.get("model", {}).get("path")
    if not path:
        raise ConfigError("no daemon answers and no model is named", fix="sparkctl profile MODEL.gguf")
    settings = dataclasses.replace(load(None), model=ModelSettings(str(path)))
    shape = Shape.open(settings)
    live = status if status.get("model", {}).get("fingerprint") == shape.model.fingerprint else {}
    if args.export is not None:
        return _export(args, shape)
    if args.import_ is not None:
        return _import(args, shape, live)
    made = _document(shape, settings, live)
    if args.json:
        write_json(made)
    else:
        _show(made)
    return 0


def _status(args: argparse.Namespace) -> Mapping[str, Any]:
    """The status of the daemon at the socket; empty when there is none and a model is named."""
    try:
        with Client(args.socket, timeout=args.timeout, name="sparkctl") as client:
            return client.status()
    except SparkClientError:
        if args.model is None:
            raise
        return {}


def _folder() -> Path:
    folder = profile.state_folder()
    if folder is None:
        raise ConfigError("there is no folder for profiles", fix="set STATE_DIRECTORY, XDG_STATE_HOME or HOME")
    return folder


def _experts(shape: Shape) -> list[int]:
    experts = [layer.experts for layer in shape.program.expert_layers]
    if not experts:
        raise RequestError(f"{shape.model.where}: the model has no experts", fix="there is nothing to learn of it")
    return experts


def _counts(shape: Shape) -> RoutingCounts:
    """The profile on disk."""
    experts, folder = _experts(shape), _folder()
    path = profile.profile_path(folder, shape.model.fingerprint)
    try:
        return profile.read(folder, shape.model.fingerprint, len(experts), max(experts))
    except FileNotFoundError:
        raise SparkError(
            "there is no profile", where=str(path), fix="let a daemon serve the model for a while"
        ) from None
    except OSError as error:
        raise SparkError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except profile.DamagedError as error:
        raise SparkError(str(error), where=str(path), fix="move it away; counting begins anew") from None


# ---- what it is worth ----


def _document(shape: Shape, settings: Settings, live: Mapping[str, Any]) -> dict[str, Any]:
    told = live.get("calibration", {})
    path = profile.profile_path(_folder(), shape.model.fingerprint)
    if told:
        rows, worth, tier = told["decode"]["rows"], told["worth"], told["tier"]
        saved, where = told["profile"]["saved"], told["profile"]["path"]
    else:
        counts = _counts(shape)
        rows, worth, tier = counts.decode_rows, describe(counts), {}
        saved, where = path.stat().st_mtime, str(path)
    threads = settings.cpu.threads or len(os.sched_getaffinity(0))
    processor = Processor(threads, HOST_MEMORY)
    position = min(PROMPT, settings.limits.context, shape.program.context)

    def speed(hits: float) -> float:
        return cpu_decode(shape.work, processor, DISK, position, hits).tokens_s

    return {
        "model": str(shape.model.where),
        "path": where,
        "live": bool(told),
        "age_s": None if saved is None else max(0.0, time.time() - saved),
        "decode_rows": rows,
        "shares": [
            {
                "share": share,
                "hits": hits,
                "hits_recent": recent if worth["recent_rows"] else None,
                "tokens_s": speed(hits),
                "tokens_s_by_chance": speed(share),
            }
            for share, hits, recent in zip(worth["shares"], worth["hottest"], worth["hottest_recent"], strict=True)
        ],
        "worth_having": worth["worth_having"],
        "drift": worth["drift"],
        "drifted": worth["drifted"],
        "tags": worth["tags"],
        "tier": tier,
    }


def _show(made: Mapping[str, Any]) -> None:
    out = console()
    age = "not saved yet" if made["age_s"] is None else f"saved {duration(made['age_s'])} ago"
    out.print(
        facts(
            (
                ("profile", f"{made['path']}, {age}"),
                ("counted", f"{made['decode_rows']} tokens of output" + ("" if made["live"] else "; no daemon runs")),
                ("traffic", made["drift"]),
                ("verdict", _verdict(made)),
            )
        )
    )
    shown = table("experts resident>", "hits>", "", "of late>", "tokens/s>", "without profile>")
    for row in made["shares"]:
        recent = "" if row["hits_recent"] is None else f"{row['hits_recent']:.1%}"
        shown.add_row(
            f"{row['share']:.0%}",
            f"{row['hits']:.1%}",
            bar(row["hits"]),
            recent,
            f"{row['tokens_s']:.1f}",
            f"{row['tokens_s_by_chance']:.1f}",
        )
    out.print(shown)
    out.print("Hits: the part of all work that the hottest so many did. Speeds are predicted, as sparkctl plan does.")
    if made["tags"]:
        shown = table(
            "tag", "tokens, decayed>", "of late>", *(f"hits at {row['share']:.0%}>" for row in made["shares"])
        )
        for tag, told in made["tags"].items():
            hits = (f"{value:.1%}" for value in told["hottest"])
            shown.add_row(Text(printable(tag or "(none)")), f"{told['rows']:.0f}", f"{told['recent']:.0%}", *hits)
        out.print(shown)
    tier = made["tier"]
    if tier:
        out.print(f"The {tier['name']} tier has {tier['slots']} slots for {tier['records']} experts: {tier['rule']}.")
        shown = table("it would have found of late, run as", "hits>")
        for rule, rate in sorted(tier["hit_rates"].items(), key=lambda item: -item[1]):
            shown.add_row(Text(printable(rule)), f"{rate:.1%}")
        out.print(shown)


def _verdict(made: Mapping[str, Any]) -> str:
    first = made["shares"][0]
    if not made["worth_having"]:
        return f"not worth having: the hottest {first['share']:.0%} do {first['hits']:.1%} of the work"
    return f"the hottest {first['share']:.0%} do {first['hits']:.1%} of the work"


# ---- counts for other programs ----


def _export(args: argparse.Namespace, shape: Shape) -> int:
    counts = _counts(shape)
    if args.tag is None:
        counted = sum((traffic.decode.table for traffic in counts.tags.values()), np.zeros(counts.decode.shape))
    elif args.tag in counts.tags:
        counted = counts.tags[args.tag].decode.table
    else:
        known = ", ".join(tag or "(none)" for tag in sorted(counts.tags))
        raise RequestError(f"nothing was counted under the tag {args.tag!r}", fix=f"there are: {known}")
    try:
        with args.export.open("x", encoding="ascii", newline="\n") as file:
            file.writelines(f"{line}\n" for line in write_counts(counted, _experts(shape)))
    except FileExistsError:
        raise RequestError("the file exists already", where=str(args.export), fix="name another one") from None
    except OSError as error:
        raise SparkError(f"cannot be written: {error.strerror}", where=str(args.export)) from None
    return 0


def _import(args: argparse.Namespace, shape: Shape, live: Mapping[str, Any]) -> int:
    """Let the counts of a file take the place of those of one tag."""
    if live.get("calibration"):
        raise RequestError(
            f"process {live['pid']} serves this model and would write its own counts over them",
            fix="sparkctl stop, then import, then start it again",
        )
    experts, folder = _experts(shape), _folder()
    counts, note = profile.load(folder, shape.model.fingerprint, len(experts), max(experts))
    if note:
        raise SparkError(note)
    counted = _read(args.import_, experts)
    top_k = [layer.top_k for layer in shape.program.expert_layers]
    rows = float((counted.sum(axis=1) / top_k).max())
    if not rows:
        raise CountsFileError("all counts are 0", where=str(args.import_), fix="export some first")
    scale = min(1.0, HALF_LIFE / np.log(2) / rows)
    traffic = counts.traffic(args.tag or "")
    traffic.decode.put(counted * scale, rows * scale)
    traffic.recent = traffic.recent or 1.0
    try:
        profile.save(folder, shape.model.fingerprint, counts)
    except OSError as error:
        raise SparkError(f"the profile cannot be saved: {error.strerror}", where=str(folder)) from None
    return 0


def _read(path: Path, experts: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise CountsFileError(f"more than {_MAX_BYTES} bytes", where=str(path), fix="give one line a record")
            return read_counts(_bounded(file), experts, str(path))
    except OSError as error:
        raise SparkError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _bounded(file: TextIO) -> Iterator[str]:
    """Lines, of those that are too long the beginning."""
    left = _MAX_BYTES
    while left > 0 and (line := file.readline(1000)):
        left -= len(line)
        yield line
