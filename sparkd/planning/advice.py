"""What would fit where a plan does not: a smaller context, fewer sequences, smaller weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sparkd.config import Settings
from sparkd.gguf.formats import FORMATS
from sparkd.graph.state import PAGE
from sparkd.planning.shape import Shape, with_limits
from sparkd.residency.budget import GIB, Limit

#: Of all experts: what is worth telling that it could be hot.
WORTH = 0.02


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


def device_advice(shape: Shape, settings: Settings, limit: int, ring_slots: int) -> list[str]:
    """Lines for people: what is missing on the card and what would fit, or what would leave more room for experts."""
    budget = shape.device(settings, limit, ring_slots)
    alone = shape.device(with_limits(settings, sequences=1), limit, ring_slots)
    if not budget.missing:
        gained = alone.residency - budget.residency
        more = f"--sequences 1 would have {alone.residency:.1%} of the experts hot on the card"
        return [more] if gained >= WORTH else []
    lines = [
        f"card: needs {_gib(budget.used)} before the first expert, {_gib(limit)} may be used: "
        f"{_gib(budget.missing)} are missing"
    ]
    smaller = list(_smaller(shape, settings, lambda changed: not shape.device(changed, limit, ring_slots).missing))
    least = shape.device(with_limits(settings, context=PAGE, sequences=1), limit, ring_slots)
    nothing = f"card: {_gib(least.used)} are needed even for one sequence of {PAGE} positions; serve it without a card"
    return lines + (smaller or [nothing])


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
