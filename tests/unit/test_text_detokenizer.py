"""Detokenizer: the pieces of a stream are the text of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.gguf.model_file import ModelFile
from sparkd.text.detokenizer import Detokenizer
from sparkd.text.tokenizer import Tokenizer, TokenType

DEMO = Path(__file__).parents[2] / "sparkd/demo/spark-demo-laguna.gguf"


def byte_tokenizer() -> Tokenizer:
    """Token i < 256 stands for byte i; then come a control token, a user-defined one, and one of two bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in visible}
    for byte in range(256):
        symbols.setdefault(byte, chr(256 + len(symbols) - len(visible)))
    tokens = [symbols[byte] for byte in range(256)] + ["<|im_end|>", "<thinkĠé>", symbols[0x9F] + symbols[0x99]]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL]
    return Tokenizer(tokens, types, [], "qwen2", bos_id=None, eos_id=256, add_bos=False, ending_ids=[256])


TOKENIZER = byte_tokenizer()
CONTROL, USER_DEFINED, TWO_BYTES = 256, 257, 258


def stream(ids: list[int], *, skip_control: bool = True) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, skip_control=skip_control)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def test_every_byte_token_stands_for_its_byte() -> None:
    assert [TOKENIZER.token_bytes(index) for index in range(256)] == [bytes([index]) for index in range(256)]


@given(st.lists(st.integers(0, 258)), st.booleans())
def test_pieces_put_together_are_the_decoding_of_all_bytes(ids: list[int], skip_control: bool) -> None:
    kept = [index for index in ids if not (skip_control and index == CONTROL)]
    whole = b"".join(map(TOKENIZER.token_bytes, kept)).decode(errors="replace")
    assert "".join(stream(ids, skip_control=skip_control)) == whole


@given(st.text())
def test_valid_text_is_never_damaged_and_never_late(text: str) -> None:
    ids = list(text.encode())
    pieces = stream(ids)
    assert "".join(pieces) == text
    ends, position = set(), 0
    for character in text:
        position += len(character.encode())
        ends.add(position - 1)
    assert [index for index, piece in enumerate(pieces) if piece] == sorted(ends)


def test_a_character_split_over_tokens_appears_with_its_last_byte() -> None:
    assert stream([0xF0, TWO_BYTES, 0x82, ord("!")]) == ["", "", "🙂", "!", ""]


def test_only_truly_invalid_bytes_become_the_replacement_character() -> None:
    assert "".join(stream([0xFF, ord("a"), 0xC3, 0xA9, 0xE2, 0x82, ord("b"), 0x80])) == "\ufffdaé\ufffdb\ufffd"


def test_an_id_beyond_the_vocabulary_leaves_no_trace() -> None:
    assert stream([0x48, len(TOKENIZER), 0x69, 1 << 20]) == ["H", "", "i", "", ""]


def test_a_character_cut_off_by_the_end_completes_the_stream() -> None:
    assert stream([ord("a"), 0xE2, 0x82]) == ["a", "", "", "\ufffd"]
    assert stream([ord("a")]) == ["a", ""]


def test_control_tokens_are_skipped_or_shown_and_user_defined_ones_are_literal() -> None:
    assert stream([ord("a"), CONTROL, USER_DEFINED]) == ["a", "", "<thinkĠé>", ""]
    assert stream([ord("a"), CONTROL], skip_control=False) == ["a", "<|im_end|>", ""]


@pytest.mark.parametrize("text", ["Grüße, 世界! 🙂👩‍💻", "नमस्ते\n\tdéjà vu"])
def test_text_survives_a_real_vocabulary(text: str) -> None:
    tokenizer = Tokenizer.from_metadata(ModelFile.open(DEMO).metadata)
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, special=False)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text
