"""Text to token ids and back, built from the `tokenizer.ggml.*` keys of a model file.

Byte-level BPE (`tokenizer.ggml.model = "gpt2"`). A text is cut at added tokens (control and user-defined ones, leftmost
and then longest first), the rest by the pre-tokenizer's expressions into pieces, each of which is merged in rank order.

Normal tokens are written in the *byte alphabet*, in which every byte has a printable character (the space is U+0120);
control and user-defined tokens are literal text and never pass through it.

Control tokens are those of type 3 and every token that ends a generation, whatever type its file gives it: no text of a
user may spell one of them into a prompt.

Ids become text by a look into the table of tokens. What makes ids out of text takes far longer to build, and is built
when the first text comes, or before (`prepare`): a worker that goes on with what another left has ids already.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import ModelFileError, RequestError, UnsupportedError
from sparkd.gguf.metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Encoder

# Texts come one at a time: the library's own threads would only idle.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

#: Longest text that is tokenized, in characters; several times what the longest context of these models holds.
MAX_CHARACTERS = 4 << 20

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Expressions that cut a text into pieces, by `tokenizer.ggml.pre`; each stage cuts the pieces of the one before.
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
}

#: Tokens that end a generation in files of the supported families; ids differ from file to file, texts do not.
END_OF_GENERATION = frozenset(
    [
        "<|endoftext|>",
        "<|im_end|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "〈|EOS|〉",
        "</assistant>",
    ]
)


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def _byte_alphabet() -> dict[str, int]:
    """Character to byte: visible Latin-1 characters stand for themselves, the other bytes for U+0100, U+0101, ..."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """The vocabulary of one model. Immutable after construction; safe to use from several threads."""

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int] | NDArray[Any],
        merges: Sequence[str],
        pre: str,
        *,
        bos_id: int | None,
        eos_id: int | None,
        add_bos: bool,
        ending_ids: Iterable[int],
        where: str = "tokenizer",
    ) -> None:
        """`types` are as many as `tokens`, ids in range: `from_metadata` has checked what a file (`where`) says.

        Raises UnsupportedError for an unknown `pre`. Whether the rest fits together `prepare` says.
        """
        if pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise UnsupportedError(f"pre-tokenizer {pre!r} is not supported", where=where, fix=f"supported are {known}")
        self._tokens = tokens
        self._types = np.asarray(types, np.uint8)
        self._merges = merges
        self._stages = PRE_TOKENIZERS[pre]
        self._where = where
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        self.bos_id = bos_id
        self.eos_id = eos_id
        spelled = {index for index, token in enumerate(tokens) if token in END_OF_GENERATION}
        #: Ids after which a generation is over.
        self.end_of_generation_ids = frozenset(ending_ids) | spelled
        self._control = {*self._of_type(TokenType.CONTROL), *self.end_of_generation_ids}
        #: Texts of all control tokens.
        self.control_texts = frozenset(tokens[index] for index in self._control)

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Tokenizer:
        """The tokenizer that a model file describes.

        Raises ModelFileError where its keys are missing or contradict each other, UnsupportedError for another
        tokenizer model or pre-tokenizer; both name the file. Tokens that repeat and merges `prepare` checks.
        """
        where = metadata.where
        model = metadata.text("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedError(f"tokenizer model {model!r} is not supported, only 'gpt2'", where=where)
        tokens, merges = list(metadata.strings("tokenizer.ggml.tokens")), metadata.strings("tokenizer.ggml.merges")
        add_bos = metadata.boolean("tokenizer.ggml.add_bos_token", False)
        named = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
        if add_bos and named["bos"] is None:
            raise ModelFileError("tokenizer.ggml.add_bos_token is set without a bos_token_id", where=where)
        endings = [index for name, index in named.items() if name != "bos" and index is not None]
        return cls(
            tokens,
            _token_types(metadata, len(tokens)),
            merges,
            metadata.text("tokenizer.ggml.pre"),
            bos_id=named["bos"],
            eos_id=named["eos"],
            add_bos=add_bos,
            ending_ids=endings,
            where=where,
        )

    def prepare(self) -> None:
        """Build now what `encode` needs. ModelFileError where tokens or merges repeat, or do not fit together.

        Takes up to a second, and keeps the interpreter's lock for a third of it at a time.
        """
        _ = self._encoders

    @cached_property
    def _encoders(self) -> tuple[Encoder, Encoder]:
        """Without and with control tokens: two over one BPE, since all threads would share a switch on a single one."""
        from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

        merges = list(self._merges)
        _refuse_duplicates(self._tokens, "token", self._where)
        _refuse_duplicates(merges, "merge", self._where)
        ids, pairs = {token: index for index, token in enumerate(self._tokens)}, _merge_pairs(merges, self._where)
        try:
            bpe = models.BPE(ids, pairs, ignore_merges=False, byte_fallback=False, fuse_unk=False)
        except Exception as error:  # the library raises bare Exception
            said = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error)[:200])
            what = f"tokenizer.ggml.merges does not fit the vocabulary: {said}"
            raise ModelFileError(what, where=self._where) from error
        splits = [pre_tokenizers.Split(Regex(stage), behavior="isolated") for stage in self._stages]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pieces = pre_tokenizers.Sequence([*splits, to_bytes])

        def encoder(added: Iterable[int]) -> Encoder:
            made = Tokenizer(bpe)
            made.pre_tokenizer = pieces
            made.add_tokens([AddedToken(self._tokens[i], normalized=False, special=False) for i in added])
            return made

        user_defined = [index for index in self._of_type(TokenType.USER_DEFINED) if index not in self._control]
        return encoder(user_defined), encoder([*user_defined, *sorted(self._control)])

    def _of_type(self, kind: TokenType) -> list[int]:
        ids: list[int] = np.flatnonzero(self._types == kind).tolist()
        return ids

    def __len__(self) -> int:
        """Number of tokens; ids are 0 ... len - 1."""
        return len(self._tokens)

    def encode(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        """Token ids of `text`.

        special: control tokens spelled in the text become their ids; otherwise they are ordinary text (user-defined
        tokens are recognised in both cases). bos: put the BOS token first if the model's file asks for one.
        Raises RequestError for text that is too long or holds lone surrogates.
        """
        check_text(text)
        ids: list[int] = _encoding(self._encoders[special], text).ids
        return (self._bos if bos else []) + ids

    def split_at_control(self, text: str) -> list[str | int]:
        """`text` cut at the control tokens spelled in it: stretches of text (never empty) and ids, in order.

        Encoding the stretches without special parsing gives what `encode(text, special=True)` gives.
        """
        check_text(text)
        encoding = _encoding(self._encoders[True], text)
        parts: list[str | int] = []
        position = 0
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index in self._control:
                if start > position:
                    parts.append(text[position:start])
                parts.append(index)
                position = end
        if position < len(text):
            parts.append(text[position:])
        return parts

    def is_control(self, index: int) -> bool:
        """Whether the token steers the model instead of being text."""
        return index in self._control

    def text(self, index: int) -> str:
        """The token as its vocabulary spells it: literal for added tokens, in the byte alphabet for normal ones."""
        if index < 0:
            raise IndexError(f"token id {index}")
        return self._tokens[index]

    def token_bytes(self, index: int) -> bytes:
        """The bytes that the token stands for; a control token gives its literal text.

        An id beyond the vocabulary (embeddings may have more rows) stands for no bytes. IndexError for one below 0.
        """
        if index >= len(self._tokens):
            return b""
        token = self.text(index)
        if self._types[index] in (TokenType.NORMAL, TokenType.UNUSED):
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # not written in the byte alphabet after all: literal
                pass
        return token.encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence, control tokens included; invalid bytes become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


def check_text(text: str) -> None:
    """Raise RequestError unless `text` can be tokenized: bounded, and without lone surrogates."""
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"a text of {len(text)} characters is longer than the limit of {MAX_CHARACTERS}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds a lone surrogate at character {error.start}") from None


def _encoding(encoder: Encoder, text: str) -> Encoding:
    """As `encoder.encode` does it, which however keeps the interpreter's lock, for seconds if the text is long."""
    return encoder.encode_batch([text], add_special_tokens=False)[0]


def _refuse_duplicates(items: Sequence[str], what: str, where: str) -> None:
    if len(set(items)) == len(items):
        return
    seen: dict[str, int] = {}
    for index, item in enumerate(items):
        if seen.setdefault(item, index) != index:
            raise ModelFileError(f"{what} {index} {_shown(item)} repeats {what} {seen[item]}", where=where)


def _merge_pairs(merges: Iterable[str], where: str) -> list[tuple[str, str]]:
    pairs = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise ModelFileError(f"merge {index} {_shown(merge)} is not two tokens with a space between", where=where)
        pairs.append((left, right))
    return pairs


def _token_types(metadata: Metadata, count: int) -> NDArray[Any]:
    numbers = metadata.numbers("tokenizer.ggml.token_type")
    if len(numbers) != count:
        what = f"tokenizer.ggml.token_type has {len(numbers)} entries for {count} tokens"
        raise ModelFileError(what, where=metadata.where)
    unknown = np.flatnonzero(~np.isin(numbers, list(TokenType)))
    if unknown.size:
        index = int(unknown[0])
        raise ModelFileError(f"token {index} has the unknown type {numbers[index]}", where=metadata.where)
    return numbers


def _token_id(metadata: Metadata, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    index = metadata.integer(key)
    if not 0 <= index < count:
        raise ModelFileError(f"{key} is {index}, but there are {count} tokens", where=metadata.where)
    return index


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
