"""Whole models through the emulated kernels at every residency of the device: the bits of the native executor."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from emulated_tiers import Churned
from host_device import HostDevice
from pairs import Pair, loaded

from sparkd.residency.misses import Misses

MODELS = ["qwen35moe-tinyk-s1-q4_k_m", "laguna-tinyk-s1-q4_k_m"]
STEPS = 4


def say_the_same(
    path: Path, share: float, seed: int, *, registered: bool, misses: Misses = Misses.IN_PLACE, steps: int = STEPS
) -> None:
    """A prompt beside decoding, then two sequences; placements, misses and lost blocks between and under the steps."""
    rng = np.random.default_rng(seed)
    with loaded(path) as arena:
        device = HostDevice(seed=seed)
        host_threads = 2 if misses is Misses.HOST else 0
        pair = Pair(arena.program, arena, device, positions=64, max_rows=16, host_threads=host_threads)
        churned = Churned(device, pair.cuda, arena, share, seed, registered=registered, misses=misses)
        pair.cuda.serve_from(churned.tier)
        vocab = arena.program.vocab
        first, second = pair.start(), pair.start()
        pair.step((first, rng.integers(0, vocab, 10).tolist()), logits=False)
        result = pair.step((first, rng.integers(0, vocab, 3).tolist()))
        token = int(result.logits[-1].argmax())
        result = pair.step((first, [token]), (second, rng.integers(0, vocab, 9).tolist()))
        for number in range(steps):
            churned.tier.used(np.ones(result.experts.shape[1], bool), result.experts)
            churned.happen()
            if number == steps // 2:
                churned.tier.shrink(1)
            tokens = [int(result.logits[0].argmax()), int(result.logits[-1].argmax())]
            result = pair.step((first, tokens[:1]), (second, tokens[1:]))
        uses = sum(counts.uses for counts in churned.tier.counts().values())
        misses = sum(counts.misses for counts in churned.tier.counts().values())
        assert uses > 0
        assert (misses == uses) == (share == 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("share", "registered", "misses"),
    [
        (0.0, True, Misses.IN_PLACE),
        (0.1, True, Misses.IN_PLACE),
        (0.5, True, Misses.IN_PLACE),
        (1.0, True, Misses.IN_PLACE),
        (0.0, False, Misses.IN_PLACE),
        (0.5, False, Misses.IN_PLACE),
        (0.0, True, Misses.COPY),
        (0.5, True, Misses.COPY),
        (0.1, True, Misses.HOST),
        (0.6, False, Misses.HOST),
    ],
)
def test_a_model_says_the_same_wherever_its_experts_are(
    name: str, share: float, registered: bool, misses: Misses, model_path: Callable[[str], Path], seed: int
) -> None:
    say_the_same(model_path(name), share, seed, registered=registered, misses=misses)


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_demo_model_says_the_same_wherever_its_experts_are(share: float, seed: int) -> None:
    say_the_same(Path(str(files("sparkd.demo") / "spark-demo-laguna.gguf")), share, seed, registered=True, steps=24)
