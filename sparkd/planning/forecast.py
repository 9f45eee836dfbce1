"""What a daemon with these settings will take of host memory, disk and a card, and how fast it will be.

The host's side is the daemon's own plan (`store.plan`). The card's side is a prediction: this version has no GPU
worker. Nothing but the headers of a model is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkd.calibration import profile
from sparkd.calibration.counts import RoutingCounts, RoutingError
from sparkd.calibration.shadow import FIRST, WARM
from sparkd.config import Settings
from sparkd.planning import hits, roofline
from sparkd.planning.advice import device_advice, host_advice, largest_context
from sparkd.planning.hardware import Gpu, Link
from sparkd.planning.hits import ENOUGH_ROWS, Hits
from sparkd.planning.roofline import PROMPT, Processor, Speed
from sparkd.planning.shape import HostBudget, Shape
from sparkd.planning.work import Work
from sparkd.residency.budget import Limit
from sparkd.residency.device_budget import CARD_MARGIN, ROWS, DeviceBudget, usable
from sparkd.residency.misses import Misses
from sparkd.store.plan import kv_and_state, limits_here, model_name
from sparkd.store.planned import STEP_ROWS


@dataclass(frozen=True, slots=True)
class Card:
    """A card to plan for: how much of it may be used (None: all but a margin), its link, and slots of the ring."""

    gpu: Gpu
    link: Link
    vram: int | None
    ring_slots: int

    def usable(self) -> tuple[int, str]:
        """Bytes that may be planned, and a note when that is not what was asked for."""
        if self.vram is None:
            return usable(self.gpu.memory, self.gpu.memory, int(self.gpu.memory * CARD_MARGIN))
        return usable(self.vram, self.gpu.memory)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model is to run on. `limits` of host memory: None are those of this machine and the settings."""

    limits: Sequence[Limit] | None
    processor: Processor
    disk: Link
    card: Card | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Sizes in bytes of what sequences keep, and the largest context (0: none) that would fit."""

    positions: int
    sequences: int
    kv: int
    state: int
    largest: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one sequence: a token, a token when the ring catches nothing, and the longest step of a prompt.

    `wait_s`: seconds for which others, who decode, wait for a token while a prompt is read. `by_misses`: a token, for
    all that may become of what a card misses; `misses` is what does, and `decode` that one (empty, None: no card).
    """

    decode: Speed
    without_ring: Speed
    prefill: Speed
    wait_s: float
    by_misses: tuple[tuple[Misses, Speed], ...] = ()
    misses: Misses | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """All that `sparkctl plan` tells. `device` None: there is no card, and `hits` are those in host memory.

    `speeds` None: it does not fit, and `advice` says what would.
    """

    model: str
    path: str
    architecture: str
    parameters: int
    tensor_bytes: int
    work: Work
    context: Context
    host: HostBudget
    device: DeviceBudget | None
    hits: Hits
    speeds: Speeds | None
    advice: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the daemon would start with these settings."""
        return self.speeds is not None


def make_forecast(settings: Settings, machine: Machine, shape: Shape | None = None) -> Forecast:
    """The forecast for `settings` on `machine`; what does not fit is no error but said.

    `shape` is the model of the settings where it is open already; else the errors of `open_model`.
    """
    shape = shape or Shape.open(settings)
    notes = [*shape.model.notes, *shape.program.notes]
    limits = limits_here(settings, shape.whole) if machine.limits is None else machine.limits
    counts = _find_counts(shape)
    host = shape.host(settings, limits, FIRST.pinned if counts is None else WARM.pinned)
    # A graph of a card cannot wait for a disk: with a card every expert has to be in host memory.
    held = shape.with_least if machine.card is None else shape.with_all
    advice = []
    if held(settings, limits).missing or host.layout.partial:
        advice = host_advice(shape, settings, limits, whole=machine.card is not None or not host.fit.missing)
    device = None
    card = machine.card
    if card is not None:
        vram, note = card.usable()
        notes += [note] if note else []
        device = shape.device(settings, vram, card.ring_slots)
        advice += device_advice(shape, settings, device, card.ring_slots)
    expected = _hits(shape, host, device, counts)
    position = min(PROMPT, settings.limits.context, shape.program.context)
    kv, state = kv_and_state(shape.program, settings)
    step_s = settings.scheduler.max_step_ms / 1000

    def fits(changed: Settings) -> bool:
        if device is None or card is None:
            return not held(changed, limits).missing
        on_card = not shape.unfit and not shape.device(changed, device.limit, card.ring_slots).missing
        return on_card and not held(changed, limits).missing

    speeds = None
    if fits(settings):
        speeds = _speeds(shape.work, machine, settings.worker.misses, host, device, expected, position, step_s)
        alone = roofline.cpu_decode(shape.work, machine.processor, machine.disk, position, 1.0).tokens_s
        if device is not None and alone > speeds.decode.tokens_s:
            threads = machine.processor.threads
            advice.append(
                f"card: {threads} threads alone would decode faster, at {alone:.1f} tokens/s: serve it without"
            )
    return Forecast(
        model=model_name(shape.model),
        path=shape.model.where,
        architecture=shape.model.architecture,
        parameters=sum(tensor.elements for tensor in shape.model.tensors.values()),
        tensor_bytes=shape.model.tensor_bytes,
        work=shape.work,
        context=Context(
            min(settings.limits.context, shape.program.context),
            settings.limits.sequences,
            kv,
            state,
            largest_context(settings, shape.program.context, fits),
        ),
        host=host,
        device=device,
        hits=expected,
        speeds=speeds,
        advice=tuple(advice),
        notes=tuple(notes),
    )


def _find_counts(shape: Shape) -> RoutingCounts | None:
    """The profile that daemons of this user keep of the model; None when there is none of enough rows."""
    folder = profile.state_folder()
    experts = max((stack.experts for stack in shape.work.stacks), default=0)
    if folder is None or not experts:
        return None
    try:
        counts = profile.read(folder, shape.model.fingerprint, len(shape.work.stacks), experts)
    except (OSError, profile.DamagedError, RoutingError):
        return None
    return counts if counts.decode_rows >= ENOUGH_ROWS else None


def _hits(shape: Shape, host: HostBudget, device: DeviceBudget | None, counts: RoutingCounts | None) -> Hits:
    """Hits in the card's slots, or, without a card, in the host's, all of which are taken for hot."""
    experts = [stack.experts for stack in shape.work.stacks]
    hot = host.ordinary if device is None else list(device.hot)
    ring = 0 if device is None else device.ring_slots
    if counts is None:
        return hits.prior(hot, experts, ring)
    return hits.counted(counts.decode.tolist(), counts.decode_rows, hot, experts, ring)


def _speeds(
    work: Work,
    machine: Machine,
    misses: str,
    host: HostBudget,
    device: DeviceBudget | None,
    expected: Hits,
    position: int,
    step_s: float,
) -> Speeds:
    if device is None or machine.card is None:
        rows = min(STEP_ROWS, position)
        processor, disk = machine.processor, machine.disk
        decode = roofline.cpu_decode(work, processor, disk, position, expected.hot)
        prefill = roofline.cpu_prefill(work, processor, disk, position // 2, rows, min(host.residency, 1.0))
        return Speeds(decode, decode, prefill, step_s)
    gpu, link, longest = machine.card.gpu, machine.card.link, device.needs.rows

    def chunk(rows: int) -> Speed:
        return roofline.gpu_prefill(work, gpu, link, position // 2, min(rows, position), device.residency, longest)

    def decoding(hit: float) -> tuple[Misses, dict[Misses, Speed]]:
        missed = work.experts_bytes * (1 - hit)
        better = roofline.miss_rates(link, machine.processor).better(len(work.stacks), missed)
        return better if misses == "auto" else Misses(misses), {
            Misses.IN_PLACE: roofline.gpu_decode(work, gpu, link, position, hit),
            Misses.COPY: roofline.gpu_decode_copied(work, gpu, link, position, hit),
            Misses.HOST: roofline.gpu_decode_by_host(work, gpu, machine.processor, position, hit),
        }

    chosen, every = decoding(expected.ring)
    chosen_without, every_without = decoding(expected.hot)
    decode = every[chosen]
    # Chunks beside others are as long as a step may take, but never shorter than these.
    shortest = chunk(ROWS[0]).seconds if device.residency < 1 else 0.0
    wait_s = max(shortest + decode.seconds, step_s)
    return Speeds(decode, every_without[chosen_without], chunk(longest), wait_s, tuple(every.items()), chosen)
