"""What a daemon will need, worked out before anything is reserved or read.

    python -m sparkd.store.plan --settings JSON [--held BYTES]

prints one line of JSON: the `Plan`, or {"code", "error"} with exit status 1. The supervisor runs it as a short child,
so that it carries neither a parsed model nor the modules for it through its life.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from sparkd.config import Settings
from sparkd.errors import BudgetError, ConfigError, DeviceError, ModelFileError, SparkError
from sparkd.executors.gpu import NO_DRIVER, gpu_missing, gpu_unfit
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.graph.state import StateLayout
from sparkd.models import build_program
from sparkd.residency.budget import GIB, Fit, Limit, Needs, Scope, room, tightest
from sparkd.store.layout import PAGE, VERSION, ArenaLayout
from sparkd.store.limits import host_limits, pool_bytes
from sparkd.store.planned import STEP_ROWS, Plan
from sparkd.text.tokenizer import Tokenizer

#: Code, buffers and Python objects of all processes together, in bytes.
PROCESSES = 512 << 20
#: Of the memory that a machine or a cgroup leaves, one in so many stays free where weights fill all they can get.
_MARGIN = 32
_TOKENS = "tokenizer.ggml.tokens"
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def open_model(settings: Settings) -> tuple[ModelFile, Program]:
    """The model that the settings name. ConfigError when they name none, ModelFileError, UnsupportedError."""
    if not settings.model.path:
        raise ConfigError("no model given", where="model.path", fix="name a .gguf file or a folder that holds one")
    model = ModelFile.open(Path(settings.model.path).expanduser().absolute())
    try:
        model.where.encode()
    except UnicodeEncodeError:
        raise ModelFileError("the name is not UTF-8", where=repr(model.where), fix="rename the file") from None
    return model, build_program(model, settings.numerics.yarn)


def model_name(model: ModelFile) -> str:
    """The name a model is served under: its file's, without the number of the part."""
    return _PART.sub("", model.shards[0].path.stem)


def make_plan(settings: Settings, held: int = 0, limits: Sequence[Limit] | None = None, kept: int = 0) -> Plan:
    """The plan for `settings`: all records in memory if that fits, else as many as fit.

    BudgetError when not even the fewest do. `held`: see `host_limits`, which gives `limits`. `kept` is the size of an
    arena that may be used again: one that is a little smaller than what could be made now is preferred to that.

    A vocabulary that contradicts itself is found here, before anything is loaded: workers build what makes ids of texts
    when they need it.
    """
    model, program = open_model(settings)
    tokens = model.metadata.strings(_TOKENS) if _TOKENS in model.metadata else ()
    if tokens:
        Tokenizer.from_metadata(model.metadata).prepare()
    whole = ArenaLayout.of(program, model)
    if limits is None:
        limits = limits_here(settings, whole, held)
    layout = fit_layout(program, model, settings, limits, kept)
    fit = tightest(host_needs(program, layout, settings), limits)
    if fit.missing:
        raise _too_large(fit, model.where)
    types = {model.tensors[name].format.name for name in layout.core}
    types |= {piece.format.name for records in layout.layers for piece in records.pieces}
    device, why = choose_device(settings, layout.partial, lambda: gpu_missing() or gpu_unfit(program, types))
    return Plan(
        model=model_name(model),
        path=model.where,
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        context=min(settings.limits.context, program.context),
        model_context=program.context,
        vocab=min(program.vocab, len(tokens)) if tokens else program.vocab,
        longest_token=max((len(token.encode()) for token in tokens), default=0),
        expert_layers=len(program.expert_layers),
        experts=max((layer.experts for layer in program.expert_layers), default=0),
        notes=[*model.notes, *program.notes, *([why] if why else [])],
        arena=arena_name(model, layout),
        arena_bytes=layout.total_bytes,
        core_bytes=layout.core_bytes,
        records_bytes=layout.records_bytes,
        records=sum(layer.experts for layer in program.expert_layers),
        slots=sum(slab.slots for slab in layout.slabs),
        partial=layout.partial,
        device=device,
        state_bytes=fit.needs.state,
        need_bytes=fit.needs.total,
        limit=fit.limit.name,
        limit_bytes=fit.limit.size,
    )


def choose_device(settings: Settings, partial: bool, missing: Callable[[], str]) -> tuple[Literal["cpu", "cuda"], str]:
    """What computes, and why it is not the GPU that is there, or that was asked for; empty: it is.

    BudgetError: a GPU is asked for, and host memory does not hold all experts: its steps cannot wait for a disk.
    DeviceError: `memory.vram_gib` asks for GPU memory, and `missing` says why no GPU can be used.
    """
    wanted = settings.worker.device
    if wanted == "cpu":
        return "cpu", ""
    asked = wanted == "cuda" or settings.memory.vram_gib > 0
    why = "host memory does not hold all experts" if partial else ""
    if asked and why:
        fix = 'raise memory.host_gib, or compute on the CPU: worker.device = "cpu"'
        raise BudgetError("with a GPU all experts have to be in host memory, and they do not fit", fix=fix)
    if wanted == "cuda":
        return "cuda", ""
    absent = missing()
    if absent and asked:
        raise DeviceError(absent, where="memory.vram_gib", fix="set it to 0 to compute on the CPU")
    if absent == NO_DRIVER:
        return "cpu", ""
    why = absent or why
    return ("cpu", f"the CPU computes, not the GPU: {why}") if why else ("cuda", "")


def fit_layout(
    program: Program, model: ModelFile, settings: Settings, limits: Sequence[Limit], kept: int = 0
) -> ArenaLayout:
    """The layout that has room for most of the records within `limits`; the smallest there is where none fits."""
    layout = ArenaLayout.of(program, model)
    needs = host_needs(program, layout, settings)
    if tightest(needs, limits).missing:
        layout = ArenaLayout.within(program, model, _arena_room(needs, limits, kept))
    return layout


def _arena_room(needs: Needs, limits: Sequence[Limit], kept: int) -> int:
    """Bytes for an arena that cannot hold all records.

    What a machine or a cgroup leaves changes by itself, unlike a setting: a little of it stays free, and a kept arena
    is good as long as it is within the limits and not much smaller than what they allow.
    """
    most = room(needs, limits)
    found = [limit for limit in limits if limit.scope is Scope.ALL]
    left = room(needs, found) if found else most
    new = min(most, left - left // _MARGIN) if found else most
    return kept if new - new // _MARGIN <= kept <= most else new


def host_needs(program: Program, layout: ArenaLayout, settings: Settings) -> Needs:
    """Bytes of host memory that serving `program` from an arena of `layout` takes."""
    return Needs(
        core=layout.core_bytes,
        records=layout.records_bytes,
        headers=PAGE + layout.shards_bytes,
        directory=layout.directory_bytes,
        state=state_bytes(program, settings),
        slack=PROCESSES,
        padding=layout.padding_bytes,
    )


def limits_here(settings: Settings, layout: ArenaLayout, held: int = 0) -> list[Limit]:
    """What `settings` and this machine allow an arena of `layout`; a pool of huge pages with room for it is free."""
    if settings.memory.huge_pages == "auto" and pool_bytes() >= layout.total_bytes:
        held = max(held, layout.total_bytes)
    return host_limits(settings.memory.host_gib, held)


def arena_name(model: ModelFile, layout: ArenaLayout) -> str:
    """The same for the same files (headers and identities) in the same layout, and only for those."""
    made_of = (VERSION, layout.total_bytes, model.fingerprint, [(str(s.path), s.identity) for s in model.shards])
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]


def state_bytes(program: Program, settings: Settings) -> int:
    """KV pages and recurrent state of `limits.sequences` sequences of `limits.context` positions."""
    return sum(kv_and_state(program, settings))


def kv_and_state(program: Program, settings: Settings, rows: int = STEP_ROWS) -> tuple[int, int]:
    """The bytes of KV pages and those of recurrent state, of `limits.sequences` sequences of `limits.context`.

    `rows`: of the longest step.
    """
    layout = StateLayout.of(program, 2 if settings.kv.type == "f16" else 4)
    context = min(settings.limits.context, program.context)
    pages = sum(group.page_bytes * group.pages_for(context, rows) for group in layout.groups)
    return settings.limits.sequences * pages, settings.limits.sequences * layout.record_bytes


def _too_large(fit: Fit, where: str) -> BudgetError:
    """Names need, limit and what would fit."""
    needs = fit.needs
    parts = [f"{needs.records / GIB:.2f} experts", f"{needs.core / GIB:.2f} core"]
    if fit.limit.scope is Scope.ALL:
        parts += [f"{needs.state / GIB:.2f} sequences", f"{needs.slack / GIB:.2f} processes"]
    return BudgetError(
        f"needs {_gib(fit.need)} of {fit.limit.scope.value} at least ({', '.join(parts)} ...), "
        f"but {fit.limit.name} allows {_gib(fit.limit.size)}",
        where=where,
        fix=f"{fit.weights / GIB:.2f} GiB of weights would fit: choose a smaller model or raise the limit by "
        f"{_gib(fit.missing)}",
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB ({size} bytes)"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan, or why there is none."""
    parser = argparse.ArgumentParser(prog="sparkd-plan", description=main.__doc__)
    parser.add_argument("--settings", required=True, help="all settings, as JSON")
    parser.add_argument("--held", type=int, default=0, help="bytes of an arena that is kept")
    parser.add_argument("--kept", type=int, default=0, help="size of that arena")
    given = parser.parse_args(argv)
    try:
        plan = make_plan(Settings.from_json(given.settings), given.held, kept=given.kept)
        line, status = dataclasses.asdict(plan), 0
    except SparkError as error:
        line, status = {"code": error.code, "error": str(error)}, 1
    sys.stdout.write(json.dumps(line) + os.linesep)
    return status


if __name__ == "__main__":
    sys.exit(main())
