"""The CPU's part of a device's step: the bits of the native executor, in whatever order the dice run what may overlap.

And neither wait of it can be left out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from emulated_tiers import Churned
from host_device import HostDevice, HostGraph, HostStream
from pairs import Pair, loaded

from sparkd.errors import DeviceError
from sparkd.executors.cuda_host import HostExperts, call_now
from sparkd.executors.device import HostCall
from sparkd.residency.misses import Misses
from sparkd.store.arena import Arena

MODELS = ["qwen35moe-tinyk-s1-q4_k_m", "laguna-tinyk-s1-q4_k_m"]


class Hasty(HostDevice):
    """A device whose graphs leave a wait out: `call` does not wait for anything, or nothing waits for it."""

    def __init__(self, left_out: str, **given: object) -> None:
        super().__init__(**given)
        self.left_out = left_out
        self.calls: set[Callable[[], None]] = set()

    def call(self, stream: HostStream, call: HostCall) -> None:
        super().call(stream, call)
        self.calls.add(stream.capture.work[-1])

    def capture(self, work: Callable[[HostStream], None]) -> HostGraph:
        graph = super().capture(work)
        calls = {number for number, work in enumerate(graph.work) if work in self.calls}
        for number, waits in enumerate(graph.waits):
            if self.left_out == "before" and number in calls:
                # Only the order of calls is left: the driver makes one at a time.
                graph.waits[number] = frozenset({max((c for c in calls if c < number), default=0)})
            if self.left_out == "after":
                graph.waits[number] = waits - calls
        return graph


def decode(arena: Arena, device: HostDevice, share: float, seed: int, rows: int, steps: int = 2) -> Churned:
    """Steps of `rows` sequences at a share of residency that the CPU makes up for."""
    rng = np.random.default_rng(seed)
    pair = Pair(arena.program, arena, device, sequences=8, positions=64, max_rows=16, host_threads=2)
    churned = Churned(device, pair.cuda, arena, share, seed, misses=Misses.HOST)
    pair.cuda.serve_from(churned.tier)
    running = [pair.start() for _ in range(rows)]
    for _ in range(steps):
        result = pair.step(*((one, rng.integers(0, arena.program.vocab, 1).tolist()) for one in running))
        churned.tier.used(np.ones(rows, bool), result.experts)
        churned.happen()
    return churned


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_all_sizes_say_the_same_at_every_residency(
    name: str, model_path: Callable[[str], Path], seed: int
) -> None:
    shares = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    missed = 0
    with loaded(model_path(name)) as arena:
        for number, rows in enumerate((1, 2, 3, 5, 8)):
            device = HostDevice(seed=seed + number, order="random")
            churned = decode(arena, device, shares[(seed + number) % len(shares)], seed + number, rows)
            assert device.launched["tell_host"] == device.launched["take_host"] > 0
            missed += sum(counts.misses for counts in churned.tier.counts().values())
    assert missed > 0  # few rows of one size may find all they want


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
@pytest.mark.parametrize("name", [*MODELS, "demo"])
def test_longer_answers_say_the_same_at_every_residency(
    name: str, share: float, model_path: Callable[[str], Path], seed: int
) -> None:
    path = Path(str(files("sparkd.demo") / "spark-demo-laguna.gguf")) if name == "demo" else model_path(name)
    with loaded(path) as arena:
        for rows in range(1, 9):
            decode(arena, HostDevice(seed=seed + rows, order="random"), share, seed + rows, rows, steps=8)


@pytest.mark.parametrize("left_out", ["before", "after"])
def test_no_wait_for_the_host_can_be_left_out(left_out: str, model_path: Callable[[str], Path]) -> None:
    with loaded(model_path(MODELS[1])) as arena:
        for seed in range(20):
            try:
                decode(arena, Hasty(left_out, seed=seed), 0.1, seed, 2)
            except AssertionError:
                return
    pytest.fail(f"nobody misses the wait {left_out} a call")


def test_a_capture_that_the_host_does_not_come_back_to_is_refused() -> None:
    device = HostDevice()
    side = device.stream()

    def work(stream: HostStream) -> None:
        side.wait(stream.record())
        device.zero(side, 0, 0)

    with pytest.raises(DeviceError, match="a capture ends before streams"):
        device.capture(work)
    assert side.capture is None


def test_what_goes_wrong_in_a_call_is_told_after_the_step_and_ends_the_calls(
    model_path: Callable[[str], Path],
) -> None:
    """No exception crosses the driver's thread."""
    with loaded(model_path(MODELS[1])) as arena:
        host = HostExperts(HostDevice(), arena.program, arena, threads=2)
        told = (ctypes.c_int32 * 3).from_address(host.told)
        host.check()
        told[0] = 9
        call_now(host.calls[0])
        with pytest.raises(DeviceError, match=r"failed: expert layer 0: 9 rows are told of, 8 may be$"):
            host.check()
        told[0] = 1
        call_now(host.calls[1])
        with pytest.raises(DeviceError, match="expert layer 0"):
            host.check()
        host = HostExperts(HostDevice(), arena.program, arena, threads=2)
        told = (ctypes.c_int32 * 3).from_address(host.told)
        told[:2] = 1, 1000
        call_now(host.calls[1])
        with pytest.raises(DeviceError, match=r"expert layer 1: expert 1000 is wanted, there are \d+$"):
            host.check()
