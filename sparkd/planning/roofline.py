"""How fast a step is at best: amounts over rates, every term named. Pure.

A decode step pays its terms one after another, since each layer waits for the one before. A prompt's chunk overlaps
reading, computing and copying, so the slowest of those counts, and launches on top. The link is idle while a layer
computes what comes before its choice of experts, but for what was likely enough to be copied before that.

Constants that were fitted, each to one figure: `LAUNCH_S` and `PROMPT_SHARE` to published ones (no card of ours was
measured), `THREAD_BANDWIDTH` and `THREAD_OPERATIONS` to `bench/README.md`. `docs/plan.md` compares what they predict
with all other figures there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.planning.hardware import Gpu, Link
from sparkd.planning.work import Work
from sparkd.residency.device_budget import STAGING_PARTS, staging_slots
from sparkd.residency.misses import Rates

#: The share of a memory's stated bandwidth that long reads reach, on cards and in hosts.
MEMORY_SHARE = 0.85
#: Seconds that a small kernel takes beside its bytes: Laguna-XS.2 Q4_K_M, all of it on an RTX 3090, 407 launches
#: a token, at 131 tokens/s (published: 119 to 143).
LAUNCH_S = 12.85e-6
#: Seconds in which a card stops, the host does something, and the card goes on. Assumed: a worker measures its own.
ROUND_TRIP_S = 20e-6
#: Launches beside each call of the host.
HOST_LAUNCHES = 2
#: The share of a card's INT8 operations that a prompt reaches: 1,880 tokens/s on an RTX 3060 (published; the model is
#: taken to be Laguna-XS.2, and its products to be what it waited for).
PROMPT_SHARE = 0.1125
#: Of a card's FP16 operations (half as many as INT8), what products with unpacked weights would reach. Assumed.
FAST_SHARE = 0.6
#: Of one thread: bytes per second in products of one row (Q4_K), and operations per second in a prompt of 512 (Laguna
#: shapes of eight layers, Q4_K_M, x86-64-v4, 135.2 tokens/s).
THREAD_BANDWIDTH = 12.6e9
THREAD_OPERATIONS = 154.2e9
#: Tokens of the prompt that speeds are told for.
PROMPT = 2048


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU that computes: threads, and bytes per second of its memory with what is said of them."""

    threads: int
    memory: Link

    @property
    def bandwidth(self) -> float:
        """Bytes per second that all threads together read."""
        return min(self.memory.bandwidth * MEMORY_SHARE, self.threads * THREAD_BANDWIDTH)


@dataclass(frozen=True, slots=True)
class Term:
    """`amount` (bytes, operations or launches, as `unit` says) at `rate` per second. `source` of the rate, in words.

    `idle`: seconds in which nothing of it can be done.
    """

    name: str
    amount: float
    unit: str
    rate: float
    source: str
    idle: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of this term alone."""
        return self.idle + self.amount / self.rate


@dataclass(frozen=True, slots=True)
class Speed:
    """`tokens` are done in the sum of `serial` terms plus the longest of `overlapping` ones."""

    tokens: int
    serial: tuple[Term, ...]
    overlapping: tuple[Term, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of one step."""
        longest = max((term.seconds for term in self.overlapping), default=0.0)
        return sum(term.seconds for term in self.serial) + longest

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def bytes_only(self) -> float:
        """Tokens per second if nothing but bytes took time."""
        terms = [term.seconds for term in self.serial if term.unit == "bytes"]
        longest = max((term.amount / term.rate for term in self.overlapping if term.unit == "bytes"), default=0.0)
        return self.tokens / (sum(terms) + longest)


def gpu_decode(work: Work, gpu: Gpu, link: Link, position: int, hit: float) -> Speed:
    """One token on a card that holds the share `hit` of what it chooses; the rest is read from pinned host memory."""
    core, *state = _on_card(work, gpu, position)
    serial = [
        core,
        _hit(work, gpu, hit),
        *state,
        Term("experts over the link", work.experts_bytes * (1 - hit), "bytes", link.bandwidth, _link(link)),
        _launches(work.launches.token),
    ]
    return Speed(1, _shown(*serial))


def gpu_decode_copied(work: Work, gpu: Gpu, link: Link, position: int, hit: float) -> Speed:
    """The same where the rest is copied first, for which the card stops in every expert layer."""
    rate, source = _card(gpu)
    in_place = gpu_decode(work, gpu, link, position, hit)
    missed = work.experts_bytes * (1 - hit)
    stops = len(work.stacks) if missed else 0
    copied = Term("copied experts, written and read in VRAM", 2 * missed, "bytes", rate, source)
    return Speed(1, (*in_place.serial, *_shown(copied, _trips("stops", stops))))


def gpu_decode_by_host(work: Work, gpu: Gpu, processor: Processor, position: int, hit: float) -> Speed:
    """The same where the CPU computes the rest, while the card computes with what it holds."""
    layers = len(work.stacks)
    missed = Term(
        "missed experts, by the CPU", work.experts_bytes * (1 - hit), "bytes", processor.bandwidth, _memory(processor)
    )
    serial = (
        *_on_card(work, gpu, position),
        _launches(work.launches.token + HOST_LAUNCHES * layers),
        _trips("calls of the host", layers),
    )
    return Speed(1, _shown(*serial), _shown(_hit(work, gpu, hit), missed))


def miss_rates(link: Link, processor: Processor) -> Rates:
    """What a worker with this link and CPU would measure (`worker.misses` = auto)."""
    return Rates(link.bandwidth, processor.bandwidth, ROUND_TRIP_S + HOST_LAUNCHES * LAUNCH_S)


def gpu_prefill(
    work: Work, gpu: Gpu, link: Link, position: int, rows: int, residency: float, longest: int | None = None
) -> Speed:
    """A chunk of `rows` of a prompt, `residency` of the experts on the card; each cold one crosses the link once.

    Room is for steps of `longest` rows, or as many as these: from that the size of the buffers follows. Before a
    layer's choice is known no more than what is likely goes over the link, and no more than the buffers hold.
    """
    rate, source = _card(gpu)
    operations = gpu.operations * PROMPT_SHARE
    told = f"{PROMPT_SHARE:.1%} (fitted) of {gpu.operations / 1e12:.0f} T/s stated for {gpu.name}"
    touched = work.touched_bytes(rows)
    cold = touched * (1 - residency)
    mixers = 2 * (rows * work.mixer_macs(position) + work.head_macs)
    before = max(mixers / operations, work.core_bytes / rate)
    records = staging_slots(max(work.top_k, default=1), longest or rows)
    ahead = min(cold, work.likely_bytes(rows, STAGING_PARTS * records) * (residency < 1))
    idle = max(0.0, before - ahead / link.bandwidth) if cold else 0.0
    return Speed(
        rows,
        (_launches(work.launches.prompt + work.launches.part * work.parts(rows, residency, records)),),
        _shown(
            Term("core and experts from VRAM", work.core_bytes + touched, "bytes", rate, source),
            Term("products", mixers + 2 * rows * work.expert_macs, "operations", operations, told),
            Term("experts over the link", cold, "bytes", link.bandwidth, _link(link), idle),
        ),
    )


def gpu_prefill_fast(
    work: Work, gpu: Gpu, link: Link, position: int, rows: int, residency: float, longest: int | None = None
) -> Speed:
    """What `gpu_prefill` would be with weights unpacked to FP16 first, and inexact products: this is not built.

    Each weight that is touched is written and read once more, two bytes each time, and nothing is computed meanwhile.
    """
    rate, source = _card(gpu)
    exact = gpu_prefill(work, gpu, link, position, rows, residency, longest)
    operations = gpu.operations / 2 * FAST_SHARE
    unpacked = Term("weights, unpacked and read again", 4 * work.touched_weights(rows), "bytes", rate, source)
    told = f"{FAST_SHARE:.0%} (assumed) of half of {gpu.operations / 1e12:.0f} T/s stated for {gpu.name}"
    products = Term("products", _operations(work, position, rows), "operations", operations, told, unpacked.seconds)
    others = tuple(term for term in exact.overlapping if term.name != "products")
    return Speed(rows, exact.serial, (*others, products))


def cpu_decode(work: Work, processor: Processor, disk: Link, position: int, hit: float) -> Speed:
    """One token on the CPU; the share 1 - `hit` of its experts comes from disk."""
    rate, source = processor.bandwidth, _memory(processor)
    return Speed(
        1,
        _shown(
            Term("core from host memory", work.core_bytes, "bytes", rate, source),
            Term("experts from host memory", work.experts_bytes, "bytes", rate, source),
            Term("keys and values", work.kv_bytes(position), "bytes", rate, source),
            Term("recurrent state, read and written", 2 * work.record_bytes, "bytes", rate, source),
            Term("experts from disk", work.experts_bytes * (1 - hit), "bytes", disk.bandwidth, _link(disk)),
        ),
    )


def cpu_prefill(work: Work, processor: Processor, disk: Link, position: int, rows: int, residency: float) -> Speed:
    """A chunk of `rows` of a prompt on the CPU, `residency` of the experts in host memory."""
    operations = processor.threads * THREAD_OPERATIONS
    told = f"{processor.threads} threads, {THREAD_OPERATIONS / 1e9:.0f} G/s each with AVX-512 (measured on one machine)"
    touched = work.touched_bytes(rows)
    return Speed(
        rows,
        (),
        _shown(
            Term("core and experts", work.core_bytes + touched, "bytes", processor.bandwidth, _memory(processor)),
            Term("products", _operations(work, position, rows), "operations", operations, told),
            Term("experts from disk", touched * (1 - residency), "bytes", disk.bandwidth, _link(disk)),
        ),
    )


def _on_card(work: Work, gpu: Gpu, position: int) -> tuple[Term, ...]:
    """What every token reads in the card's memory."""
    rate, source = _card(gpu)
    return (
        Term("core from VRAM", work.core_bytes, "bytes", rate, source),
        Term("keys and values", work.kv_bytes(position), "bytes", rate, source),
        Term("recurrent state, read and written", 2 * work.record_bytes, "bytes", rate, source),
    )


def _hit(work: Work, gpu: Gpu, hit: float) -> Term:
    return Term("experts from VRAM", work.experts_bytes * hit, "bytes", *_card(gpu))


def _trips(name: str, count: float) -> Term:
    return Term(name, count, "times", 1 / ROUND_TRIP_S, f"{ROUND_TRIP_S * 1e6:.0f} µs each, assumed")


def _operations(work: Work, position: int, rows: int) -> int:
    return 2 * (rows * work.macs(position) + work.head_macs)


def _launches(count: float) -> Term:
    return Term("launches", count, "launches", 1 / LAUNCH_S, f"{LAUNCH_S * 1e6:.1f} µs each, fitted")


def _shown(*terms: Term) -> tuple[Term, ...]:
    return tuple(term for term in terms if term.amount > 0)


def _card(gpu: Gpu) -> tuple[float, str]:
    return gpu.bandwidth * MEMORY_SHARE, f"{MEMORY_SHARE:.0%} of {gpu.bandwidth / 1e9:.0f} GB/s stated for {gpu.name}"


def _link(link: Link) -> str:
    return f"{link.name}: {link.source}"


def _memory(processor: Processor) -> str:
    memory = f"{MEMORY_SHARE:.0%} of {processor.memory.bandwidth / 1e9:.1f} GB/s ({processor.memory.source})"
    threads = f"{processor.threads} threads, {THREAD_BANDWIDTH / 1e9:.1f} GB/s each (measured on one machine)"
    return threads if processor.threads * THREAD_BANDWIDTH < processor.memory.bandwidth * MEMORY_SHARE else memory
