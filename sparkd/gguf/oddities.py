"""What is unusual about a well-formed model file, in short sentences. Unknown keys are usual."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sparkd.gguf.reader import Array, Metadata, Tensor

#: `general.file_type`: label, and the type that most of the weights should have.
FILE_TYPES: Mapping[int, tuple[str, str]] = {
    0: ("F32", "F32"),
    1: ("F16", "F16"),
    2: ("Q4_0", "Q4_0"),
    3: ("Q4_1", "Q4_1"),
    7: ("Q8_0", "Q8_0"),
    8: ("Q5_0", "Q5_0"),
    9: ("Q5_1", "Q5_1"),
    10: ("Q2_K", "Q2_K"),
    11: ("Q3_K_S", "Q3_K"),
    12: ("Q3_K_M", "Q3_K"),
    13: ("Q3_K_L", "Q3_K"),
    14: ("Q4_K_S", "Q4_K"),
    15: ("Q4_K_M", "Q4_K"),
    16: ("Q5_K_S", "Q5_K"),
    17: ("Q5_K_M", "Q5_K"),
    18: ("Q6_K", "Q6_K"),
    19: ("IQ2_XXS", "IQ2_XXS"),
    20: ("IQ2_XS", "IQ2_XS"),
    21: ("Q2_K_S", "Q2_K"),
    22: ("IQ3_XS", "IQ3_S"),
    23: ("IQ3_XXS", "IQ3_XXS"),
    24: ("IQ1_S", "IQ1_S"),
    25: ("IQ4_NL", "IQ4_NL"),
    26: ("IQ3_S", "IQ3_S"),
    27: ("IQ3_M", "IQ3_S"),
    28: ("IQ2_S", "IQ2_XS"),
    29: ("IQ2_M", "IQ2_S"),
    30: ("IQ4_XS", "IQ4_XS"),
    31: ("IQ1_M", "IQ1_M"),
    32: ("BF16", "BF16"),
    36: ("TQ1_0", "TQ1_0"),
    37: ("TQ2_0", "TQ2_0"),
    38: ("MXFP4_MOE", "MXFP4"),
    39: ("NVFP4", "NVFP4"),
    40: ("Q1_0", "Q1_0"),
}

_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


def oddities(
    metadata: Metadata, tensors: Mapping[str, Tensor], files: Sequence[tuple[str, int, int]]
) -> tuple[str, ...]:
    """Notes about a model. `files`: (name, start of the data section, size) of each shard, in bytes."""
    architecture = metadata.get("general.architecture")
    return (
        *_label(metadata, tensors),
        *_layers(metadata, tensors, f"{architecture}"),
        *_vocabulary(metadata, tensors, f"{architecture}"),
        *_unused_bytes(tensors, files),
    )


def file_type(metadata: Metadata) -> str | None:
    """The label of the mixture of types, None where the file does not say or the number is unknown."""
    return FILE_TYPES.get(_integer(metadata, "general.file_type", -1), (None,))[0]


def _integer(metadata: Metadata, key: str, default: int) -> int:
    """An integer key of the right type, else the default: a note is no place to fail."""
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _label(metadata: Metadata, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    number = _integer(metadata, "general.file_type", -1)
    if number < 0 or not tensors:
        return
    if number not in FILE_TYPES:
        yield f"general.file_type is {number}, a label that is unknown"
        return
    label, base = FILE_TYPES[number]
    weights: Counter[str] = Counter()
    for tensor in tensors.values():
        weights[tensor.format.name] += tensor.elements
    most, count = weights.most_common(1)[0]
    if most != base:
        share = 100 * count / weights.total()
        yield f"general.file_type says {label}, but most weights ({share:.0f} %) are {most}"


def _layers(metadata: Metadata, tensors: Mapping[str, Tensor], architecture: str) -> Iterator[str]:
    blocks = _integer(metadata, f"{architecture}.block_count", 0)
    drafts = _integer(metadata, f"{architecture}.nextn_predict_layers", 0)
    present = {int(match[1]) for name in tensors if (match := _BLOCK.match(name))}
    draft_tensors = sorted({int(m[1]) for name in tensors if ".nextn." in name and (m := _BLOCK.match(name))})
    if 0 < drafts < blocks:
        for block in range(max(blocks - drafts, blocks - 8), blocks):
            state = "is present and skipped" if block in present else "has no tensors in this file"
            yield f"the next-token-prediction layer (block {block}) {state}"
    elif drafts:
        yield f"nextn_predict_layers is {drafts}, of {blocks} blocks"
    elif draft_tensors:
        yield f"block {draft_tensors[0]} has next-token-prediction tensors, but no nextn_predict_layers is declared"
    if blocks and tensors:
        beyond = sorted(block for block in present if block >= blocks)
        if beyond:
            yield f"{len(beyond)} blocks from {beyond[0]} on lie beyond block_count = {blocks}"
        absent = blocks - drafts - sum(block < blocks - drafts for block in present)
        if absent > 0:
            yield f"{absent} of {blocks} blocks have no tensors"


def _vocabulary(metadata: Metadata, tensors: Mapping[str, Tensor], architecture: str) -> Iterator[str]:
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(vocabulary, Array):
        yield "the file has no tokenizer"
        return
    tokens = len(vocabulary)
    declared = _integer(metadata, f"{architecture}.vocab_size", tokens)
    if declared != tokens:
        yield f"vocab_size is {declared}, the tokenizer has {tokens} tokens"
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.rows != tokens:
        yield f"token_embd.weight has {embedding.rows} rows, the tokenizer has {tokens} tokens"
    for name in ("token_type", "scores"):
        column = metadata.get(f"tokenizer.ggml.{name}")
        if isinstance(column, Array) and len(column) != tokens:
            yield f"tokenizer.ggml.{name} has {len(column)} entries, the tokenizer has {tokens} tokens"
    for key, value in metadata.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if is_id and isinstance(value, int) and not 0 <= value < tokens:
            yield f"{key!r} is {value}, outside the {tokens} tokens"


def _unused_bytes(tensors: Mapping[str, Tensor], files: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    """Bytes that belong to no tensor and are more than padding."""
    by_shard: dict[int, list[Tensor]] = {}
    for tensor in tensors.values():
        by_shard.setdefault(tensor.shard, []).append(tensor)
    for shard, (name, data_offset, size) in enumerate(files):
        end = data_offset
        gaps = 0
        for tensor in sorted(by_shard.get(shard, ()), key=lambda t: t.offset):
            gaps += tensor.offset - end if tensor.offset - end >= 4096 else 0
            end = tensor.offset + tensor.nbytes
        if gaps:
            yield f"{name}: {gaps} bytes between tensors belong to none"
        if size - end >= 4096:
            yield f"{name}: {size - end} bytes after the last tensor"
