"""A worker's card divided: the true shapes of both models, from headers alone, on a card of 16 GiB that only counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sparse_models import make_full, untouched

from sparkd.config import LimitSettings, MemorySettings, ModelSettings, Settings, WorkerSettings
from sparkd.errors import BudgetError
from sparkd.executors.cuda_counted import CountingDevice
from sparkd.graph.state import StateLayout
from sparkd.planning.shape import Shape
from sparkd.residency import device_budget
from sparkd.residency.budget import GIB
from sparkd.residency.device_budget import CARD_CONTEXT, CARD_MARGIN, RING_SLOTS
from sparkd.worker.device_backend import DeviceBackend
from sparkd.worker.state import PoolSize

CONTEXT = 8192


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("full")
    made = {arch: make_full(arch, folder) for arch in ("laguna", "qwen35moe")}
    return lambda arch: made[arch]


def settings_for(path: Path, vram_gib: float) -> Settings:
    return Settings(
        model=ModelSettings(str(path)),
        memory=MemorySettings(vram_gib=vram_gib),
        limits=LimitSettings(context=CONTEXT, sequences=1),
        worker=WorkerSettings(misses="in_place"),  # what "auto" would measure is not there
    )


@contextmanager
def backend(device: CountingDevice, path: Path, vram_gib: float) -> Iterator[DeviceBackend]:
    settings = settings_for(path, vram_gib)
    with untouched(settings) as arena:
        layout = StateLayout.of(arena.program, 2)
        size_for = functools.partial(PoolSize.worst_case, layout, 1, CONTEXT)
        made = DeviceBackend(device, "full", settings, arena, layout, size_for, CONTEXT, lambda: None)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("arch", "share", "gib"), [("laguna", 0.6, 14.6), ("qwen35moe", 0.5, 13.3)], ids=["laguna", "qwen35moe"]
)
def test_the_published_shares_fit_into_the_published_bytes_of_a_16_gib_card(
    arch: str, share: float, gib: float, full: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the driver's part: with it all is still well within what such a card has.

    Published are tenths of a GiB, so half of one is no more than they say. Longer steps of prompts would take of that.
    """
    monkeypatch.setattr(device_budget, "ROWS", device_budget.ROWS[:1])
    gib += 0.05
    device = CountingDevice(16 * GIB, CARD_CONTEXT)
    with backend(device, full(arch), gib + CARD_CONTEXT / GIB) as made:
        border = made.status()["device"]
        [tier] = made.tiers()
        layers, slots = len(tier.experts), sum(tier.slots)
        print(f"{arch}: {device.bytes / GIB:.2f} GiB, {slots} of {sum(tier.experts)} experts in slots")
        assert slots >= sum(tier.experts) * share + 32 * layers
        assert device.bytes <= border["used_bytes"] <= border["limit_bytes"] == int(gib * GIB)
        assert device.bytes + CARD_CONTEXT <= 16 * GIB * (1 - CARD_MARGIN)
        assert made.tiers() == [], "told once"


@pytest.mark.parametrize("gib", [6, 8, 12])
@pytest.mark.parametrize("arch", ["laguna", "qwen35moe"])
def test_what_is_planned_is_what_a_worker_takes_within_one_percent(
    arch: str, gib: int, full: Callable[[str], Path]
) -> None:
    """Also of what it takes beside slots, and with steps of prompts as long as those that were planned."""
    device = CountingDevice(gib * GIB, CARD_CONTEXT)
    settings = settings_for(full(arch), gib)
    planned = Shape.open(settings).device(settings, gib * GIB - int(gib * GIB * CARD_MARGIN), RING_SLOTS)
    with backend(device, full(arch), 0) as made:
        took = made.status()["device"]["used_bytes"] + CARD_CONTEXT
        sizes, slabs = made._tier.slabs(), made._arena.layout.slabs
        slots = sum(size.slots * slab.record_bytes for size, slab in zip(sizes, slabs, strict=True))
        assert took == pytest.approx(planned.used, rel=0.01)
        beside, needs = took - slots, planned.needs
        assert beside == pytest.approx(needs.fixed, rel=0.01)
        print(f"{arch}, {gib} GiB: {needs.rows} rows, {planned.residency:.1%}, {took / planned.used - 1:+.2%}")
        assert made.rows == needs.rows and made.size.bytes(made.executor._layout) == needs.kv + needs.state
        assert made.least_rows == (512 if planned.residency < 1 else 1)


def test_without_a_limit_all_but_a_margin_is_used_and_never_more(full: Callable[[str], Path]) -> None:
    for card in (8, 12, 16, 24):
        device = CountingDevice(card * GIB, CARD_CONTEXT)
        with backend(device, full("laguna"), 0) as made:
            free, total = device.memory()
            assert free >= int(total * CARD_MARGIN)
            whole = card == 24
            assert (made.tiers() == []) == whole
            if not whole:
                assert free - total * CARD_MARGIN < 3 << 20, "a slot more would fit"


def test_a_card_that_is_too_small_is_refused_in_one_line(full: Callable[[str], Path]) -> None:
    for gib in (1.0, 2.0):
        with (
            pytest.raises(
                BudgetError,
                match=r"^memory\.vram_gib: needs .* of GPU memory.* of 16\.00 GiB were free.*; lower limits\.context",
            ),
            backend(CountingDevice(16 * GIB, CARD_CONTEXT), full("laguna"), gib),
        ):
            pass
