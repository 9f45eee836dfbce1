"""Keys of a model file: every one has its documented default, is checked, and is named when it is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from described_models import Description, laguna, qwen, qwen_block
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import ConfigError, ModelFileError, SparkError, UnsupportedError
from sparkd.graph.ops import Attention, GatedDelta
from sparkd.graph.plan import lifetimes

BOTH = pytest.mark.parametrize("describe", [qwen, laguna])


def test_recurrent_layers_are_those_of_the_array_not_of_the_interval() -> None:
    flags = [True, False, True, True]
    description = qwen(4).set(attention__recurrent_layers=flags)
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_qkv\.weight|blk\.1\.attn_q\.weight|blk\.1\.attn_"):
        description.build()
    description.shapes = {n: s for n, s in description.shapes.items() if not n.startswith(("blk.1.", "blk.3."))}
    description.shapes |= qwen_block("blk.1", linear=False) | qwen_block("blk.3", linear=True)
    program = description.build()
    assert [op.state for op in program.ops if isinstance(op, GatedDelta)] == [0, 1, 2]
    assert [c.layer for c in program.caches] == [1]


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (4, [0, 512, 512, 512]),
        (2, [0, 512, 0, 512]),
        (1, [0, 0, 0, 0]),
        ([True, True, False, True], [512, 512, 0, 512]),
    ],
)
def test_the_sliding_pattern_is_a_period_or_an_array(pattern: object, windows: list[int]) -> None:
    description = laguna(4, heads=(64,)).set(attention__sliding_window_pattern=pattern)
    assert [a.window for a in description.build().ops if isinstance(a, Attention)] == windows


@BOTH
def test_head_counts_may_be_one_number_or_one_per_layer(describe: Callable[..., Description]) -> None:
    description = describe(4)
    before = description.build()
    kv = description.keys[f"{description.arch}.attention.head_count_kv"]
    assert description.set(attention__head_count_kv=[kv] * 4).build() == before


def test_swa_layers_may_have_heads_of_another_size() -> None:
    description = laguna(4, heads=(64,)).set(attention__key_length=64, attention__value_length=64)
    description.set(attention__key_length_swa=128, attention__value_length_swa=128)
    shapes = {"attn_q": (2048, 4096), "attn_k": (2048, 512), "attn_v": (2048, 512), "attn_output": (4096, 2048)}
    shapes |= {"attn_q_norm": (64,), "attn_k_norm": (64,)}
    description.shapes |= {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    assert [c.head_dim for c in description.build().caches] == [64, 128, 128, 128]


@BOTH
@pytest.mark.parametrize(
    ("key", "wrong", "error"),
    [
        ("block_count", 0, ModelFileError),
        ("block_count", 1 << 40, ModelFileError),
        ("nextn_predict_layers", 4, ModelFileError),
        ("embedding_length", 0, ModelFileError),
        ("context_length", -1, ModelFileError),
        ("vocab_size", "many", ModelFileError),
        ("attention.head_count", [16, 16], ModelFileError),
        ("attention.head_count", 17, ModelFileError),
        ("attention.head_count_kv", 1 << 20, ModelFileError),
        ("attention.key_length", 1 << 30, ModelFileError),
        ("attention.value_length", 64, UnsupportedError),
        ("attention.layer_norm_rms_epsilon", -1.0, ModelFileError),
        ("rope.dimension_count", 63, ModelFileError),
        ("rope.dimension_count", 512, ModelFileError),
        ("rope.freq_base", 0.5, ModelFileError),
        ("rope.scaling.type", "longrope", UnsupportedError),
        ("expert_count", 0, ModelFileError),
        ("expert_count", 40000, ModelFileError),
        ("expert_used_count", 257, ModelFileError),
        ("expert_gating_func", 3, UnsupportedError),
        ("expert_group_count", 4, UnsupportedError),
        ("expert_weights_scale", float("nan"), ModelFileError),
        ("router_logit_softcapping", 30.0, UnsupportedError),
    ],
)
def test_an_impossible_or_unknown_value_is_refused_naming_the_key(
    describe: Callable[..., Description], key: str, wrong: object, error: type[SparkError]
) -> None:
    description = describe(4)
    description.keys[f"{description.arch}.{key}"] = wrong
    with pytest.raises(error, match=rf"^model\.gguf: .*{description.arch}\.{key}"):
        description.build()


@pytest.mark.parametrize(
    ("describe", "key", "wrong", "error"),
    [
        (qwen, "ssm.time_step_rank", 24, ModelFileError),
        (qwen, "ssm.inner_size", 4095, ModelFileError),
        (qwen, "ssm.conv_kernel", 1, ModelFileError),
        (qwen, "full_attention_interval", 0, ModelFileError),
        (qwen, "attention.recurrent_layers", [True], ModelFileError),
        (laguna, "expert_weights_norm", False, UnsupportedError),
        (laguna, "expert_shared_count", 2, UnsupportedError),
        (laguna, "leading_dense_block_count", 4, ModelFileError),
        (laguna, "attention.sliding_window_pattern", 0, ModelFileError),
        (laguna, "attention.value_length_swa", 64, UnsupportedError),
        (laguna, "rope.dimension_count_swa", 130, ModelFileError),
    ],
)
def test_an_impossible_value_of_one_architecture_is_refused_naming_the_key(
    describe: Callable[..., Description], key: str, wrong: object, error: type[SparkError]
) -> None:
    description = describe(4)
    description.keys[f"{description.arch}.{key}"] = wrong
    with pytest.raises(error, match=rf"{description.arch}\.{key}"):
        description.build()


@BOTH
def test_a_missing_key_is_named_or_has_its_documented_default(describe: Callable[..., Description]) -> None:
    optional = {"expert_weights_scale", "expert_gating_func", "full_attention_interval", "rope.dimension_sections"}
    optional |= {"attention.sliding_window_pattern", "rope.dimension_count_swa", "attention.value_length"}
    description = describe(4)
    arch, keys = description.arch, dict(description.keys)
    refused = set()
    for key in keys:
        description.keys = {k: v for k, v in keys.items() if k != key}
        try:
            description.build()
        except SparkError as error:
            assert key.removeprefix(f"{arch}.") in str(error) or "tensor" in str(error)
            refused.add(key.removeprefix(f"{arch}."))
    always = {"block_count", "context_length", "embedding_length", "attention.head_count", "expert_count", "vocab_size"}
    always |= {"expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"}
    assert always <= refused
    assert not refused & optional


@settings(max_examples=200, deadline=None)
@given(
    describe=st.sampled_from([qwen, laguna]),
    pick=st.integers(0, 1000),
    wrong=st.one_of(
        st.integers(-(2**40), 2**40),
        st.integers(0, 300),
        st.floats(width=32),
        st.booleans(),
        st.text(max_size=5),
        st.lists(st.integers(-1, 300), min_size=1, max_size=5),
    ),
)
def test_no_value_of_any_key_leads_to_anything_but_a_program_or_one_clear_line(
    describe: Callable[..., Description], pick: int, wrong: object
) -> None:
    description = describe(4)
    key = sorted(description.keys)[pick % len(description.keys)]
    description.keys[key] = wrong
    try:
        lifetimes(description.build())
    except SparkError as error:
        assert "\n" not in str(error)


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="architecture 'llama' is not supported; sparkd runs laguna and qwen35"):
        Description("llama", {}, {}).build()


def test_an_unknown_reading_of_yarn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"numerics\.yarn"):
        laguna(4).build("yes")


def test_more_tokens_than_rows_of_the_embedding_are_refused() -> None:
    description = laguna(4).set(vocab_size=3)
    description.keys["tokenizer.ggml.tokens"] = ["a", "b", "c", "d"]
    with pytest.raises(ModelFileError, match=r"laguna\.vocab_size is 3, but the tokenizer has 4 tokens"):
        description.build()
