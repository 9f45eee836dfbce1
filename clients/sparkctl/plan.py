"""`sparkctl plan`: what serving a model would take, and how fast it would be; reads headers only, needs no daemon."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from sparkctl.plain import printable, write_json
from sparkd.config import ModelSettings, Settings, load
from sparkd.errors import ConfigError
from sparkd.planning.forecast import Card, Forecast, Machine, Speeds, make_forecast
from sparkd.planning.hardware import GPUS, LINKS, Gpu, Link, find_gpu, find_link
from sparkd.planning.roofline import PROMPT, Processor, Speed, Term
from sparkd.residency.budget import GIB, Limit, Scope
from sparkd.residency.misses import Misses

if TYPE_CHECKING:
    from rich.console import Console

#: What is said of a card: there is none to have measured.
PREDICTED = "all that is said of a card is a prediction: nothing of it was measured"
#: Slots of the ring in each expert layer.
RING_SLOTS = 32
#: The host's memory and disk when nobody says.
HOST_MEMORY = Link("host memory", 51.2e9, "stated: two channels of DDR4-3200")
DISK = Link("disk", 3e9, "stated: an NVMe drive on PCIe 3.0 x4")


def run(args: argparse.Namespace) -> int:
    """Print the forecast; exit code 1 when the model would not fit."""
    settings = _settings(args)
    made = make_forecast(settings, _machine(args, settings))
    if args.json:
        write_json(document(made))
    else:
        _show(made)
    return 0 if made.fits else 1


def _settings(args: argparse.Namespace) -> Settings:
    """Those a daemon would start with, and what the command line changes in them."""
    flags = {
        ("limits", key): str(value)
        for key, value in (("context", args.context), ("sequences", args.sequences))
        if value is not None
    }
    try:
        settings = load([args.config] if args.config else None, flags=flags)
    except ConfigError as error:
        raise ConfigError(error.what, where=error.where.replace("flag --limits-", "flag --"), fix=error.fix) from None
    return dataclasses.replace(settings, model=ModelSettings(str(args.model)))


def _machine(args: argparse.Namespace, settings: Settings) -> Machine:
    limits = None if args.host is None else [Limit("--host", int(args.host * GIB), Scope.ARENA)]
    memory = _rate("host memory", args.host_bandwidth, HOST_MEMORY)
    threads = settings.cpu.threads or len(os.sched_getaffinity(0))
    return Machine(limits, Processor(threads, memory), _rate("disk", args.disk_bandwidth, DISK), _card(args))


def _rate(name: str, given: float | None, stated: Link) -> Link:
    return stated if given is None else Link(name, given * 1e9, "as given")


def _card(args: argparse.Namespace) -> Card | None:
    if args.gpu is None and args.vram is None:
        if args.link is not None or args.ring is not None:
            raise ConfigError("a link and a ring belong to a card", fix="name it with --gpu, or its memory with --vram")
        return None
    gpu = find_gpu(args.gpu) if args.gpu is not None else _unnamed(args.vram)
    link = LINKS[gpu.link] if args.link is None else find_link(args.link)
    vram = None if args.vram is None else int(args.vram * GIB)
    return Card(gpu, link, vram, RING_SLOTS if args.ring is None else args.ring)


def _unnamed(vram: float) -> Gpu:
    """A card that nobody named, as fast as the slowest one there is of so much memory."""
    slowest = min(
        (gpu for gpu in GPUS.values() if gpu.memory >= vram * GIB),
        key=lambda gpu: gpu.bandwidth,
        default=max(GPUS.values(), key=lambda gpu: gpu.memory),
    )
    return dataclasses.replace(slowest, name=f"{slowest.name}, assumed", memory=int(vram * GIB))


# ---- for programs ----


def document(made: Forecast) -> dict[str, Any]:
    """The forecast as JSON has it: bytes, seconds, shares from 0 to 1."""
    fit, device = made.host.fit, made.device
    host = {
        **_host_rows(made),
        "need_bytes": fit.need,
        "limit": fit.limit.name,
        "limit_bytes": fit.limit.size,
        "missing_bytes": fit.missing,
        "partial": made.host.layout.partial,
        "residency": made.host.residency,
    }
    card = None
    if device is not None:
        card = {
            **_device_rows(made),
            "used_bytes": device.used,
            "limit_bytes": device.limit,
            "missing_bytes": device.missing,
            "residency": device.residency,
            "hot_slots": list(device.hot),
            "ring_slots": device.ring_slots,
            "step_rows": device.needs.rows,
            "note": PREDICTED,
        }
    return {
        "model": made.model,
        "path": made.path,
        "architecture": made.architecture,
        "parameters": made.parameters,
        "tensor_bytes": made.tensor_bytes,
        "fits": made.fits,
        "context": dataclasses.asdict(made.context),
        "host": host | {"need_total_bytes": fit.needs.total},
        "device": card,
        "hits": dataclasses.asdict(made.hits),
        "decode": _speed(made.speeds.decode) if made.speeds else None,
        "decode_without_ring": _speed(made.speeds.without_ring) if made.speeds else None,
        "misses": made.speeds.misses.value if made.speeds and made.speeds.misses else None,
        "decode_by_misses": {
            misses.value: _speed(speed) for misses, speed in (made.speeds.by_misses if made.speeds else ())
        },
        "prefill": _speed(made.speeds.prefill) if made.speeds else None,
        "wait_beside_prompt_s": made.speeds.wait_s if made.speeds else None,
        "advice": list(made.advice),
        "notes": list(made.notes),
    }


def _host_rows(made: Forecast) -> dict[str, int]:
    needs = made.host.fit.needs
    return {
        "core": needs.core,
        "hot": made.host.hot_bytes,
        "ring": made.host.ring_bytes,
        "spare": made.host.spare_bytes,
        "reserve": made.host.reserve_bytes,
        "directory": needs.directory + needs.headers + needs.padding,
        "kv": made.context.kv,
        "state": made.context.state,
        "workspace": needs.slack,
        "slack": max(made.host.fit.limit.size - made.host.fit.need, 0),
    }


def _device_rows(made: Forecast) -> dict[str, int]:
    device = made.device
    assert device is not None
    return {
        "context": device.needs.context,
        "core": device.needs.core,
        "hot": device.hot_bytes,
        "ring": device.ring,
        "reserve": device.reserve,
        "kv": device.needs.kv,
        "state": device.needs.state,
        "workspace": device.needs.workspace,
        "slack": device.slack,
    }


def _speed(speed: Speed) -> dict[str, Any]:
    return {
        "tokens": speed.tokens,
        "seconds": speed.seconds,
        "tokens_s": speed.tokens_s,
        "tokens_s_bytes_only": speed.bytes_only,
        "serial": [_term(term) for term in speed.serial],
        "overlapping": [_term(term) for term in speed.overlapping],
    }


def _term(term: Term) -> dict[str, Any]:
    return dataclasses.asdict(term) | {"seconds": term.seconds}


# ---- for people ----

_ROWS = {
    "context": "CUDA context",
    "core": "core (what every token uses)",
    "hot": "experts, hot",
    "ring": "experts, ring",
    "spare": "spare slots",
    "reserve": "reserve",
    "directory": "headers and directory",
    "kv": "keys and values",
    "state": "recurrent state",
    "workspace": "workspace and processes",
    "slack": "left",
}


def _show(made: Forecast) -> None:
    from rich.text import Text

    from sparkctl.tables import amount, console, facts, size, table

    out = console()
    host, device = _host_rows(made), _device_rows(made) if made.device else {}
    if made.host.fit.limit.scope is Scope.ARENA:
        # What is left of a limit on weights alone is told below: in this column it would add up to something else.
        del host["slack"]
    out.print(
        facts(
            [
                ("model", f"{made.model}: {made.architecture}, {amount(made.parameters)} weights in "
                          f"{size(made.tensor_bytes)}"),
                ("context", f"{made.context.positions} positions, {made.context.sequences} at once; largest that "
                            f"fits: {made.context.largest or 'none'}"),
                *_residency(made),
            ]
        )
    )  # fmt: skip
    tiers = table("", "host>", *(["card (predicted)>"] if device else []), title="Memory")
    for key, name in _ROWS.items():
        cells = [size(tier[key]) if tier.get(key) else "" for tier in ((host, device) if device else (host,))]
        if any(cells):
            tiers.add_row(name, *cells)
    fit = made.host.fit
    tiers.add_row("in all", size(fit.needs.total), *([size(made.device.used)] if made.device else []))
    if made.device is not None:
        tiers.add_row("allowed", "", size(made.device.limit))
    out.print(tiers)
    limited = f"{size(fit.need)} of {fit.limit.scope.value}, of {size(fit.limit.size)} allowed by {fit.limit.name}"
    out.print(Text(printable(limited)), soft_wrap=True)
    if made.speeds is not None:
        prompt = min(PROMPT, made.context.positions)
        _show_speed(out, f"Decode after {prompt} tokens", made.speeds.decode)
        if made.speeds.by_misses and made.hits.ring < 1:
            _show_misses(out, made.speeds)
        if made.hits.ring > made.hits.hot:
            slower = made.speeds.without_ring.tokens_s
            out.print(f"{slower:.1f} tokens/s if the ring catches nothing (traffic that never comes back)\n")
        _show_speed(out, f"Prompt of {prompt} tokens, {made.speeds.prefill.tokens} a step", made.speeds.prefill)
        out.print(f"others, who decode meanwhile, get a token every {made.speeds.wait_s * 1e3:.0f} ms\n")
    for line in made.advice:
        out.print(Text(printable(line), style="yellow"), soft_wrap=True)
    for note in ([PREDICTED] if made.device else []) + list(made.notes):
        out.print(Text(f"note: {printable(note)}"), soft_wrap=True)


def _residency(made: Forecast) -> list[tuple[str, str]]:
    if made.device is None and not made.host.layout.partial:
        return [("residency", "every expert in host memory")]
    if made.device is None:
        share = f"{made.host.residency:.1%} of all experts in host memory, hot set and ring; the others on disk"
        return [("residency", share), ("expected hits", f"{made.hits.hot:.1%}; from {made.hits.source}")]
    hot = f"{made.device.residency:.1%} of all experts hot on the card"
    ring = f", a ring of {made.device.ring_slots} slots in each layer" if made.device.ring_slots else ""
    share = f"{made.hits.hot:.1%} by the hot set" + (f", {made.hits.ring:.1%} with the ring" if ring else "")
    return [("residency", hot + ring), ("expected hits", f"{share}; from {made.hits.source}")]


def _show_speed(out: Console, title: str, speed: Speed) -> None:
    from sparkctl.tables import table

    terms = table("", "amount>", "at>", "ms>", "rate from", title=f"{title}: {speed.tokens_s:.1f} tokens/s")
    for term in speed.serial:
        terms.add_row(term.name, *_cells(term))
    for term in speed.overlapping:
        mark = "" if len(speed.overlapping) == 1 else "|| "
        terms.add_row(mark + term.name, *_cells(term))
    out.print(terms)
    if len(speed.overlapping) > 1:
        out.print("|| at the same time: the slowest of these counts")
    out.print(f"{speed.seconds * 1e3:.2f} ms in all; bytes alone would allow {speed.bytes_only:.1f} tokens/s\n")


#: What becomes of what a card misses.
_MISSES = {Misses.IN_PLACE: "read in place", Misses.COPY: "copied first", Misses.HOST: "by the CPU"}


def _show_misses(out: Console, speeds: Speeds) -> None:
    """Every term of every way, in milliseconds."""
    from sparkctl.tables import table

    title = f"What the card misses ({_MISSES[speeds.misses]} here), ms" if speeds.misses else ""
    ways = table("", *(f"{_MISSES[misses]}>" for misses, _ in speeds.by_misses), title=title)
    columns = [
        {term.name: f"{'|| ' if term in speed.overlapping else ''}{term.seconds * 1e3:.2f}"
         for term in (*speed.serial, *speed.overlapping)}
        for _, speed in speeds.by_misses
    ]  # fmt: skip
    for name in dict.fromkeys(name for column in columns for name in column):
        ways.add_row(name, *(column.get(name, "") for column in columns))
    ways.add_row("tokens/s", *(f"{speed.tokens_s:.1f}" for _, speed in speeds.by_misses))
    out.print(ways)
    out.print("|| at the same time: the slower of these counts\n")


def _cells(term: Term) -> tuple[str, str, str, str]:
    match term.unit:
        case "bytes":
            amount, rate = f"{term.amount / 1e9:.3f} GB", f"{term.rate / 1e9:.1f} GB/s"
        case "operations":
            amount, rate = f"{term.amount / 1e9:.1f} G", f"{term.rate / 1e9:.0f} G/s"
        case _:
            amount, rate = f"{term.amount:.0f} {term.unit}", f"{term.rate / 1e3:.1f} k/s"
    idle = f"; idle for {term.idle * 1e3:.0f} ms before choices are known" if term.idle else ""
    return amount, rate, f"{term.seconds * 1e3:.2f}", term.source + idle
