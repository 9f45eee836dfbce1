"""The executor's own waits: steps whose streams are as late as the dice have it, and no wait can be left out.

`test_device_tier` and `test_device_staging` do the same for those of the worker.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from emulated_tiers import Churned
from host_device import HostStream
from pairs import Pair, loaded
from test_device_tier import Careless

from sparkd.store.arena import Arena

MODEL = "laguna-tinyk-s1-q4_k_m"
#: Where it waits.
PLACES = {"step", "_run_in_pieces", "run"}


class Hasty(Careless):
    """Of which also one wait of the host for a stream is left out."""

    def stream(self) -> HostStream:
        stream = super().stream()
        synchronize = stream.synchronize

        def maybe() -> None:
            if stream.run == stream.given or not self.left_out():
                synchronize()

        stream.synchronize = maybe
        return stream


@pytest.fixture(scope="module")
def arena(model_path: Callable[[str], Path]) -> Iterator[Arena]:
    with loaded(model_path(MODEL)) as arena:
        yield arena


def right(arena: Arena, device: Hasty, seed: int) -> bool:
    """Whether a prompt by tiles, and steps by graphs whose missing records are brought, give the CPU's bits."""
    pair = Pair(arena.program, arena, device, counts=(8,), prompt_rows=10, prompt_from=9)
    pair.cuda.serve_from(Churned(device, pair.cuda, arena, 0.3, seed, registered=False).tier)
    sequence = pair.start()
    try:
        pair.step((sequence, list(range(10))))
        pair.step((sequence, [5]))
    except (AssertionError, ValueError, IndexError, RuntimeError):
        return False
    return True


def without(arena: Arena, place: str, drop: int, seed: int) -> bool:
    """The same with one wait left out, in a process of its own: addresses that were never written may be read."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(0 if right(arena, Hasty(place, drop, seed=seed), seed) else 1)
    return os.waitpid(child, 0)[1] == 0


def test_with_all_waits_steps_are_right_and_there_are_no_others(arena: Arena, seed: int) -> None:
    device = Hasty(seed=seed)
    assert right(arena, device, seed)
    ours = {place for place in device.waits if place in PLACES}
    assert ours == PLACES
    assert set(device.waits) <= PLACES | {"_fill", "_read_parts", "_carry_out", "_await_oldest", "_land", "_give_back"}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_no_wait_can_be_left_out(arena: Arena, place: str) -> None:
    assert without(arena, "", 0, 1)
    for drop in (1, 2):
        assert not all(without(arena, place, drop, seed) for seed in range(20)), f"nobody misses wait {drop} of {place}"
