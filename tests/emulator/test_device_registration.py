"""Host memory is pinned in pieces of whole experts, as large as the driver takes them, while steps run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from emulated_tiers import Churned
from host_device import HostDevice
from pairs import loaded
from test_device_tier import Reader

from sparkd.store.arena import Arena
from sparkd.store.layout import PAGE
from sparkd.worker.registration import Registration


@pytest.fixture(scope="module")
def arena(model_path: Callable[[str], Path]) -> Iterator[Arena]:
    with loaded(model_path("laguna-tiny-s1-q4_k_m")) as arena:
        yield arena


def least(arena: Arena) -> list[int]:
    """Bytes of the fewest slots of each slab that end with a page."""
    return [math.lcm(slab.record_bytes, PAGE) for slab in arena.layout.slabs]


@pytest.mark.parametrize("at_once", [1, 3])
def test_pieces_are_as_large_as_the_driver_takes_them(arena: Arena, at_once: int) -> None:
    """All is pinned in the end; a piece holds whole experts."""
    device = HostDevice()
    device.pinned_at_once = at_once * max(least(arena)) + PAGE - 1
    registration = Registration(device, arena)
    while registration.register_next():
        pass
    pieces = list(registration.take())
    assert registration.refused == ""
    assert sum(size for _, size, _ in pieces) == registration.bytes == arena.layout.records_bytes
    slabs = arena.layout.slabs
    starts = [arena.region.address + slab.offset for slab in slabs]
    for address, size, there in pieces:
        number = max(n for n, start in enumerate(starts) if start <= address)
        assert (address - starts[number]) % slabs[number].record_bytes == 0 == size % slabs[number].record_bytes
        assert size <= device.pinned_at_once and there == address
    # At most half of what was taken is given away by trying halves.
    assert len(pieces) <= 2 * sum(math.ceil(s.slots * s.record_bytes / device.pinned_at_once) for s in slabs) + len(
        slabs
    )


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_of_a_limit_in_all_hardly_anything_is_left(arena: Arena, part: float, seed: int) -> None:
    """And steps read all experts as they are, before, meanwhile and after."""
    device = HostDevice(seed=seed)
    device.pinnable = part * arena.layout.records_bytes
    reader = Reader(device, arena)
    churned = Churned(device, reader, arena, 0.3, seed, registered=False)
    churned.registration = registration = Registration(device, arena, piece_bytes=1 << 30)
    churned.tier._registration = registration
    going = True
    while going:
        reader.step(churned)
        going = registration.register_next()
        churned.tier.advance()
    for _ in range(4):
        reader.step(churned)
        churned.tier.advance()
    assert device.pinnable - max(least(arena)) < registration.bytes <= device.pinnable
    assert 0 <= churned.tier.readable() < sum(layer.experts for layer in arena.layout.layers)
    assert not churned.tier.all_readable
    assert registration.refused.startswith("host memory cannot be pinned for the GPU: ")
