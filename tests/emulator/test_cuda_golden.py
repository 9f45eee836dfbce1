"""The CUDA executor against the golden vectors of both families, at every residency: within what holds for the CPU.

Every step is also compared with the native executor's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from emulated_tiers import Churned
from host_device import HostDevice
from numpy.typing import NDArray
from pairs import Pair, Running, loaded
from tolerances import check_floats, check_quantised

#: Models with the share of their experts that has a slot.
FLOATS = [("laguna-tiny-s1-f32", 0.5), ("qwen35moe-tiny-s1-f32", 0.1)]
INTEGERS = [("laguna-tinyk-s1-q4_k_m", 0.1), ("qwen35moe-tinyk-s1-q4_k_m", 0.5), ("qwen35moe-tiny-s1-q8_0", 1.0)]
SHARES = [0.0, 0.1, 0.5, 1.0]


@dataclass
class Answer:
    """One sequence of a pair, and what it gave so far."""

    sequence: Running
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    experts: list[NDArray[np.int16]] = field(default_factory=list)

    @property
    def all_logits(self) -> NDArray[np.float32]:
        return np.concatenate(self.logits)

    @property
    def all_experts(self) -> NDArray[np.int16]:
        return np.concatenate(self.experts, axis=1)


class Pairs:
    """Implements `tolerances.Runner`: both executors, the CUDA one from a tier that churns between its steps."""

    CHUNK = 16

    def __init__(self, pair: Pair, churned: Churned) -> None:
        self._pair, self._churned = pair, churned

    def prefill(self, tokens: Sequence[int]) -> Answer:
        answer = Answer(self._pair.start())
        for first in range(0, len(tokens), self.CHUNK):
            self._step(answer, tokens[first : first + self.CHUNK])
        return answer

    def greedy(self, run: Answer, count: int) -> list[int]:
        tokens = [int(run.logits[-1][-1].argmax())]
        while len(tokens) < count:
            self._step(run, tokens[-1:])
            tokens.append(int(run.logits[-1][-1].argmax()))
        return tokens

    def end(self, run: Answer) -> None:
        self._pair.end(run.sequence)

    def _step(self, answer: Answer, tokens: Sequence[int]) -> None:
        result = self._pair.step((answer.sequence, tokens))
        answer.logits.append(result.logits)
        answer.experts.append(result.experts)
        self._churned.tier.used(np.ones(len(tokens), bool), result.experts)
        self._churned.happen()


@contextmanager
def pairs(path: Path, share: float, seed: int) -> Iterator[Pairs]:
    """Caches of f32, as the golden vectors have them."""
    with loaded(path) as arena:
        device = HostDevice(seed=seed, order="random")
        pair = Pair(arena.program, arena, device, kv_bytes=4, positions=200, max_rows=Pairs.CHUNK, sequences=1)
        churned = Churned(device, pair.cuda, arena, share, seed)
        pair.cuda.serve_from(churned.tier)
        yield Pairs(pair, churned)


@pytest.fixture
def vectors(vectors_path: Callable[[str], Path]) -> Callable[[str], Mapping[str, NDArray]]:
    return lambda name: dict(np.load(vectors_path(name)))


@pytest.mark.parametrize(("name", "share"), FLOATS)
def test_float_files_agree_on_every_logit_expert_and_token(model_path, vectors, name: str, share: float, seed) -> None:
    with pairs(model_path(name), share, seed) as both:
        check_floats(both, vectors(name), ("p1", "p17"))


@pytest.mark.parametrize(("name", "share"), INTEGERS)
def test_quantised_files_err_no_more_than_the_cpu_may(model_path, vectors, name: str, share: float, seed) -> None:
    with pairs(model_path(name), share, seed) as both:
        check_quantised(both, vectors(name), ("p1", "p17"))


@pytest.mark.soak
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", [name for name, _ in (*FLOATS, *INTEGERS)])
def test_long_prompts_are_as_near_at_every_residency(model_path, vectors, name: str, share: float, seed) -> None:
    check = check_floats if name.endswith("f32") else check_quantised
    with pairs(model_path(name), share, seed) as both:
        check(both, vectors(name), ("p1", "p17", "p130"))
