"""What would fit where a plan does not: a smaller context, fewer sequences, smaller weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from sparkd.config import Settings
from sparkd.gguf.formats import FORMATS, Arithmetic
from sparkd.graph.state import PAGE
from sparkd.planning.shape import Shape, with_limits
from sparkd.residency.budget import GIB, Limit
from sparkd.residency.device_budget import RESERVE_PARTS, DeviceBudget, divide

#: Of all experts: what is worth telling that it could be hot.
WORTH = 0.02
#: Positions that most are content with: the default of `limits.context`.
COMMON_CONTEXT = 8192
#: Bits of a weight below which no type is proposed.
LEAST_BITS = 3


def largest_context(settings: Settings, most: int, fits: Callable[[Settings], bool]) -> int:
    """The largest context up to `most`, in whole pages, with which `settings` fit; 0 when none does."""
    if fits(with_limits(settings, context=most)):
        return most
    low, high = 0, most // PAGE
    while low < high:
        pages = (low + high + 1) // 2
        if fits(with_limits(settings, context=pages * PAGE)):
            low = pages
        else:
            high = pages - 1
    return low * PAGE


def host_advice(shape: Shape, settings: Settings, limits: Sequence[Limit], *, whole: bool) -> list[str]:
    """Lines for people: what is missing in host memory, then what would fit. `whole`: all records have to be there."""
    held = shape.with_all if whole else shape.with_least
    fit = held(settings, limits)
    what = "with all experts" if whole else "at least"
    lines = [
        f"host memory: needs {_gib(fit.need)} of {fit.limit.scope.value} {what}, {fit.limit.name} allows "
        f"{_gib(fit.limit.size)}: {_gib(fit.missing)} are missing"
    ]
    smaller = [
        f"{line}{' with all experts in memory' if whole else ''}"
        for line in _smaller(shape, settings, lambda changed: not held(changed, limits).missing)
    ]
    least = shape.with_all(with_limits(settings, context=PAGE, sequences=1), limits)
    return lines + (smaller or [_weights(shape, least.weights, "host memory")])


def device_advice(shape: Shape, settings: Settings, budget: DeviceBudget, ring_slots: int) -> list[str]:
    """Lines for people: what is missing on the card and what would fit, or what would leave more room for experts."""
    if shape.unfit:
        return [f"card: {shape.unfit}; serve it without a card"]
    if not budget.missing:
        return list(_hotter(shape, settings, budget, ring_slots))
    limit = budget.limit
    lines = [
        f"card: needs {_gib(budget.used)} before the first expert, {_gib(limit)} may be used: "
        f"{_gib(budget.missing)} are missing"
    ]
    # A ring takes nothing that is needed: whether it fits does not depend on it.
    smaller = list(_smaller(shape, settings, lambda changed: not shape.device(changed, limit, 0).missing))
    least = shape.device(with_limits(settings, context=PAGE, sequences=1), limit, 0)
    nothing = f"card: {_gib(least.used)} are needed even for one sequence of {PAGE} positions; serve it without a card"
    return lines + (smaller or [nothing])


def _hotter(shape: Shape, settings: Settings, budget: DeviceBudget, ring_slots: int) -> Iterator[str]:
    """What would have more of the experts hot, if that is worth telling."""
    ways = {"--sequences 1": with_limits(settings, sequences=1)}
    if min(settings.limits.context, shape.program.context) > COMMON_CONTEXT:
        ways[f"--context {COMMON_CONTEXT}"] = with_limits(settings, context=COMMON_CONTEXT)
    for way, changed in ways.items():
        share = shape.device(changed, budget.limit, ring_slots).residency
        if share - budget.residency >= WORTH:
            yield f"{way} would have {share:.1%} of the experts hot on the card"
    smaller = {name: _retyped(shape, budget, size, ring_slots) for size, name in _types() if size >= LEAST_BITS / 8}
    whole = [name for name, made in smaller.items() if made.residency == 1]
    name = (whole or list(smaller)[-1:])[0]
    share = smaller[name].residency
    if share - budget.residency >= WORTH:
        size = smaller[name].needs.records + budget.needs.core
        yield f"smaller weights: as {name} ({_gib(size)}, less exact) it would have {share:.1%} hot"


def _retyped(shape: Shape, budget: DeviceBudget, size: float, ring_slots: int) -> DeviceBudget:
    """The card divided if experts had `size` bytes a weight; the core as it is."""
    weights = [
        sum(weight.rows * weight.columns for weight in (layer.gate, layer.up, layer.down))
        for layer in shape.program.expert_layers
    ]
    stacks = tuple(
        dataclasses.replace(stack, record_bytes=min(stack.record_bytes, int(count * size)))
        for stack, count in zip(budget.needs.stacks, weights, strict=True)
    )
    needs = dataclasses.replace(budget.needs, stacks=stacks)
    return divide(needs, budget.limit, ring_slots, RESERVE_PARTS * shape.top_k)


def _types() -> list[tuple[float, str]]:
    """Bytes a weight and name of the integer types, the largest first."""
    integers = (kind for kind in FORMATS.values() if kind.arithmetic in (Arithmetic.INT256, Arithmetic.INT32))
    return sorted(((kind.bytes / kind.block, kind.name) for kind in integers), reverse=True)


def _smaller(shape: Shape, settings: Settings, fits: Callable[[Settings], bool]) -> Iterator[str]:
    """Contexts that fit with as many sequences, then with one."""
    most = min(settings.limits.context, shape.program.context)
    for sequences in sorted({settings.limits.sequences, 1}, reverse=True):
        context = largest_context(with_limits(settings, sequences=sequences), most, fits)
        if context:
            yield f"fits: --context {context} --sequences {sequences}"


def _weights(shape: Shape, room: int, where: str) -> str:
    """The largest type whose weights would take at most `room` bytes, if all tensors had it."""
    elements = sum(tensor.elements for tensor in shape.model.tensors.values())
    now = shape.whole.core_bytes + shape.whole.records_bytes
    said = f"{where}: weights of {_gib(room)} would fit with one sequence, these have {_gib(now)}"
    sizes = sorted(
        (elements // kind.block * kind.bytes, kind.name) for kind in FORMATS.values() if kind.arithmetic is not None
    )
    size, name = max(((size, name) for size, name in sizes if size <= room), default=(0, ""))
    if not name:
        return f"{said}; no type of weights is small enough ({sizes[0][1]}: {_gib(sizes[0][0])})"
    return f"{said}: as {name} this model would have about {_gib(size)}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
