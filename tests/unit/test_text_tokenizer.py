"""Tokenizer: what the vectors say, and what a damaged vocabulary gets to hear."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_writer import BOOL, I32, STRING, U32, GgufBytes
from hypothesis import given
from hypothesis import strategies as st

from sparkd.errors import ModelFileError, RequestError, UnsupportedError
from sparkd.gguf.metadata import Metadata
from sparkd.gguf.model_file import ModelFile
from sparkd.gguf.reader import parse_header
from sparkd.text.tokenizer import MAX_CHARACTERS, Tokenizer

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "tests/data/vectors/tokenization.json").read_text())
VOCABULARY = ROOT.parent / "shared/data/ggml-vocab-qwen35.gguf"
DEMO = ROOT / "sparkd/demo/spark-demo-laguna.gguf"


def metadata(**keys: object) -> Metadata:
    """Metadata with these `tokenizer.ggml.*` keys, as the reader gives it."""
    file = GgufBytes()
    for name, value in keys.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, str):
            file.text(key, value)
        elif isinstance(value, list):
            file.array(key, STRING if isinstance(value[0], str) else I32, value)
        elif value is not None:
            file.key(key, BOOL if isinstance(value, bool) else U32, value)
    raw = file.build()
    return parse_header(raw, len(raw), "small.gguf").metadata


GOOD: dict[str, object] = {
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": ["a", "b", "ab", "Ġ", "<|im_end|>", "<think>", "é"],
    "token_type": [1, 1, 1, 1, 3, 4, 5],
    "merges": ["a b"],
    "eos_token_id": 4,
}


def build(**changes: object) -> Tokenizer:
    tokenizer = Tokenizer.from_metadata(metadata(**(GOOD | changes)))
    tokenizer.prepare()
    return tokenizer


def vocabulary_only(architecture: str, path: Path) -> Metadata:
    """The metadata of the `small` model of this architecture, without its tensors."""
    sys.path.insert(0, str(ROOT / "tests/data/tools"))
    import make_gguf

    hyper = {**make_gguf.COMMON, **make_gguf.PRESETS[architecture]["small"], "preset": "small"}
    tokens, types, merges = make_gguf.real_vocab(str(VOCABULARY), hyper["n_vocab"])
    model = make_gguf.Model(architecture, hyper, 1, tokens, types)
    make_gguf.write_file(str(path), model.metadata("f32", merges), model, [])
    raw = path.read_bytes()
    return parse_header(raw, len(raw), str(path)).metadata


@pytest.mark.parametrize("name", VECTORS["models"])
def test_ids_equal_the_vectors_in_every_column(name: str, model_path: Callable[[str], Path], tmp_path: Path) -> None:
    architecture, preset = name.split("-")
    if preset == "small":
        if not VOCABULARY.exists():
            pytest.skip(f"needs the vocabulary {VOCABULARY}, which this checkout lacks")
        keys = vocabulary_only(architecture, tmp_path / "vocabulary.gguf")
    else:
        keys = ModelFile.open(model_path(f"{name}-s1-f32")).metadata
    tokenizer = Tokenizer.from_metadata(keys)
    for string, row in zip(VECTORS["strings"], VECTORS["models"][name], strict=True):
        special = tokenizer.encode(string, special=True)
        assert tokenizer.encode(string, special=False) == row["plain"], string
        assert special == row["special"], string
        assert tokenizer.encode(string, special=True, bos=True) == row["special_bos"], string
        assert (tokenizer.decode(special) == string) == row["round_trip"], string


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_metadata(ModelFile.open(DEMO).metadata)


def test_the_demo_model_resolves_its_tokens_by_text(demo: Tokenizer) -> None:
    assert len(demo) == 4096
    assert demo.bos_id == 0
    assert demo.end_of_generation_ids == {0, 2}
    assert [demo.is_control(index) for index in range(6)] == [True, True, True, False, False, False]
    assert demo.text(2) == "<|im_end|>"
    assert demo.token_bytes(2) == b"<|im_end|>"
    assert demo.control_texts == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


@given(st.text())
def test_any_text_comes_back_from_its_ids(demo: Tokenizer, string: str) -> None:
    assert demo.decode(demo.encode(string, special=False)) == string
    assert demo.decode(demo.encode(string, special=True)) == string


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "<", "|>", " a", "\n", "é"])).map("".join))
def test_plain_encoding_never_yields_a_control_token(demo: Tokenizer, string: str) -> None:
    assert not any(map(demo.is_control, demo.encode(string, special=False)))


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "<", "|>", " a", "\n", "é"])).map("".join))
def test_stretches_between_control_tokens_encode_as_the_whole_does(demo: Tokenizer, string: str) -> None:
    parts = demo.split_at_control(string)
    ids = [index for part in parts for index in ([part] if isinstance(part, int) else demo.encode(part, special=False))]
    assert ids == demo.encode(string, special=True)
    assert "".join(demo.text(part) if isinstance(part, int) else part for part in parts) == string


def test_other_threads_run_while_a_long_text_is_encoded(demo: Tokenizer) -> None:
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    ids = demo.encode("1" * 500_000, special=False)
    during = ticks[0] - before
    done.set()
    thread.join()
    assert len(ids) == 500_000
    assert during > 5


def test_a_token_that_ends_a_generation_is_control_whatever_its_type() -> None:
    tokenizer = build(token_type=[1, 1, 1, 1, 4, 4, 5], eos_token_id=None)
    assert tokenizer.end_of_generation_ids == {4}
    assert tokenizer.encode("ab<|im_end|>", special=True) == [2, 4]
    assert 4 not in tokenizer.encode("ab<|im_end|>", special=False)


def test_bos_is_put_first_only_where_the_file_asks_for_it() -> None:
    assert build(bos_token_id=4, add_bos_token=True).encode("ab", special=True, bos=True) == [4, 2]
    assert build(bos_token_id=4, add_bos_token=True).encode("ab", special=True) == [2]
    assert build(bos_token_id=4).encode("ab", special=True, bos=True) == [2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": ["a", "b", "ab", "Ġ", "<|im_end|>", "a", "é"]}, "token 5 'a' repeats token 0"),
        ({"token_type": [1, 1, 1]}, "token_type has 3 entries for 7 tokens"),
        ({"token_type": [1, 1, 1, 1, 3, 4, 9]}, "token 6 has the unknown type 9"),
        ({"token_type": None}, "'tokenizer.ggml.token_type' is missing"),
        ({"merges": ["ab"]}, "merge 0 'ab' is not two tokens"),
        ({"merges": ["a "]}, "merge 0 'a ' is not two tokens"),
        ({"merges": ["a b", "a b"]}, "merge 1 'a b' repeats merge 0"),
        ({"merges": ["a x"]}, "merges does not fit the vocabulary"),
        ({"merges": ["b a"]}, "merges does not fit the vocabulary"),
        ({"merges": [1, 2]}, "not an array of strings"),
        ({"tokens": "abc"}, "not an array of strings"),
        ({"eos_token_id": 7}, "eos_token_id is 7, but there are 7 tokens"),
        ({"eot_token_id": 2**32 - 1}, "eot_token_id is 4294967295"),
        ({"eos_token_id": "4"}, "not an integer"),
        ({"add_bos_token": True}, "without a bos_token_id"),
        ({"pre": None}, "'tokenizer.ggml.pre' is missing"),
    ],
)
def test_a_damaged_vocabulary_is_refused_in_one_line(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        build(**changes)
    assert said in str(caught.value)
    assert str(caught.value).startswith("small.gguf: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("model", "llama"), ("pre", "llama-bpe"), ("pre", "default")])
def test_other_tokenizers_are_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(UnsupportedError, match=f"small.gguf: .*{value!r} is not supported"):
        build(**{key: value})


def test_text_that_cannot_be_tokenized_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(RequestError, match=f"{MAX_CHARACTERS + 1} characters .* {MAX_CHARACTERS}"):
        demo.encode("a" * (MAX_CHARACTERS + 1), special=False)
    with pytest.raises(RequestError, match="lone surrogate at character 1"):
        demo.encode("a\ud800b", special=True)


def test_an_id_beyond_the_vocabulary_stands_for_nothing_and_one_below_is_an_error(demo: Tokenizer) -> None:
    assert demo.token_bytes(len(demo)) == b""
    with pytest.raises(IndexError):
        demo.token_bytes(-1)
