"""The reference executor gives the golden answers: logits, layers, experts and greedy tokens of every test model.

The vectors come from another implementation in float32; files of quantised weights are compared with the run of their
dequantised weights (the "twin"), since that implementation otherwise rounds activations too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sparkd.executors.reference import Reference, Run, State, Weights
from sparkd.gguf.formats import FORMATS
from sparkd.gguf.model_file import ModelFile
from sparkd.models import build_program

#: Largest difference of a logit or of an element of the residual stream.
TOLERANCE = 1e-3
#: Greedy tokens are compared up to the first step whose best two logits are closer than this.
NARROW = 4 * TOLERANCE

RECIPES = json.loads((Path(__file__).parent.parent / "data" / "models" / "recipes.json").read_text())
#: Every computable type of weights that the test models have occurs in one of these at least.
CHOSEN = (
    "laguna-tiny-s1-f32",
    "laguna-tiny-s1-f16",
    "laguna-tiny-s1-q4_0",
    "laguna-tiny-s1-q4_k_m",
    "laguna-tinyk-s1-q2_k",
    "laguna-tinyk-s1-q5_k_m",
    "laguna-tinyk-s1-iq4_nl",
    "laguna-tinyk-s1-mxfp4",
    "qwen35moe-tiny-s1-f32",
    "qwen35moe-tiny-s1-bf16",
    "qwen35moe-tiny-s1-q5_1",
    "qwen35moe-tinyk-s1-q3_k_m",
    "qwen35moe-tinyk-s1-q4_k_m",
    "qwen35moe-tinyk-s1-iq4_xs",
    "qwen35moe-tinyk-s1-mxfp4_moe",
)
YARN = "laguna-tiny-yarn-s1-f32"
READINGS = {"llama": "A_keys_ignored", "keys": "B_betas", "final": "C_betas_and_attn_factor"}
PROMPTS = ("p1", "p17", "p130")
LONG_PROMPTS = (*PROMPTS, "p600")

Vectors = Mapping[str, np.ndarray]
Load = Callable[..., Reference]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products of tiny matrices are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def load(model_path: Callable[[str], Path]) -> Load:
    """The reference of a test model."""

    def load(name: str, yarn: str = "keys") -> Reference:
        return reference(model_path(name), yarn)

    return load


def reference(path: Path, yarn: str = "keys") -> Reference:
    model = ModelFile.open(path)
    return Reference(build_program(model, yarn), Weights(model))


def close(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=TOLERANCE)


def check_logits(run: Run, vectors: Vectors, stem: str) -> None:
    """All logits stored under `stem`: of every row, every fourth, the last one, or the largest of the last one."""
    last = run.logits[-1]
    if f"{stem}_top_ids" in vectors:
        close(last[torch.from_numpy(vectors[f"{stem}_top_ids"]).long()], vectors[f"{stem}_top_logits"])
    if f"{stem}_logits_last" in vectors:
        close(last, vectors[f"{stem}_logits_last"])
    if f"{stem}_logits_all" in vectors:
        close(run.logits, vectors[f"{stem}_logits_all"])
    if f"{stem}_logits_every4" in vectors:
        close(run.logits[::4], vectors[f"{stem}_logits_every4"])


def check_greedy(executor: Reference, run: Run, vectors: Vectors, stem: str) -> None:
    """Tokens up to the first narrow margin; if there is none, also the logits of the last of 31 single steps."""
    margin = vectors[f"{stem}_greedy_margin"]
    expected = vectors[f"{stem}_greedy"].tolist()
    narrow = np.flatnonzero(margin < NARROW)
    sure = int(narrow[0]) if len(narrow) else len(expected)
    if not sure:
        return
    tokens, last = executor.greedy(run, sure)
    assert tokens == expected[:sure]
    if sure == 32 and f"{stem}_logits_step31" in vectors:
        close(last.logits[-1], vectors[f"{stem}_logits_step31"])


def check_model(executor: Reference, vectors: Vectors, prompts: tuple[str, ...]) -> None:
    assert {layer.layer for layer in executor.program.expert_layers} == set(vectors["moe_layers"].tolist())
    for prompt in prompts:
        tokens = vectors[f"{prompt}_tokens"]
        stem = f"{prompt}_twin" if f"{prompt}_twin_greedy" in vectors else prompt
        big = executor.program.vocab > 10_000
        run = executor.run(tokens, logits_rows=[len(tokens) - 1] if big else None)
        check_logits(run, vectors, stem)
        if f"{prompt}_experts" in vectors:
            assert np.array_equal(run.experts.numpy(), vectors[f"{prompt}_experts"])
        if f"{prompt}_layer_out" in vectors:
            expected = vectors[f"{prompt}_layer_out"]
            close(run.layers[:, -expected.shape[1] :], expected)
        check_greedy(executor, run, vectors, stem)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_gives_the_golden_answers(name: str, load: Load, vectors_path: Callable[[str], Path]) -> None:
    with np.load(vectors_path(name)) as vectors:
        check_model(load(name), vectors, PROMPTS)


@pytest.mark.soak
@pytest.mark.parametrize("name", [r["model"] for r in RECIPES if "bench" not in r["model"] and r["model"] != YARN])
def test_every_model_gives_the_golden_answers_to_every_prompt(
    name: str, load: Load, vectors_path: Callable[[str], Path]
) -> None:
    with np.load(vectors_path(name)) as vectors:
        check_model(load(name), vectors, LONG_PROMPTS)


def test_the_chosen_models_contain_every_type_that_any_test_model_has(model_path: Callable[[str], Path]) -> None:
    found = {t.format.name for name in CHOSEN for t in ModelFile.open(model_path(name)).tensors.values()}
    computable = {f.name for f in FORMATS.values() if f.arithmetic is not None}
    unwritten = {"Q4_1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"}
    assert found == computable - unwritten, "the generator of test models writes all but these"


@pytest.mark.parametrize(("reading", "name"), READINGS.items())
def test_each_reading_of_yarn_gives_its_own_golden_answers(
    reading: str, name: str, load: Load, vectors_path: Callable[[str], Path]
) -> None:
    executor = load(YARN, reading)
    with np.load(vectors_path(YARN)) as vectors:
        for prompt in ("p17", "p130"):
            run = executor.run(vectors[f"{prompt}_tokens"])
            check_logits(run, vectors, f"{prompt}_{name}")
            check_greedy(executor, run, vectors, f"{prompt}_{name}")
            for other in set(READINGS.values()) - {name}:
                difference = run.logits[-1].numpy() - vectors[f"{prompt}_{other}_logits_last"]
                assert np.abs(difference).max() > 50 * TOLERANCE


@pytest.mark.parametrize("name", ["laguna-tiny-s1-f32", "qwen35moe-tiny-s1-f32"])
@pytest.mark.parametrize("chunks", [(1, 129), (64, 66), (17, 1, 2, 110), (129, 1)])
def test_a_prompt_may_be_cut_anywhere(
    name: str, chunks: tuple[int, ...], load: Load, vectors_path: Callable[[str], Path]
) -> None:
    executor = load(name)
    with np.load(vectors_path(name)) as vectors:
        tokens = vectors["p130_tokens"]
    whole = executor.run(tokens)
    state, done, logits = State.empty(executor.program), 0, []
    for chunk in chunks:
        run = executor.run(tokens[done : done + chunk], state)
        state, done = run.state, done + chunk
        logits.append(run.logits)
    assert done == state.length == 130
    torch.testing.assert_close(torch.cat(logits), whole.logits, rtol=0, atol=1e-10)


def test_rounding_the_cache_to_half_precision_changes_logits_a_little(load: Load) -> None:
    executor = load("laguna-tiny-s1-f32")
    half = Reference(executor.program, executor.weights, kv_type=torch.float16)
    tokens = list(range(100, 117))
    difference = (half.run(tokens).logits - executor.run(tokens).logits).abs().max().item()
    assert 1e-6 < difference < 5e-2


# --- other files of the same model


def rewrite(source: Path, target: Path, change: Callable[[dict[str, gguf.ReaderTensor]], dict[str, tuple]]) -> Path:
    """Copy a model with the same metadata; `change` gives the new tensors as name -> (bytes [..., row bytes], type)."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for name, (data, kind) in change({tensor.name: tensor for tensor in reader.tensors}).items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def fuse(tensors: dict[str, gguf.ReaderTensor]) -> dict[str, tuple]:
    """Gate and up experts in one stack, gate rows first."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("ffn_gate_exps.weight"):
            up = tensors[name.replace("gate", "up")]
            assert up.tensor_type == tensor.tensor_type
            fused = np.concatenate([tensor.data, up.data], axis=1)
            result[name.replace("gate", "gate_up")] = (fused, tensor.tensor_type)
        elif not name.endswith("ffn_up_exps.weight"):
            result[name] = (tensor.data, tensor.tensor_type)
    return result


@pytest.mark.parametrize("name", ["laguna-tinyk-s1-q4_k_m", "qwen35moe-tiny-s1-f32"])
def test_a_file_with_fused_gate_and_up_experts_gives_the_same_answers(
    name: str, load: Load, model_path: Callable[[str], Path], tmp_path: Path, vectors_path: Callable[[str], Path]
) -> None:
    fused = reference(rewrite(model_path(name), tmp_path / "fused.gguf", fuse))
    assert {layer.gate.tensor for layer in fused.program.expert_layers} == {
        f"blk.{layer.layer}.ffn_gate_up_exps.weight" for layer in fused.program.expert_layers
    }
    with np.load(vectors_path(name)) as vectors:
        tokens = vectors["p17_tokens"]
        check_model(fused, vectors, ("p17",))
    assert torch.equal(fused.run(tokens).logits, load(name).run(tokens).logits)


def generate(path: Path, **options: object) -> Path:
    """The tiny qwen35moe model in float32, with options of the generator."""
    import make_gguf

    make_gguf.generate("qwen35moe", "tiny", "f32", 1, str(path), **options)
    return path


@pytest.mark.parametrize("present", [True, False])
def test_a_file_with_a_draft_layer_gives_the_same_answers(
    present: bool, load: Load, tmp_path: Path, vectors_path: Callable[[str], Path]
) -> None:
    load("qwen35moe-tiny-s1-f32")
    path = generate(tmp_path / "draft.gguf", overrides={"n_nextn": 1})
    if not present:
        path = rewrite(
            path,
            tmp_path / "absent.gguf",
            lambda tensors: {
                name: (t.data, t.tensor_type) for name, t in tensors.items() if not name.startswith("blk.8.")
            },
        )
    executor = reference(path)
    assert ("skipped" if present else "absent") in executor.program.notes[0]
    with np.load(vectors_path("qwen35moe-tiny-s1-f32")) as vectors:
        check_model(executor, vectors, ("p17",))


def test_a_split_model_gives_the_same_answers(load: Load, tmp_path: Path, vectors_path: Callable[[str], Path]) -> None:
    load("qwen35moe-tiny-s1-f32")
    generate(tmp_path / "split.gguf", split_max_size=1_000_000, split_empty_first=True)
    assert len(list(tmp_path.iterdir())) > 3
    executor = reference(tmp_path)
    with np.load(vectors_path("qwen35moe-tiny-s1-f32")) as vectors:
        check_model(executor, vectors, ("p17",))
