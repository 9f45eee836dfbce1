"""The native executor against the golden vectors, and against itself: equal bits however a step is put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tolerances import FLOAT_LIMIT, Vectors, check_floats, check_quantised

from sparkd.kernels import available

RECIPES = json.loads((Path(__file__).parents[1] / "data" / "models" / "recipes.json").read_text())
FLOATS = ("f32", "f16", "bf16")
NAMES = {r["model"]: r["quant"] in FLOATS for r in RECIPES if not r["overrides"] and r["preset"] != "bench"}


def models(floats: bool) -> list[Any]:
    """Names of float or quantised models; the small ones are for the long tests."""
    chosen = [name for name, is_float in NAMES.items() if is_float is floats]
    return [pytest.param(name, marks=pytest.mark.soak) if "-small-" in name else name for name in chosen]


@pytest.fixture(
    params=[("p1", "p17", "p130"), pytest.param(("p1", "p17", "p130", "p600"), marks=pytest.mark.soak)],
    ids=["short", "all"],
)
def prompts(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture
def vectors(vectors_path: Callable[[str], Path]) -> Callable[[str], Vectors]:
    return lambda name: dict(np.load(vectors_path(name)))


@pytest.mark.parametrize("name", models(floats=True))
def test_float_files_agree_on_every_logit_expert_and_token(load, vectors, machine, prompts, name: str) -> None:
    loaded = load(name)
    native = machine(loaded, keep=loaded.program.layer_outputs)

    def layers() -> NDArray:
        return np.stack([native.executor.trace(value) for value in loaded.program.layer_outputs])

    check_floats(native, vectors(name), prompts, layers)


@pytest.mark.parametrize("name", models(floats=False))
def test_quantised_files_err_no_more_than_rounded_activations_do(load, vectors, machine, prompts, name: str) -> None:
    check_quantised(machine(load(name)), vectors(name), prompts)


@pytest.mark.parametrize(
    ("yarn", "reading"), [("llama", "A_keys_ignored"), ("keys", "B_betas"), ("final", "C_betas_and_attn_factor")]
)
def test_each_reading_of_the_yarn_keys_gives_its_own_logits(load, vectors, machine, yarn: str, reading: str) -> None:
    name = "laguna-tiny-yarn-s1-f32"
    stored, native = vectors(name), machine(load(name, yarn))
    for prompt in ("p17", "p130"):
        run = native.prefill(stored[f"{prompt}_tokens"].tolist())
        assert np.abs(run.all_logits[-1] - stored[f"{prompt}_{reading}_logits_last"]).max() < FLOAT_LIMIT


# --- equal to itself

SELF = ("laguna-tiny-s1-q4_k_m", "qwen35moe-tiny-s1-bf16", "laguna-tinyk-s1-iq4_xs", "qwen35moe-tinyk-s1-q4_k_m")
WHOLE = 600


@pytest.fixture(params=[2, 4], ids=["kv-f16", "kv-f32"])
def kv_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


def assert_same(run: Any, expected: Any) -> None:
    assert run.all_logits.tobytes() == expected.all_logits.tobytes()
    assert run.all_experts.tobytes() == expected.all_experts.tobytes()


@pytest.mark.parametrize("name", SELF)
def test_bits_do_not_depend_on_chunks_threads_or_instruction_set(load, vectors, machine, kv_bytes, name: str) -> None:
    loaded, tokens = load(name), vectors(name)["p130_tokens"].tolist()
    expected = machine(loaded, kv_bytes=kv_bytes).prefill(tokens)
    assert_same(machine(loaded, kv_bytes=kv_bytes, threads=2).prefill(tokens, 37), expected)
    for isa in available():
        assert_same(machine(loaded, kv_bytes=kv_bytes, threads=2, isa=isa).prefill(tokens, 129), expected)


@pytest.mark.parametrize("name", SELF)
def test_a_sequence_does_not_feel_the_rows_of_others(load, vectors, machine, name: str) -> None:
    stored, native = vectors(name), machine(load(name), kv_bytes=2, threads=2)
    first, second, third = (stored[f"{p}_tokens"].tolist() for p in ("p130", "p17", "p600"))
    third = third[:40]
    alone = []
    for tokens in (first, second, third):
        alone.append(native.prefill(tokens))
        native.end(alone[-1])

    a, b, c = native.start(), native.start(), native.start()
    native.step((a, first[:60]))
    native.step((b, second[:1]), (a, first[60:61]), (c, third[:30]))
    native.step((a, first[61:125]), (c, third[30:]), (b, second[1:2]))
    native.step((b, second[2:]), (a, first[125:]))
    for run, expected in zip((a, b, c), alone, strict=True):
        assert_same(run, expected)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in NAMES if "-small-" not in name])
def test_bits_of_long_prompts_do_not_depend_on_anything(load, vectors, machine, kv_bytes, name: str) -> None:
    loaded, tokens = load(name), vectors(name)["p600_tokens"].tolist()
    expected = machine(loaded, kv_bytes=kv_bytes).prefill(tokens)
    cases: Iterator[tuple[int, int, str]] = product((1, 2, 3), (1, 17, 130, WHOLE), ["auto"])
    for threads, chunk, isa in [*cases, *((2, 17, isa) for isa in available())]:
        run = machine(loaded, kv_bytes=kv_bytes, threads=threads, isa=isa).prefill(tokens, chunk)
        assert_same(run, expected)
