"""Forecasts: bytes are the daemon's own, to the byte; speeds keep to what they were fitted to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from counting_device import allocated
from sparse_models import TWENTY, make_full, make_one_of_twenty

from sparkd.calibration import profile
from sparkd.calibration.counts import RoutingCounts
from sparkd.calibration.shadow import WARM
from sparkd.config import LimitSettings, ModelSettings, Settings, WorkerSettings
from sparkd.errors import ConfigError
from sparkd.gguf.formats import FORMATS
from sparkd.graph.state import StateLayout
from sparkd.planning import hits, roofline
from sparkd.planning.forecast import Card, Forecast, Machine, make_forecast
from sparkd.planning.hardware import GPUS, LINKS, Link, find_gpu, find_link
from sparkd.planning.roofline import PROMPT, Processor, Speed, Term
from sparkd.planning.shape import Shape, with_limits
from sparkd.residency.budget import GIB, Limit, Scope
from sparkd.residency.device_budget import ROWS
from sparkd.store.layout import BLOCK, ArenaLayout
from sparkd.store.limits import host_limits
from sparkd.store.plan import make_plan
from sparkd.store.planned import STEP_ROWS
from sparkd.worker.state import PoolSize, StatePool

ENOUGH = [Limit("enough", 1 << 50)]
PROCESSOR = Processor(2, Link("host memory", 40e9, "stated"))
DISK = Link("disk", 3e9, "stated")


def machine(card: str | None = None, vram_gib: float | None = None, limits=ENOUGH, ring: int = 32) -> Machine:
    gpu = None if card is None else GPUS[card]
    vram = None if vram_gib is None else int(vram_gib * GIB)
    return Machine(limits, PROCESSOR, DISK, gpu and Card(gpu, LINKS[gpu.link], vram, ring))


def settings_for(path: Path, **limits: int) -> Settings:
    return Settings(model=ModelSettings(str(path)), limits=LimitSettings(**limits))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shape]:
    """The two published models, whole."""
    folder = tmp_path_factory.mktemp("full")
    return {arch: Shape.open(settings_for(make_full(arch, folder))) for arch in ("laguna", "qwen35moe")}


def forecast(shape: Shape, on: Machine, **limits: int) -> Forecast:
    return make_forecast(settings_for(Path("unused"), **limits), on, shape)


# ---- bytes ----


@pytest.mark.parametrize("name", TWENTY)
def test_what_is_told_of_host_memory_is_what_arena_and_state_pool_take(name, tmp_path):
    path = make_one_of_twenty(name, tmp_path)
    for context, sequences in ((64, 1), (1000, 3), (1 << 22, 2)):
        settings = settings_for(path, context=context, sequences=sequences)
        made = make_forecast(settings, machine())
        shape = Shape.open(settings)
        layout = StateLayout.of(shape.program, 2)
        size = PoolSize.worst_case(layout, sequences, min(context, shape.program.context), STEP_ROWS)
        pool = StatePool(layout, size, STEP_ROWS)
        while (held := pool.admit(made.context.positions)) is not None:
            pool.extend(held, min(made.context.positions, STEP_ROWS))
        assert made.context.kv + made.context.state == size.bytes(layout) >= pool.used_bytes() > 0
        arena = ArenaLayout.of(shape.program, shape.model).total_bytes
        assert made.host.fit.needs.arena == pytest.approx(arena, rel=0.01)
        assert made.host.fit.needs.total == make_plan(settings, limits=ENOUGH).need_bytes
        assert made.fits and not made.host.layout.partial
        most, least = made.host.fit.needs.total, shape.with_least(settings, ENOUGH).needs.total
        for limit in (least, (least + most) // 2):
            limits = [Limit("limit", limit)]
            less, plan = make_forecast(settings, machine(limits=limits), shape), make_plan(settings, limits=limits)
            assert (less.host.layout.total_bytes, less.host.fit.needs.total) == (plan.arena_bytes, plan.need_bytes)
            assert less.host.fit.needs.arena == plan.arena_bytes <= limit and less.host.layout.partial == plan.partial


def test_every_tensor_of_the_published_models_is_counted_once(full):
    # The sums stand in the published lists of tensors; the three pieces of a record have room for whole blocks.
    for arch, tensors, experts, active in (
        ("laguna", 20_270_574_592, 18_981_322_752, 1_766_812_672),
        ("qwen35moe", 21_155_768_832, 19_503_513_600, 1_975_675_392),
    ):
        made = forecast(full[arch], machine())
        assert made.tensor_bytes == tensors
        room = sum(layer.experts for layer in full[arch].program.expert_layers) * 3 * BLOCK
        assert made.host.fit.needs.records == experts + room
        assert made.host.fit.needs.core == pytest.approx(tensors - experts, rel=1e-4)
        embedding_row = 2048 // 256 * 144
        assert made.work.core_bytes + made.work.experts_bytes == active + embedding_row


def test_only_the_ten_layers_of_qwen_that_have_a_cache_are_counted(full):
    made = forecast(full["qwen35moe"], machine("rtx-3090"), context=8192, sequences=4)
    assert made.context.kv == 4 * 10 * 8192 * (2 * 2 * 256 * 2)
    assert made.context.state == pytest.approx(4 * 30 * 4 * (32 * 128 * 128 + 3 * 8192), rel=1e-4)
    assert (made.device.needs.kv, made.device.needs.state) == (made.context.kv, made.context.state)
    assert made.work.kv_bytes(1000) == 10 * 1000 * (2 * 2 * 256 * 2)


def test_laguna_keeps_ten_layers_whole_and_of_thirty_a_window(full):
    a_position = 2 * 8 * 128 * 2
    short, long = (forecast(full["laguna"], machine(), context=n, sequences=1).context.kv for n in (8192, 65536))
    assert long - short == 10 * (65536 - 8192) * a_position
    window = 512 + STEP_ROWS + 63
    assert short - 10 * 8192 * a_position <= 30 * (window // 64 * 64 + 64) * a_position
    assert full["laguna"].work.kv_bytes(4096) == (10 * 4096 + 30 * 512) * a_position


@pytest.mark.parametrize(
    ("arch", "share", "ring", "published"),
    [("laguna", 1, 0, 18.8), ("laguna", 0.6, 32, 14.6), ("qwen35moe", 1, 0, 20.5), ("qwen35moe", 0.5, 32, 13.3)],
)
def test_budgets_of_a_card_are_near_published_ones(full, arch, share, ring, published):
    needs = full[arch].device_for(ROWS[0], settings_for(Path("unused"), sequences=1), 24 * GIB, ring).needs
    slots = sum(round(stack.experts * share + ring) * stack.record_bytes for stack in needs.stacks)
    # What is published may or may not count caches and the driver's part: the truth is between the two.
    weights, everything = (needs.core + slots) / GIB, (needs.fixed + slots) / GIB
    assert weights * 0.995 < published < everything * 1.005
    assert everything / weights < 1.08


@pytest.mark.parametrize("rows", ROWS)
def test_the_gpu_executor_allocates_what_was_planned_within_one_percent(full, rows):
    for shape in full.values():
        needs = shape.device_for(rows, settings_for(Path("unused"), sequences=1), 14 * GIB, 32).needs
        beside_slots = needs.context + allocated(shape, 8192, rows) + shape.staging(rows)
        assert beside_slots == pytest.approx(needs.fixed, rel=0.01)


def test_launches_are_those_that_the_executor_makes(full):
    for arch, token, prompt in (("laguna", 407, 757), ("qwen35moe", 406, 834)):
        work = full[arch].work
        assert (work.launches.token, work.launches.prompt, work.launches.part) == (token, prompt, 4)
        made = forecast(full[arch], machine("rtx-3090"), sequences=1)
        assert {term.name: term.amount for term in made.speeds.decode.serial}["launches"] == token
        # Two parts of 64 rows on a card that holds nothing: what is there, and 32 of 256 records at a time.
        assert work.parts(2048, 0.0, 32) == len(work.stacks) * 8 and work.parts(2048, 1.0, 32) == len(work.stacks)


def test_a_card_that_shows_no_sign_of_its_memory_plans_nothing(full):
    made = forecast(full["laguna"], machine("rtx-3090", 0.0))
    assert not made.fits and made.device.limit == 0
    assert "none of the card's 24.00 GiB is free" in made.notes
    assert forecast(full["laguna"], machine("rtx-3090", 25.0)).device.limit == 24 * GIB


# ---- limits and advice ----


def test_a_limit_one_percent_below_the_need_tells_need_limit_and_what_would_fit(full):
    need = forecast(full["laguna"], machine(), context=8192, sequences=4).host.fit.need
    # With a card every expert has to be in host memory.
    exact = forecast(full["laguna"], machine("h200", limits=[Limit("limit", need)]), context=8192, sequences=4)
    assert exact.fits and exact.context.largest == 8192
    limit = need * 99 // 100
    limits = [Limit("memory.max of cgroup /a", limit)]
    short = forecast(full["laguna"], machine("h200", limits=limits), context=8192, sequences=4)
    assert not short.fits and short.speeds is None
    told = short.advice[0]
    assert f"needs {need / GIB:.2f} GiB" in told and f"memory.max of cgroup /a allows {limit / GIB:.2f} GiB" in told
    assert f"fits: --context {short.context.largest} --sequences 4 with all experts in memory" in short.advice
    assert "fits: --context 8192 --sequences 1 with all experts in memory" in short.advice


def test_the_largest_context_fits_and_one_page_more_does_not(full):
    for arch in full:
        for held, card in (("with_all", "h200"), ("with_least", None)):
            need = getattr(full[arch], held)(Settings(), ENOUGH).needs.total
            on = machine(card, limits=[Limit("limit", need - 123_456_789)])
            largest = forecast(full[arch], on).context.largest
            assert largest % 64 == 0
            assert forecast(full[arch], on, context=largest).fits
            assert not forecast(full[arch], on, context=largest + 64).fits


def test_what_all_experts_would_take_is_told_with_a_type_of_weights_that_would(full):
    made = forecast(full["qwen35moe"], machine("h200", limits=[Limit("--host", 15 * GIB, Scope.ARENA)]))
    assert made.context.largest == 0 and not made.fits
    assert "weights of 14.99 GiB would fit with one sequence, these have 19.72 GiB" in made.advice[1]
    assert "as Q3_K this model would have about 13.87 GiB" in made.advice[1]
    tiny = forecast(full["qwen35moe"], machine(limits=[Limit("--host", GIB, Scope.ARENA)]))
    assert not tiny.fits and "of weights at least, --host allows 1.00 GiB" in tiny.advice[0]
    bits, name = min((kind.bytes / kind.block, kind.name) for kind in FORMATS.values() if kind.arithmetic is not None)
    least = made.parameters * bits / GIB
    assert f"no type of weights is small enough ({name}: {least:.2f} GiB)" in tiny.advice[1]


def test_a_model_larger_than_host_memory_is_told_by_its_slots_its_hits_and_its_disk(full):
    shape = full["laguna"]
    previous = 0.0
    for gib in (2, 4, 8, 12, 16, 18, 19):
        made = forecast(shape, machine(limits=[Limit("--host", gib * GIB, Scope.ARENA)]), sequences=1)
        host, terms = made.host, {term.name: term for term in made.speeds.decode.serial}
        needs = host.fit.needs
        tiers = (host.hot_bytes, host.ring_bytes, host.spare_bytes, host.reserve_bytes)
        assert sum(tiers) == needs.records and min(tiers) >= 0
        assert host.layout.partial == (gib < 19)
        assert made.fits and (gib * GIB * 0.99 < needs.arena <= gib * GIB or not host.layout.partial)
        assert host.residency == pytest.approx(sum(host.ordinary) / (39 * 256), abs=0.01)
        missed = terms["experts from disk"].amount if host.layout.partial else 0
        assert missed == pytest.approx(shape.work.experts_bytes * (1 - made.hits.hot))
        assert made.speeds.decode.tokens_s > previous
        previous = made.speeds.decode.tokens_s
    assert previous == forecast(shape, machine(), sequences=1).speeds.decode.tokens_s


def test_a_card_that_is_too_small_is_told_what_it_needs_and_what_fits_on_it(full):
    made = forecast(full["laguna"], machine("rtx-2060"), context=32768, sequences=4)
    needed, allowed = made.device.used / GIB, made.device.limit / GIB
    assert f"card: needs {needed:.2f} GiB before the first expert, {allowed:.2f} GiB may be used" in made.advice[0]
    context = made.context.largest
    assert made.advice[1:] == (f"fits: --context {context} --sequences 4", "fits: --context 32768 --sequences 1")
    assert forecast(full["laguna"], machine("rtx-2060"), context=context, sequences=4).fits
    hopeless = forecast(full["laguna"], machine("rtx-2060", 1.0))
    assert "are needed even for one sequence of 64 positions; serve it without a card" in hopeless.advice[1]


@pytest.mark.parametrize("card", ["rtx-2060", "rtx-4060", "rtx-3060", "rtx-4080"])
def test_whatever_is_advised_for_a_small_card_is_so(full, card):
    """What is said to fit fits, what is said to be hot is, and nobody is sent where it is worse."""
    for shape in full.values():
        for limits in ({"context": c, "sequences": s} for c in (8192, 32768, 131072) for s in (1, 4, 16)):
            made = forecast(shape, machine(card), **limits)
            assert made.fits == (not made.device.missing)
            told = [re.fullmatch(r"fits: --context (\d+) --sequences (\d+)", line) for line in made.advice]
            changed = [{"context": int(m[1]), "sequences": int(m[2])} for m in told if m]
            assert bool(changed) == (not made.fits), "a model without a card's worth of room says what would fit"
            for other in changed:
                assert forecast(shape, machine(card), **other).fits
                assert other["context"] <= limits["context"] and other["sequences"] <= limits["sequences"]
            for line in made.advice:
                more = re.match(r"--(sequences|context) (\d+) would have ([\d.]+)% of", line)
                if more:
                    better = forecast(shape, machine(card), **(limits | {more[1]: int(more[2])}))
                    assert better.device.residency == pytest.approx(float(more[3]) / 100, abs=6e-4)
                    assert better.device.residency >= made.device.residency + 0.02
                    assert better.speeds.decode.tokens_s > made.speeds.decode.tokens_s
                smaller = re.match(r"smaller weights: as (\w+) \(([\d.]+) GiB, less exact\) .* ([\d.]+)% hot", line)
                if smaller:
                    kind = next(kind for kind in FORMATS.values() if kind.name == smaller[1])
                    assert kind.bytes * 8 / kind.block >= 3
                    assert float(smaller[2]) * GIB < made.device.needs.records + made.device.needs.core
                    assert float(smaller[3]) / 100 > made.device.residency
                assert more or smaller or line.startswith(("card: needs", "fits: ", "card: 2 threads alone"))


def test_a_card_slower_than_the_processor_is_not_recommended(full):
    fast = Processor(64, Link("host memory", 400e9, "stated"))
    limits = [*ENOUGH]
    on = Machine(limits, fast, DISK, Card(GPUS["rtx-2060"], LINKS["pcie3x4"], None, 32))
    made = forecast(full["laguna"], on, sequences=1)
    assert made.advice[-1].startswith("card: 64 threads alone would decode faster, at ")
    assert not any("threads alone" in line for line in forecast(full["laguna"], machine("rtx-3060")).advice)


def _tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    ("mount", "own", "files"),
    [
        (
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "0::/a",
            {"memory.max": 30 * GIB, "memory.current": 28 * GIB, "memory.stat": f"inactive_file {27 * GIB}"},
        ),
        (
            "35 31 0:32 / /sys/fs/cgroup rw - cgroup cgroup rw,memory",
            "4:memory:/a",
            {
                "memory.limit_in_bytes": 30 * GIB,
                "memory.usage_in_bytes": 28 * GIB,
                "memory.stat": f"total_inactive_file {27 * GIB}",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_a_cgroup_of_either_version_limits_a_forecast_and_its_page_cache_does_not(full, tmp_path, mount, own, files):
    meminfo = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB"}
    root = _tree(
        tmp_path,
        {"proc/self/mountinfo": mount, "proc/self/cgroup": own}
        | meminfo
        | {f"sys/fs/cgroup/a/{name}": content for name, content in files.items()},
    )
    made = forecast(full["laguna"], machine(limits=host_limits(0.0, root=root)))
    assert made.fits and made.host.fit.limit.size == 29 * GIB
    _tree(root, {f"sys/fs/cgroup/a/{name}": "max" for name in files if "max" in name or "limit" in name})
    without = forecast(full["laguna"], machine(limits=host_limits(0.0, root=root)))
    assert "MemAvailable" in without.host.fit.limit.name


# ---- hits ----


def test_the_prior_gives_the_figures_it_was_fitted_to():
    hot = [round(256 * 0.6)] * 39
    experts = [256] * 39
    assert 312 * (1 - hits.prior(hot, experts, 0).ring) == pytest.approx(39.7, rel=0.02)
    assert 312 * (1 - hits.prior(hot, experts, 16).ring) == pytest.approx(5.6, rel=0.03)
    assert hits.prior([0], [256], 102).ring == pytest.approx(0.713, abs=0.01)


def test_more_slots_never_hit_less():
    for hot in range(0, 256, 15):
        fewer = hits.prior([hot], [256], 0)
        assert fewer.hot == fewer.ring <= hits.prior([hot + 1], [256], 0).hot
        for ring in (1, 8, 200, 256):
            assert fewer.ring < hits.prior([hot], [256], ring).ring <= 1.0
    assert hits.prior([256], [256], 0) == hits.Hits(1.0, 1.0, "the fact that every expert is there")


def test_counts_tell_what_each_layers_busiest_experts_hit():
    counts = [[90, 5, 5, 0], [25, 25, 25, 25]]
    made = hits.counted(counts, 1000, [1, 2], [4, 4], 0)
    assert (made.hot, made.source) == (pytest.approx((0.9 + 0.5) / 2), "this model's profile (1000 tokens)")
    assert hits.counted([[0] * 4, [1] * 4], 5000, [1, 2], [4, 4], 0).source.startswith("the prior")


def test_the_profile_of_a_model_is_used_and_a_damaged_one_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    settings = settings_for(make_one_of_twenty("hybrid-many", tmp_path))
    shape = Shape.open(settings)
    layers, experts = len(shape.work.stacks), shape.work.stacks[0].experts
    counts = RoutingCounts(layers, experts)
    counts.decode = np.zeros((layers, experts), np.uint64)
    counts.decode[:, 0] = 2000
    fixed = shape.device_for(ROWS[0], settings, 1 << 40, 0).needs.fixed
    some = (fixed + 16 * shape.work.stacks[0].record_bytes + 2 * layers * shape.work.stacks[0].record_bytes) / GIB
    for rows, source in ((999, "the prior (no profile of this model)"), (2000, "this model's profile (2000 tokens)")):
        counts.decode_rows = rows
        profile.save(tmp_path, shape.model.fingerprint, counts)
        assert make_forecast(settings, machine("rtx-3090", some, ring=0)).hits.source == source
    made = make_forecast(settings, machine("rtx-3090", some, ring=0))
    assert made.hits.hot == 1.0
    assert 0 < made.device.residency < 1
    half = (shape.least.total_bytes + shape.whole.total_bytes) // 2
    partial = make_forecast(settings, machine(limits=[Limit("--host", half, Scope.ARENA)]))
    assert partial.host.layout.partial and partial.host.pinned == WARM.pinned and partial.host.hot_bytes > 0
    path = profile.profile_path(tmp_path, shape.model.fingerprint)
    path.write_bytes(path.read_bytes()[:-1])
    assert make_forecast(settings, machine("rtx-3090", some, ring=0)).hits.source.startswith("the prior")
    assert path.exists()


# ---- speeds ----


def test_fitted_constants_give_the_figures_they_were_fitted_to(full):
    work = full["laguna"].work
    card, link = GPUS["rtx-3090"], LINKS["pcie4x16"]
    assert roofline.gpu_decode(work, card, link, PROMPT, 1.0).tokens_s == pytest.approx(131, rel=0.01)
    prompt = forecast(full["laguna"], machine("rtx-3060"), sequences=1).speeds.prefill
    assert prompt.tokens == PROMPT
    assert prompt.tokens_s == pytest.approx(1880, rel=0.01)


def test_inexact_prompts_unpack_what_they_touch_and_gain_nothing_where_the_link_is_slower(full):
    work = full["laguna"].work
    assert work.touched_weights(1) == pytest.approx(work.core_macs + work.expert_macs)
    card, link = GPUS["rtx-3090"], LINKS["pcie3x4"]
    ways = [way(work, card, link, 1024, 2048, 0.6) for way in (roofline.gpu_prefill, roofline.gpu_prefill_fast)]
    assert ways[0].tokens_s == ways[1].tokens_s
    [products] = [term for term in ways[1].overlapping if term.name == "products"]
    assert products.idle == pytest.approx(4 * work.touched_weights(2048) / (936e9 * roofline.MEMORY_SHARE))


def test_the_link_is_idle_before_choices_are_known_but_for_what_the_buffers_hold(full):
    work, card, link = full["laguna"].work, GPUS["rtx-3060"], LINKS["pcie4x16"]
    small, large = (
        next(t for t in roofline.gpu_prefill(work, card, link, 1024, 2048, 0.4, n).overlapping if "link" in t.name)
        for n in (512, 2048)
    )
    assert small.amount == large.amount and small.idle > large.idle > 0
    # So few rows that no expert is likely enough: nothing comes early.
    few = roofline.gpu_prefill(work, card, link, 1024, 128, 0.4, 2048)
    assert work.likely_bytes(128, 64) == 0 and next(t for t in few.overlapping if "link" in t.name).idle > 0


def test_decode_pays_its_terms_in_turn_and_a_prompt_the_slowest_of_them():
    terms = (Term("a", 10, "bytes", 5, ""), Term("b", 6, "launches", 2, ""))
    assert Speed(1, terms).seconds == 5 and Speed(1, terms).bytes_only == 0.5
    chunk = Speed(10, terms[1:], (terms[0], Term("c", 80, "operations", 10, "")))
    assert chunk.seconds == 3 + 8 and chunk.bytes_only == 5


def test_what_the_card_lacks_crosses_the_link_and_no_byte_is_read_twice(full):
    for shape in full.values():
        made = forecast(shape, machine("rtx-3060"))
        terms = {term.name: term for term in made.speeds.decode.serial}
        vram, link = terms["experts from VRAM"], terms["experts over the link"]
        assert vram.amount + link.amount == pytest.approx(shape.work.experts_bytes)
        assert link.amount == pytest.approx(shape.work.experts_bytes * (1 - made.hits.ring))
        assert terms["core from VRAM"].amount == shape.work.core_bytes
        assert made.speeds.without_ring.tokens_s < made.speeds.decode.tokens_s < made.speeds.decode.bytes_only
        chunk = {term.name: term.amount for term in made.speeds.prefill.overlapping}
        assert chunk["experts over the link"] <= made.host.fit.needs.records * (1 - made.device.residency)


def test_what_is_missed_is_paid_once_whatever_becomes_of_it(full):
    """The CPU's part is paid beside the card's; calls of the host are paid where nothing is missed, too."""
    work, card, link = full["laguna"].work, GPUS["rtx-3060"], LINKS["pcie4x16"]
    fast = Processor(16, Link("host memory", 89.6e9, "stated"))
    layers = len(work.stacks)
    for hit in (0.2, 0.98):
        in_place = roofline.gpu_decode(work, card, link, PROMPT, hit)
        copied = roofline.gpu_decode_copied(work, card, link, PROMPT, hit)
        host = roofline.gpu_decode_by_host(work, card, fast, PROMPT, hit)
        missed = work.experts_bytes * (1 - hit)
        terms = {term.name: term for term in (*host.serial, *host.overlapping)}
        assert terms["missed experts, by the CPU"].amount == pytest.approx(missed)
        assert terms["experts from VRAM"].amount + missed == pytest.approx(work.experts_bytes)
        assert terms["launches"].amount == work.launches.token + 2 * layers
        assert copied.seconds - in_place.seconds == pytest.approx(
            2 * missed / (card.bandwidth * roofline.MEMORY_SHARE) + layers * roofline.ROUND_TRIP_S
        )
        assert (host.seconds < in_place.seconds) == (hit == 0.2)
    whole = [way(work, card, link, PROMPT, 1.0).seconds for way in (roofline.gpu_decode, roofline.gpu_decode_copied)]
    assert whole[0] == whole[1] < roofline.gpu_decode_by_host(work, card, fast, PROMPT, 1.0).seconds


def test_auto_is_the_cpu_where_enough_is_missed_and_a_setting_is_kept(full):
    fast = dataclasses.replace(machine("rtx-3060", 4), processor=Processor(16, Link("host memory", 89.6e9, "stated")))
    for misses, wanted in (("auto", "host"), ("copy", "copy"), ("in_place", "in_place"), ("host", "host")):
        made = make_forecast(
            Settings(limits=LimitSettings(context=8192, sequences=1), worker=WorkerSettings(misses=misses)),
            fast, full["laguna"],
        )  # fmt: skip
        assert made.speeds.misses.value == wanted
        assert dict(made.speeds.by_misses)[made.speeds.misses] == made.speeds.decode
    whole = dataclasses.replace(fast, card=Card(GPUS["rtx-3090"], LINKS["pcie4x16"], None, 32))
    assert forecast(full["laguna"], whole, sequences=1).speeds.misses.value == "in_place", "nothing is missed"


def test_one_prompt_row_touches_its_own_experts_and_very_many_touch_all(full):
    work = full["qwen35moe"].work
    assert work.touched_bytes(1) == pytest.approx(work.experts_bytes)
    assert work.touched_bytes(10_000) == pytest.approx(sum(stack.size for stack in work.stacks))


def test_more_of_everything_is_never_slower(full):
    shape = full["laguna"]
    previous = 0.0
    for vram in (4, 6, 8, 12, 16, 20, 24):
        made = forecast(shape, machine("rtx-3090", vram), sequences=1)
        assert made.speeds.decode.tokens_s >= previous
        previous = made.speeds.decode.tokens_s
    slow, fast = (
        forecast(shape, dataclasses.replace(machine("rtx-3060"), card=Card(GPUS["rtx-3060"], LINKS[link], None, 32)))
        for link in ("pcie3x4", "pcie5x16")
    )
    assert slow.speeds.prefill.tokens_s < fast.speeds.prefill.tokens_s


def test_threads_bound_a_processor_until_its_memory_does():
    memory = Link("host memory", 40e9, "stated")
    assert Processor(1, memory).bandwidth == roofline.THREAD_BANDWIDTH
    assert Processor(16, memory).bandwidth == 40e9 * roofline.MEMORY_SHARE


@pytest.mark.parametrize("text", ["RTX 3090", "rtx3090", "3090", "NVIDIA GeForce RTX 3090", "rtx-3090"])
def test_a_card_is_found_however_its_name_is_written(text):
    assert find_gpu(text) is GPUS["rtx-3090"]


@pytest.mark.parametrize("text", ["", "3091", "rtx", "x" * 5000, "\0"])
def test_a_card_nobody_knows_is_refused_with_those_that_are(text):
    with pytest.raises(ConfigError, match="known ones: rtx-2060, "):
        find_gpu(text)


def test_links_have_names_and_speeds():
    assert find_link("PCIe 4 x16") is LINKS["pcie4x16"]
    assert LINKS["pcie4x16"].bandwidth == pytest.approx(25.2e9, rel=0.01)
    assert find_link("12.5").bandwidth == 12.5e9
    for text in ("0", "-1", "nan", "inf", "1e9", "", "pcie9"):
        with pytest.raises(ConfigError, match="neither the name of a link nor its speed"):
            find_link(text)


def test_other_limits_leave_the_rest_of_the_settings_alone():
    changed = with_limits(Settings(), context=64)
    assert changed.limits.context == 64
    assert dataclasses.replace(changed, limits=Settings().limits) == Settings()
