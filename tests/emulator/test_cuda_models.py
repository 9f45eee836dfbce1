"""Whole models through the emulated kernels: the tokens and the bits of the native executor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from host_device import HostDevice
from pairs import Pair, card, loaded

from sparkd.errors import DeviceError

MODELS = [
    "qwen35moe-tinyk-s1-q4_k_m",
    "laguna-tinyk-s1-q4_k_m",
    pytest.param("qwen35moe-tiny-s1-f32", marks=pytest.mark.soak),
    pytest.param("laguna-tiny-s1-f32", marks=pytest.mark.soak),
    pytest.param("laguna-tinyk-s1-iq4_xs", marks=pytest.mark.soak),
    pytest.param("qwen35moe-tinyk-s1-mxfp4_moe", marks=pytest.mark.soak),
    pytest.param("qwen35moe-tiny-s1-bf16", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("order", ["random", pytest.param("forward", marks=pytest.mark.soak)])
def test_a_model_says_the_same_token_by_token(
    name: str, order: str, model_path: Callable[[str], Path], seed: int
) -> None:
    """A prompt, then three sequences decoding together, one of them joined late; logits and experts of every row."""
    rng = np.random.default_rng(seed)
    with loaded(model_path(name)) as arena:
        pair = Pair(arena.program, arena, card(seed=seed, order=order))
        first, second = pair.start(), pair.start()
        vocab = arena.program.vocab
        result = pair.step((first, rng.integers(0, vocab, 67).tolist()[:64]))
        token = int(result.logits[-1].argmax())
        result = pair.step((first, [token]), (second, rng.integers(0, vocab, 5).tolist()))
        tokens = [int(result.logits[0].argmax()), int(result.logits[-1].argmax())]
        third = pair.start()
        for number in range(4):
            parts = [(first, [tokens[0]]), (second, [tokens[1]])]
            if number == 1:
                parts.append((third, rng.integers(0, vocab, 3).tolist()))
            result = pair.step(*parts)
            tokens = [int(result.logits[0].argmax()), int(result.logits[1].argmax())]


def test_more_memory_than_there_is_is_refused(model_path: Callable[[str], Path]) -> None:
    with loaded(model_path("laguna-tinyk-s1-q4_k_m")) as arena, pytest.raises(DeviceError, match="not to be had"):
        Pair(arena.program, arena, HostDevice(size=1 << 20))
