"""A worker killed in the middle of an answer: every option of sampling gives the very tokens it gives undisturbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon import PATIENCE_S, daemon

from spark_client import Client

TOKENS = 600
PROMPT = [7, 8, 9, 8, 7, 300, 301, 300] * 4
OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.05},
    "sampled": {"temperature": 1.1, "seed": 5, "min_p": 0.02, "top_k": 80, "frequency_penalty": 0.1},
    "biased": {"temperature": 0.9, "seed": 6, "logit_bias": {11: 4.0, 12: -4.0}, "repetition_penalty": 0.9},
    "told": {"temperature": 1.0, "seed": 7, "presence_penalty": 1.0, "logprobs": 2},
}


def start(client: Client, options: dict[str, Any]):
    return client.generate(tokens=PROMPT, max_tokens=TOKENS, ignore_eos=True, **options)


def test_resumed_requests_have_the_tokens_and_log_probabilities_they_have_undisturbed(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    with daemon(model_path("qwen35moe-tiny-s1-q4_k_m"), tmp_path / "run") as one, one.client() as client:
        expected = {}
        for name, options in OPTIONS.items():
            stream = start(client, options)
            stream.read(PATIENCE_S)
            assert len(stream.tokens) == TOKENS
            expected[name] = (stream.tokens, stream.text, stream.choices)
        assert len({tuple(tokens) for tokens, _, _ in expected.values()}) == len(OPTIONS)
        streams = {name: start(client, options) for name, options in OPTIONS.items()}
        for stream in streams.values():
            while len(stream.tokens) < 40:
                next(stream.events(PATIENCE_S))
        one.kill("worker")
        for name, stream in streams.items():
            *_, end = stream.events(PATIENCE_S)
            assert (stream.tokens, stream.text, stream.choices) == expected[name]
            assert end.resumed == 1
