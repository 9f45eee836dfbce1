"""The protocol of the device tier: steps that read every record find its bytes, however late the streams are.

And no wait of it can be left out.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from emulated_tiers import Churned
from host_device import HostDevice, HostEvent, HostStream
from numpy.typing import NDArray
from pairs import loaded

from sparkd.executors.cuda import Reach
from sparkd.store.arena import Arena

MODEL = "laguna-tiny-s1-q4_k_m"
STEPS = 14


class WrongBytes(AssertionError):
    """A step has read something else than the record that it was led to."""


class Careless(HostDevice):
    """A device of which one wait is left out, where there is something to wait for: the `drop`-th of one place.

    Places are the methods of the tier that wait; "": none is left out. `waits` counts them.
    """

    def __init__(self, place: str = "", drop: int = 0, **given: object) -> None:
        super().__init__(**given)
        self.place, self.drop = place, drop
        self.waits: Counter[str] = Counter()

    def stream(self) -> HostStream:
        return _CarelessStream(self)

    def left_out(self) -> bool:
        frame = sys._getframe(2)
        place = frame.f_code.co_name
        self.waits[place] += 1
        return self.place == place and self.waits[place] == self.drop


class _CarelessStream(HostStream):
    def __init__(self, device: Careless) -> None:
        super().__init__(device.dice)
        self._device = device

    def record(self) -> HostEvent:
        return _CarelessEvent(self, self._device)

    def wait(self, event: HostEvent) -> None:
        if event.reached or not self._device.left_out():
            super().wait(event)


class _CarelessEvent(HostEvent):
    def __init__(self, stream: HostStream, device: Careless) -> None:
        super().__init__(stream)
        self._device = device

    def done(self) -> bool:
        return super().done() or self._device.left_out()


class Reader:
    """Stands for the executor: a step reads all records that the tables lead to, when the stream comes to it."""

    def __init__(self, device: HostDevice, arena: Arena) -> None:
        self.device = device
        self.stream = device.stream()
        self.layers = arena.layout.layers
        sizes = [arena.layout.slabs[layer.slab].record_bytes for layer in self.layers]
        hosts = arena.records()
        self._wanted = [
            [_bytes(int(address), size) for address in addresses] for addresses, size in zip(hosts, sizes, strict=True)
        ]
        self._tables = [device.allocate(8 * layer.experts) for layer in self.layers]
        self._widest = max(layer.experts for layer in self.layers)

    def publish_layer(self, layer: int, addresses: NDArray[np.uint64]) -> None:
        self.device.upload(self.stream, self._tables[layer], addresses)

    def step(self, churned: Churned, top_k: int = 2) -> None:
        tier, dice = churned.tier, churned.random
        rows = tier.part_rows if tier.begin() is Reach.PARTS else None
        chosen = np.array(
            [[dice.sample(range(layer.experts), top_k) for _ in range(min(rows or 2, 2))] for layer in self.layers]
        ).astype(np.int16)
        for layer, experts in enumerate(chosen):
            if rows is None:
                self._read(layer, range(self.layers[layer].experts))
            else:
                self.stream.synchronize()
                tier.bring(layer, np.unique(experts[:1]).tolist(), np.unique(experts[1:]).tolist())
                self._read(layer, np.unique(experts).tolist())
                tier.let_go()
        tier.meanwhile()
        self.stream.synchronize()
        tier.used(np.arange(chosen.shape[1]) == 0, chosen)

    def _read(self, layer: int, experts: range | list[int]) -> None:
        def work() -> None:
            table = np.frombuffer(_bytes(self._tables[layer], 8 * self.layers[layer].experts), np.uint64)
            for expert in experts:
                wanted = self._wanted[layer][expert]
                if not table[expert] or not np.array_equal(_bytes(int(table[expert]), len(wanted)), wanted):
                    raise WrongBytes(f"expert {expert} of expert layer {layer}")

        self.stream.push(work)
        self.stream.poke()


def _bytes(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


@pytest.fixture(scope="module")
def arena(model_path: Callable[[str], Path]) -> Iterator[Arena]:
    with loaded(model_path(MODEL)) as arena:
        yield arena


def live(arena: Arena, share: float, seed: int, device: Careless, *, registered: bool, steps: int = STEPS) -> Churned:
    """Some steps with misses, placements, and blocks that are given back, and in part taken back."""
    reader = Reader(device, arena)
    churned = Churned(device, reader, arena, share, seed, registered=registered)
    for number in range(steps):
        reader.step(churned)
        churned.happen()
        if share == 0.5:
            if number == steps // 2:
                churned.tier.shrink(3 * max(churned.slots.record_bytes))
            if number > steps // 2:
                churned.taken_back += churned.tier.grow(churned.tier.growth)
    return churned


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_every_step_reads_every_record_as_it_is(arena: Arena, share: float, registered: bool, seed: int) -> None:
    for number in range(4):
        device = Careless(seed=seed + number)
        churned = live(arena, share, seed + number, device, registered=registered, steps=40)
        if share:
            assert churned.tier.moved
        if share == 0.5:
            assert churned.tier.given_back == 0 < churned.taken_back


#: Where the tier waits.
PLACES = {"_carry_out", "_await_oldest", "_land", "_give_back"}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_no_wait_can_be_left_out(arena: Arena, place: str) -> None:
    """Of each place the first waits: for each there are dice with which a step reads wrong bytes without it."""
    for drop in range(1, 6 if place != "_give_back" else 2):
        for seed in range(200):
            try:
                live(arena, 0.5, seed, Careless(place, drop, seed=seed), registered=place != "_await_oldest")
            except WrongBytes:
                break
        else:
            pytest.fail(f"nobody misses wait {drop} of {place}")


def test_there_are_no_other_waits(arena: Arena) -> None:
    waits: Counter[str] = Counter()
    for seed, registered in itertools.product(range(6), (True, False)):
        device = Careless(seed=seed)
        live(arena, 0.5, seed, device, registered=registered)
        waits += device.waits
    assert set(waits) == PLACES
