"""A model file with numbers that are none: the request that meets them fails with the reason, all others go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from daemon import PATIENCE_S, daemon

from spark_client import Client, RequestFailed
from sparkd.gguf.model_file import ModelFile

POISON = 7


def poisoned(model: Path, folder: Path) -> Path:
    """A copy whose embedding of one token is not a number."""
    copy = folder / model.name
    shutil.copyfile(model, copy)
    embedding = ModelFile.open(copy).tensors["token_embd.weight"]
    with copy.open("r+b") as file:
        file.seek(embedding.offset + POISON * embedding.row_bytes)
        file.write(np.full(embedding.columns, np.nan, "<f4").tobytes())
    return copy


def greedy(client: Client, prompt: list[int]):
    return client.generate(tokens=prompt, max_tokens=40, ignore_eos=True, logit_bias={POISON: -100.0})


@pytest.mark.parametrize("name", ["laguna-tiny-s1-f32", "qwen35moe-tiny-s1-f32"])
def test_a_request_that_meets_them_fails_alone_and_leaves_nothing_to_the_next(
    name: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_path(name)
    prompts = [[n + 100] * (3 * n + 1) for n in range(4)]
    with daemon(model, tmp_path / "sound") as one, one.client() as client:
        expected = []
        for prompt in prompts:
            stream = greedy(client, prompt)
            stream.read(PATIENCE_S)
            expected.append(stream.tokens)
    with daemon(poisoned(model, tmp_path), tmp_path / "run", limits={"sequences": 2}) as one, one.client() as client:
        pids = one.pids()
        for _ in range(3):
            bad = [greedy(client, [1, POISON, 2] * n) for n in (1, 40)]
            good = [greedy(client, prompt) for prompt in prompts]
            for stream in bad:
                with pytest.raises(RequestFailed, match=r"logit of token \d+ is not finite") as failed:
                    stream.read(PATIENCE_S)
                assert failed.value.code == "request" and not failed.value.retry and stream.tokens == []
            for stream, tokens in zip(good, expected, strict=True):
                stream.read(PATIENCE_S)
                assert stream.tokens == tokens
        assert one.pids() == pids and one.status()["state"] == "ready"
