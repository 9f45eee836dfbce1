"""Writes the tables of docs/plan.md: what the forecast says of published models, beside what others published.

python bench/make_plan_document.py [--write]     without --write the whole document is printed

The two models are headers with the true shapes and types of all tensors and no data. Figures of others stand below with
where they are from; everything else is reckoned by the code that `sparkctl plan` runs.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkd.config import LimitSettings, ModelSettings, Settings
from sparkd.executors.cuda_prompt_plan import LIKELY_ROWS
from sparkd.planning import hits, roofline
from sparkd.planning.forecast import Card, Forecast, Machine, make_forecast
from sparkd.planning.hardware import GPUS, LINK_SHARE, LINKS, Link
from sparkd.planning.roofline import PROMPT, Processor, Speed
from sparkd.planning.shape import Shape
from sparkd.planning.work import Work
from sparkd.residency.budget import GIB, Limit
from sparkd.residency.device_budget import CARD_CONTEXT, CARD_MARGIN, RESERVE_PARTS, ROWS, ROWS_SHARE

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "plan.md"
BEGIN = "<!-- made by bench/make_plan_document.py -->\n"
RING = 32
NAMES = {"laguna": "Laguna-XS.2", "qwen35moe": "Qwen3.6-35B-A3B"}
#: Bytes of host memory do not matter to a card's figures, nor does a CPU so slow that it computes nothing for a card.
HOST = [Limit("enough", 1 << 50)]
PROCESSOR = Processor(1, Link("host memory", 15.5e9, "measured"))
DISK = Link("disk", 3e9, "stated")


@dataclass(frozen=True, slots=True)
class Models:
    """The two models, whole and with eight layers, by architecture."""

    full: dict[str, Shape]
    bench: dict[str, Shape]

    @staticmethod
    def write(folder: Path) -> Models:
        """Write all headers and open them."""
        sys.path.insert(0, str(ROOT / "tests" / "data" / "tools"))
        import make_sparse

        def shapes(preset: str) -> dict[str, Shape]:
            paths = {arch: make_sparse.make(folder / f"{arch}-{preset}.gguf", arch, preset=preset) for arch in NAMES}
            return {arch: Shape.open(Settings(model=ModelSettings(str(path)))) for arch, path in paths.items()}

        return Models(shapes("full"), shapes("bench"))


def settings(context: int = 8192, sequences: int = 1) -> Settings:
    return Settings(limits=LimitSettings(context=context, sequences=sequences))


def forecast(shape: Shape, card: str, context: int = 8192, sequences: int = 1) -> Forecast:
    gpu = GPUS[card]
    machine = Machine(HOST, PROCESSOR, DISK, Card(gpu, LINKS[gpu.link], None, RING))
    return make_forecast(settings(context, sequences), machine, shape)


def table(head: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    yield f"| {head} |"
    yield "|" + " --- |" * (head.count("|") + 1)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"


def error(predicted: float, low: float, high: float | None = None) -> str:
    """Signed error in percent against a figure, or against the nearer end of a range (0: inside)."""
    high = low if high is None else high
    nearest = min(max(predicted, low), high)
    return f"{predicted / nearest - 1:+.0%}" if nearest != predicted else "inside"


def constants() -> Iterator[tuple[str, str, str]]:
    yield "`MEMORY_SHARE`", f"{roofline.MEMORY_SHARE}", "stated: long reads against a memory's stated bandwidth"
    yield "`LINK_SHARE`", f"{LINK_SHARE}", "stated: 25 GB/s of the 31.5 of PCIe 4.0 x16"
    yield "`LAUNCH_S`", f"{roofline.LAUNCH_S * 1e6:.2f} µs", "fitted: Laguna, all on an RTX 3090, 131 tokens/s"
    trip = f"{roofline.ROUND_TRIP_S * 1e6:.0f} µs"
    yield (
        "`ROUND_TRIP_S`",
        trip,
        "assumed: a stop of a card, a call of the host; a worker measures its own",
    )
    yield "`HOST_LAUNCHES`", f"{roofline.HOST_LAUNCHES}", "the design: beside each call of the host"
    yield "`PROMPT_SHARE`", f"{roofline.PROMPT_SHARE:.2%}", "fitted: 1,880 tokens/s of a prompt on an RTX 3060"
    yield "`FAST_SHARE`", f"{roofline.FAST_SHARE:.0%}", "assumed"
    yield "`HOT`", f"{hits.HOT}", "fitted: 39.7 of 312 choices missed at 60 % hot"
    yield "`RING`", f"{hits.RING}", "fitted: 5.6 of those 39.7 left by 16 slots"
    yield "`RING_ALONE`", f"{hits.RING_ALONE}", "fitted: 71.3 % found by a ring of 40 % alone, the built-in model"
    yield "`CARD_CONTEXT`", f"{CARD_CONTEXT >> 20} MiB", "stated"
    yield "`CARD_MARGIN`", f"{CARD_MARGIN:.1%}", "stated: a 16 GiB card showed 15.3 GiB free"
    yield (
        "`RESERVE_PARTS`",
        f"{RESERVE_PARTS}",
        "the design: buffers, each of what a token uses of a layer",
    )
    yield "`ROWS`", ", ".join(map(str, ROWS)), "the design: rows of the longest step of a prompt"
    yield "`ROWS_SHARE`", f"{ROWS_SHARE}", "the design: of the bytes of slots, what a longer step may take"
    yield "`LIKELY_ROWS`", f"{LIKELY_ROWS}", "the design: rows that an expert has to expect to be brought early"
    yield "`THREAD_BANDWIDTH`", f"{roofline.THREAD_BANDWIDTH / 1e9:.1f} GB/s", "measured: `bench/README.md`, Q4_K"
    rate = f"{roofline.THREAD_OPERATIONS / 1e9:.1f} G/s"
    yield "`THREAD_OPERATIONS`", rate, "fitted: a prompt of the eight-layer Laguna, `bench/README.md`"


#: Published for these models at Q4_K_M on cards of 24 GB: what, architecture, hot share, ring slots, GiB.
BYTES = (
    ("all resident", "laguna", 1.0, 0, 18.8),
    ("60 % hot, 32 ring slots", "laguna", 0.6, 32, 14.6),
    ("all resident", "qwen35moe", 1.0, 0, 20.5),
    ("50 % hot, 32 ring slots", "qwen35moe", 0.5, 32, 13.3),
)


def budgets(models: Models) -> Iterator[tuple[object, ...]]:
    for what, arch, share, ring, published in BYTES:
        shape = models.full[arch]
        needs = shape.device_for(ROWS[0], settings(), 1 << 50, 0).needs
        slots = sum(round(stack.experts * share + ring) * stack.record_bytes for stack in needs.stacks)
        slots_of_size = RESERVE_PARTS * max(shape.work.top_k)
        reserve = slots_of_size * sum({stack.record_bytes for stack in needs.stacks}) if share < 1 else 0
        weights = (needs.core + slots) / GIB
        everything = (needs.fixed + slots + reserve) / GIB
        yield (
            NAMES[arch], what, f"{weights:.2f}", f"{everything:.2f}", published, f"{weights / published - 1:+.1%}",
            f"{everything / published - 1:+.1%}",
        )  # fmt: skip


#: Published for an RTX 3090: what, architecture, choices that miss per token (None: by the prior at 50 % and 32 slots),
#: tokens per second from, to.
SPEEDS = (
    ("all resident (fitted to 131)", "laguna", 0.0, 119, 143),
    ("60 % of each layer at random, 36 % missed", "laguna", 0.36 * 312, 66, 66),
    ("60 % by calibration, no ring, 39.7 missed", "laguna", 39.7, 81, 81),
    ("60 %, ring of 16, 5.6 missed", "laguna", 5.6, 100, 129.5),
    ("60 %, ring of 32, 0.8 missed", "laguna", 0.8, 100, 129.5),
    ("60 %, ring of 48, 0.4 missed", "laguna", 0.4, 100, 129.5),
    ("all resident", "qwen35moe", 0.0, 108, 108),
    ("50 %, ring of 32, missed by the prior", "qwen35moe", None, 100, 100),
)


def speeds(models: Models) -> Iterator[tuple[object, ...]]:
    gpu = GPUS["rtx-3090"]
    for what, arch, missed, low, high in SPEEDS:
        work = models.full[arch].work
        experts = [stack.experts for stack in work.stacks]
        if missed is None:
            hit = hits.prior([n // 2 for n in experts], experts, RING).ring
        else:
            hit = 1 - missed / sum(work.top_k)
        speed = roofline.gpu_decode(work, gpu, LINKS[gpu.link], PROMPT, hit)
        published = f"{low}" if low == high else f"{low} - {high}"
        yield (
            NAMES[arch], what, f"{1 - hit:.1%}", f"{speed.tokens_s:.0f}", f"{speed.bytes_only:.0f}", published,
            error(speed.tokens_s, low, high),
        )  # fmt: skip


#: Of 256 experts: hot share, ring slots, share of choices that hit, and where that was seen.
HITS = (
    (0.6, 0, 1 - 39.7 / 312, "Laguna-XS.2, agent traffic (fitted)"),
    (0.6, 16, 1 - 5.6 / 312, "Laguna-XS.2, agent traffic (fitted)"),
    (0.6, 32, 1 - 0.8 / 312, "Laguna-XS.2, agent traffic"),
    (0.6, 48, 1 - 0.4 / 312, "Laguna-XS.2, agent traffic"),
    (0.0, 64, 0.509, "the built-in model, held-out text, one domain"),
    (0.0, 102, 0.713, "the built-in model, held-out text, one domain (fitted)"),
    (0.0, 154, 0.872, "the built-in model, held-out text, one domain"),
    (0.25, 0, 0.584, "the built-in model, held-out text, one domain"),
    (0.4, 0, 0.751, "the built-in model, held-out text, one domain"),
    (0.6, 0, 0.875, "the built-in model, held-out text, one domain"),
)


def hit_rates() -> Iterator[tuple[object, ...]]:
    for share, ring, seen, source in HITS:
        expected = hits.prior([round(256 * share)], [256], ring).ring
        yield f"{share:.0%}", ring, f"{expected:.1%}", f"{seen:.1%}", f"{(expected - seen) * 100:+.1f}", source


#: Measured by us with one thread and eight layers (`bench/README.md`): prompt of 512, decode; and published prompts.
MEASURED = (("laguna", 135.2, 18.3), ("qwen35moe", 152.1, 15.7))
PROMPTS = (("rtx-3060", 1880, "fitted"), ("rtx-5060-ti", 1350, ""))
#: Cards that are asked about at this share of hot experts, whatever their memory.
ASKED, SHARE = ("rtx-3090", "rtx-4080"), 0.6


def processors(models: Models) -> Iterator[tuple[object, ...]]:
    for arch, prompt, decode in MEASURED:
        work = models.bench[arch].work
        speed = roofline.cpu_prefill(work, PROCESSOR, DISK, 256, 512, 1.0)
        yield NAMES[arch], "prompt", f"{speed.tokens_s:.1f}", prompt, error(speed.tokens_s, prompt)
        speed = roofline.cpu_decode(work, PROCESSOR, DISK, 512, 1.0)
        yield NAMES[arch], "decode", f"{speed.tokens_s:.1f}", decode, error(speed.tokens_s, decode)


def prompts(models: Models) -> Iterator[tuple[object, ...]]:
    work = models.full["laguna"].work
    for card, published, how in PROMPTS:
        budget = forecast(models.full["laguna"], card).device
        assert budget is not None
        for rows in ROWS:
            made, row = prompt(work, card, rows, budget.residency)
            said = error(made.tokens_s, published) + (f" ({how})" if how and rows == PROMPT else "")
            yield *row, published, said
    for card, rows in itertools.product(ASKED, ROWS):
        yield *prompt(work, card, rows, SHARE)[1], "", ""


def prompt(work: Work, card: str, rows: int, residency: float) -> tuple[Speed, list[object]]:
    """A step of a prompt: what limits it, and the milliseconds of products, of the link, and of that the idle ones."""
    gpu = GPUS[card]
    made = roofline.gpu_prefill(work, gpu, LINKS[gpu.link], PROMPT // 2, rows, residency)
    terms = {term.name: term for term in made.overlapping}
    link = terms["experts over the link"]
    times = [f"{seconds * 1e3:.0f}" for seconds in (terms["products"].seconds, link.seconds, link.idle)]
    slowest = max(made.overlapping, key=lambda term: term.seconds).name
    return made, [card, f"{residency:.0%}", rows, f"{made.tokens_s:.0f}", slowest, *times]


def fast(models: Models) -> Iterator[tuple[object, ...]]:
    """Exact prompts beside inexact ones, and the rows of a step from which the latter would be faster."""
    work = models.full["laguna"].work

    def both(card: str, rows: int, share: float) -> tuple[Speed, Speed]:
        given = GPUS[card], LINKS[GPUS[card].link], PROMPT // 2, rows, share
        return roofline.gpu_prefill(work, *given), roofline.gpu_prefill_fast(work, *given)

    for card, share in itertools.product(("rtx-3060", "rtx-3090", "rtx-4080", "rtx-4090", "h200"), (1.0, SHARE)):
        gains = {}
        for rows in range(64, PROMPT + 1, 64):
            exact, inexact = both(card, rows, share)
            gains[rows] = inexact.tokens_s / exact.tokens_s
        worth = next((rows for rows, gain in gains.items() if gain >= 1.1), "none")
        yield card, f"{share:.0%}", shown(exact), shown(inexact), f"{gains[PROMPT] - 1:+.0%}", worth


def steps(models: Models) -> Iterator[tuple[object, ...]]:
    """What longer steps of prompts take from decoding, on cards where they take most."""
    for card, (arch, shape) in itertools.product(("rtx-2060", "rtx-4060", "rtx-3060", "rtx-4080"), models.full.items()):
        gpu, chosen = GPUS[card], forecast(shape, card).device
        assert chosen is not None
        for rows in ROWS:
            budget = shape.device_for(rows, settings(), chosen.limit, RING)
            shortest = shape.device_for(ROWS[0], settings(), chosen.limit, RING)
            experts = [stack.experts for stack in shape.work.stacks]
            hit = hits.prior(list(budget.hot), experts, budget.ring_slots).ring
            decode = roofline.gpu_decode(shape.work, gpu, LINKS[gpu.link], PROMPT, hit)
            chunk = roofline.gpu_prefill(shape.work, gpu, LINKS[gpu.link], PROMPT // 2, rows, budget.residency)
            lost = 1 - budget.slots_bytes / shortest.slots_bytes
            mark = "chosen" if rows == chosen.needs.rows else ""
            yield card, NAMES[arch], rows, f"{lost:.1%}", shown(decode), shown(chunk), mark


#: CPUs beside a card: threads, and what two channels of their memory state.
CPUS = (
    Processor(8, Link("DDR4-3200", 51.2e9, "stated")),
    Processor(16, Link("DDR5-5600", 89.6e9, "stated")),
)


def misses(models: Models) -> Iterator[tuple[object, ...]]:
    """Tokens per second of each way at shares of residency without a ring, and which one is taken."""
    for card, processor in itertools.product(("rtx-4060", "rtx-3060", "rtx-5070"), CPUS):
        gpu = GPUS[card]
        link = LINKS[gpu.link]
        for arch, shape in models.full.items():
            work, experts = shape.work, [stack.experts for stack in shape.work.stacks]
            rates = roofline.miss_rates(link, processor)
            for share in (0.1, 0.3, 0.6):
                hit = hits.prior([round(n * share) for n in experts], experts, 0).hot
                missed = work.experts_bytes * (1 - hit)
                ways = (
                    roofline.gpu_decode(work, gpu, link, PROMPT, hit),
                    roofline.gpu_decode_copied(work, gpu, link, PROMPT, hit),
                    roofline.gpu_decode_by_host(work, gpu, processor, PROMPT, hit),
                )
                worth = rates.worth_bytes(len(experts))
                name = f"{card}, {link.name}, {processor.threads} threads, {processor.memory.name}"
                yield (
                    name, NAMES[arch], f"{share:.0%}", f"{1 - hit:.0%}", f"{missed / 1e6:.0f}",
                    "never" if math.isinf(worth) else f"{worth / 1e6:.0f}", *(f"{way.tokens_s:.1f}" for way in ways),
                    rates.better(len(experts), missed).value,
                )  # fmt: skip


def cards(models: Models, names: Iterable[str], contexts: Iterable[tuple[int, int]]) -> Iterator[tuple[object, ...]]:
    for card in names:
        for arch, shape in models.full.items():
            for context, sequences in contexts:
                made = forecast(shape, card, context, sequences)
                budget = made.device
                assert budget is not None
                row = [card, NAMES[arch], f"{sequences} x {context}", f"{budget.used / GIB:.2f}"]
                if made.speeds is None:
                    yield (*row, "no", "", "", "", "", "", "", "; ".join(made.advice))
                    continue
                slots = f"{budget.residency:.0%}" + (f" + {budget.ring_slots}" if budget.ring_slots else "")
                rates = f"{made.hits.hot:.0%} / {made.hits.ring:.1%}"
                decode, without = made.speeds.decode, made.speeds.without_ring
                told = f"{without.tokens_s:.0f} - {decode.tokens_s:.0f}" if without != decode else shown(decode)
                advice = "; ".join(made.advice) or f"largest context: {made.context.largest}"
                chunk, wait = made.speeds.prefill, f"{made.speeds.wait_s * 1e3:.0f}"
                yield (*row, slots, rates, told, f"{decode.bytes_only:.0f}", chunk.tokens, shown(chunk), wait, advice)


def shown(speed: Speed) -> str:
    return f"{speed.tokens_s:.0f}"


def sections(models: Models) -> Iterator[str]:
    yield "## Constants\n"
    yield from table("constant | value | from", constants())
    yield "\n## Bytes on a card, against published figures\n"
    yield "GiB; one sequence of 8,192 positions. The published figures do not say which context they hold, nor whether"
    yield "the driver's part is counted: so both are given.\n"
    head = "model | what | weights | everything | published | error of weights | error of everything"
    yield from table(head, budgets(models))
    yield "\n## Decode on an RTX 3090, against published figures\n"
    yield f"Tokens per second of one sequence after {PROMPT} tokens; the error is against the nearer end of a range.\n"
    yield from table("model | what | missed | predicted | bytes alone | published | error", speeds(models))
    yield "\n## Hits by the prior, against what was seen\n"
    yield from table("hot | ring slots of 256 | prior | seen | points | where", hit_rates())
    yield "\n## Prompts on a card, against published figures\n"
    yield "The published figures name neither model nor residency; Laguna-XS.2 with one sequence of 8,192 is assumed."
    yield f"A step has {', '.join(map(str, ROWS[:-1]))} or {ROWS[-1]} rows at most, as a card has room for.\n"
    head = (
        "card | hot | rows a step | predicted | bound by | products, ms | link, ms | of that idle | published | error"
    )
    yield from table(head, prompts(models))
    yield """
Where we expect to be after 2,048 tokens at 60 %: on an RTX 3090 bound by products, on a 4080 by the link, on both ahead
of the two published figures, on paper. Why: in one step of 2,048 rows each cold expert crosses the link once; in four
of 512, which is llama.cpp's default, four times. Two things are not known. The rate of our products is fitted to a
published prompt: if ours are half as fast, the rows that are bound by products are worth half. And the published prompt
names neither its rows nor its residency: with 512 rows at ours its link would not have allowed it.
"""
    yield "\n## What a card misses: read in place, copied first, or by the CPU\n"
    yield "Tokens per second of one sequence, at shares of residency without a ring, hits by the prior; from how many"
    yield "missed MB on the CPU is worth its calls; and what `auto` takes. No card has run any of it.\n"
    head = "card, link, CPU | model | hot | missed | MB | worth from | in place | copied | by the CPU | auto"
    yield from table(head, misses(models))
    yield "\n## What longer steps of prompts cost\n"
    yield "One sequence of 8,192; tokens per second of decoding (with the ring) and of a prompt, and the share of the"
    yield "bytes of slots that the longer step takes.\n"
    yield from table("card | model | rows a step | of the slots | decode | prompt | ", steps(models))
    yield "\n## Exact and inexact prompts\n"
    share = f"{roofline.FAST_SHARE:.0%}"
    yield "`numerics.prefill` knows `exact` only. What products with weights unpacked to FP16 would be worth, if they"
    yield f"reach {share} of the stated FP16 rate (assumed): Laguna-XS.2, {PROMPT} rows a step. The last column has the"
    yield "rows of a step from which they would be faster by a tenth. To unpack all experts costs as much for"
    yield "few rows as for many, and where the link is what a prompt waits for, nothing is gained.\n"
    head = "card | hot | exact | inexact | gain | a tenth from"
    yield from table(head, fast(models))
    yield "\n## The CPU, against what we measured\n"
    yield "One thread, true shapes with eight layers; tokens per second.\n"
    yield from table("model | what | predicted | measured | error", processors(models))
    head = "card | model | sequences | GiB used | hot + ring | hits, hot / with ring | tokens/s | bytes alone"
    head += " | rows a step | prompt | others wait, ms | advice"
    yield "\n## Cards of 6, 8 and 12 GB\n"
    yield "Tokens per second: without anything from the ring, and with it. Others, who decode, wait for so long between"
    yield "two tokens while a prompt is read. Nothing of this was measured.\n"
    contexts = ((8192, 1), (32768, 1), (8192, 4), (32768, 4))
    yield from table(head, cards(models, ("rtx-2060", "rtx-4060", "rtx-3060"), contexts))
    yield "\n## All cards, one sequence of 8,192\n"
    yield from table(head, cards(models, GPUS, ((8192, 1),)))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = "\n".join(sections(Models.write(Path(folder)))) + "\n"
    document = DOCUMENT.read_text().partition(BEGIN)[0] + BEGIN + "\n" + made
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(document)
    else:
        sys.stdout.write(document)


if __name__ == "__main__":
    main()
