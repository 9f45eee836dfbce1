"""What barriers and fences of the kernels are for: with all of them all accesses are ordered, without any one some not.

`simt_races.h` says what orders accesses. Both models run steps that come to every barrier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_device import HostDevice
from pairs import F32, MadeWeights, Pair, loaded
from test_cuda_kernels import blocks_of, program

from sparkd.errors import DeviceError
from sparkd.executors.base import Batch
from sparkd.executors.cuda_source import kernel_source
from sparkd.gguf.formats import FORMATS_BY_NAME
from sparkd.graph import ops
from sparkd.graph.ops import Value, Weight
from sparkd.graph.program import KvCache

pytestmark = pytest.mark.soak
MODELS = ["laguna-tinyk-s1-q4_k_m", "qwen35moe-tinyk-s1-q4_k_m"]
_SYNC = re.compile(r"\s*(if \(last\) )?(__syncthreads|__syncwarp|__threadfence)\(\);")
_FUNCTION = re.compile(r"(?:.* )?(\w+)\((?:const|float|int|uint|Bytes)[^;]*$")


def barriers() -> Iterator[tuple[int, str]]:
    """Line and function of each barrier and fence in the source of the kernels."""
    function = ""
    for number, line in enumerate(kernel_source([]).splitlines(), 1):
        if found := _FUNCTION.match(line):
            function = found.group(1)
        if _SYNC.match(line):
            yield number, function


BARRIERS = [pytest.param(line, id=f"{function}-{line}") for line, function in barriers()]


@contextmanager
def without(line: int) -> Iterator[Callable[[], HostDevice]]:
    """Makes devices on which the barrier of a line (0: none) is left out."""
    made: list[Dropping] = []

    class Dropping(HostDevice):
        def compile(self, source: str, kernels) -> None:
            super().compile(source, kernels)
            self.compiled.simt_drop(line)
            made.append(self)

    try:
        yield lambda: Dropping(seed=1, order="random", find_races=True)
    finally:
        for device in made:
            device.compiled.simt_drop(0)


def model_steps(path: Path, device: HostDevice) -> None:
    """A prompt, then two sequences of which one has several rows; then the best token alone."""
    with loaded(path) as arena:
        pair = Pair(arena.program, arena, device, counts=(8,), prompt_rows=10, prompt_from=9)
        first, second = pair.start(), pair.start()
        pair.step((first, list(range(10))))
        pair.step((first, [5]), (second, [7, 8, 9, 9, 8, 7, 6]))
        batch = Batch(np.array([3], np.int32), pair.segments(1), np.zeros(1, np.int32))
        best = pair.cuda.step(replace(batch, best_of=arena.program.vocab)).best
        assert best is not None and best[0] == pair.native.step(batch).logits[0].argmax()


def long_rows(device: HostDevice) -> None:
    """Weight rows of more columns than a warp stages at once."""
    rng = np.random.default_rng(1)
    x, y = Value("x", 4096), Value("y", 4)
    format = FORMATS_BY_NAME["Q4_K"]
    built: list[ops.Op] = [ops.Embed(Weight("x", 2, 4096), x), ops.Linear(x, Weight("w", 4, 4096), y)]
    head = rng.normal(size=(2, 4)).astype(np.float32)
    rows = rng.normal(size=(2, 4096)).astype(np.float32)
    tensors = {"head": (head, F32), "x": (rows, F32), "w": (blocks_of(rng, format, 4, 4096), format)}
    pair = Pair(program(built, y, vocab=2), MadeWeights(tensors), device, counts=(8,), keep=[y])
    pair.step((pair.start(), [0, 1]))


def long_pages(device: HostDevice) -> None:
    """More positions of a page than are staged at once."""
    rng = np.random.default_rng(1)
    q, k, v, o = (Value(name, width) for name, width in (("q", 64), ("k", 32), ("v", 32), ("o", 64)))
    built: list[ops.Op] = [ops.Embed(Weight(value.name, 40, value.width), value) for value in (q, k, v)]
    built.append(ops.Attention(q, k, v, o, 2, 1, 32, 0.125, 0, 0))
    tensors = {value.name: (rng.normal(size=(40, value.width)).astype(np.float32), F32) for value in (q, k, v)}
    tensors["head"] = rng.normal(size=(40, 64)).astype(np.float32), F32
    made = program(built, o, vocab=40, caches=(KvCache(0, 1, 32, 0),))
    pair = Pair(made, MadeWeights(tensors), device, counts=(8,))
    pair.step((pair.start(), list(range(40))))


def small(device: Callable[[], HostDevice]) -> None:
    """What no model of the tests is large enough for."""
    long_rows(device())
    long_pages(device())


def test_no_two_accesses_are_unordered_and_all_barriers_are_come_to(model_path: Callable[[str], Path]) -> None:
    with without(0) as device:
        small(device)
        passed: set[int] = set()
        for name in MODELS:
            on = device()
            model_steps(model_path(name), on)
            passed |= {line for line, _ in barriers() if on.compiled.simt_passed(line)}
    assert passed == {line for line, _ in barriers()}


@pytest.mark.parametrize("line", BARRIERS)
def test_no_barrier_can_be_left_out(line: int, model_path: Callable[[str], Path]) -> None:
    with without(line) as device:
        try:
            small(device)
            for name in MODELS:
                model_steps(model_path(name), device())
        except (DeviceError, AssertionError) as error:
            print(error)
            return
    pytest.fail("nobody misses it")
