"""Whole models of true shapes, and the demo model: equal bits on every instruction set, thread count and chunk."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkd.kernels import available

DEMO = Path(__file__).parents[2] / "sparkd" / "demo" / "spark-demo-laguna.gguf"
SMALL = [f"{arch}-small-s1-{quant}" for arch in ("laguna", "qwen35moe") for quant in ("q8_0", "q4_k_m")]
BENCH = [f"{arch}-bench-s1-q4_k_m" for arch in ("laguna", "qwen35moe")]
#: Positions: more than the largest chunk, several page groups of the attention, a window left behind.
TOKENS = 530
CHUNKS = (1, 17, 512)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


def check(loaded: Any, machine: Callable[..., Any], ways: list[tuple[str, int, int]]) -> None:
    """Logits after a prompt and after four more tokens, and all experts, for (isa, threads, chunk)."""
    tokens = np.random.default_rng(1).integers(0, min(loaded.program.vocab, 4096), TOKENS).tolist()
    expected: tuple[bytes, list[int], bytes, bytes] | None = None
    for isa, threads, chunk in ways:
        native = machine(loaded, isa=isa, threads=threads, kv_bytes=2, sequences=1)
        run = native.prefill(tokens, chunk, last_only=True)
        after = run.logits[-1][-1].tobytes()
        decoded = native.greedy(run, 5)
        found = after, decoded, run.logits[-1][-1].tobytes(), run.all_experts.tobytes()
        expected = expected or found
        assert found == expected, f"{isa}, {threads} threads, chunks of {chunk}"


@pytest.mark.parametrize("name", [*SMALL, "demo"])
def test_models_give_equal_bits_whatever_computes_them(load, load_file, machine, name: str) -> None:
    loaded = load_file(DEMO) if name == "demo" else load(name)
    check(loaded, machine, list(product(available(), (1, 2, 3), CHUNKS)))


@pytest.mark.parametrize("name", BENCH)
def test_models_of_gigabytes_give_equal_bits_whatever_computes_them(load, machine, name: str) -> None:
    """The scalar definition takes minutes for each of these prompts, so it is run once."""
    if not os.environ.get("SPARKD_TEST_MODELS"):
        pytest.skip("SPARKD_TEST_MODELS names no folder in which 9 GB of models may be made and kept")
    first, *others = available()
    ways = [(first, threads, chunk) for threads, chunk in zip((1, 2, 3), reversed(CHUNKS), strict=True)]
    check(load(name), machine, ways + [(isa, 2, 512) for isa in others])
