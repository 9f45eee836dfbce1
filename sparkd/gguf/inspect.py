"""What a model file holds, as a report of plain records (`dataclasses.asdict` of it is fit for JSON)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sparkd.gguf.model_file import ModelFile
from sparkd.gguf.oddities import file_type
from sparkd.gguf.reader import Tensor

_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file: bytes of all of it and of its header, number of tensors."""

    name: str
    bytes: int
    header_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class FormatReport:
    """All tensors of one type; `computable`: whether sparkd can multiply with it."""

    name: str
    tensors: int
    weights: int
    bytes: int
    computable: bool


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """Tensors alike in all blocks (`blk.N.` stands for any): shape in ne order, type, how many, bytes of all."""

    name: str
    shape: tuple[int, ...]
    format: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Types of a block's feed-forward weights, None where it has none.

    `experts` is 0 and `record_bytes` None for a dense block; `fused`: gate and up are one tensor; `draft`: a block of
    next-token prediction.
    """

    index: int
    gate: str | None
    up: str | None
    down: str | None
    experts: int
    record_bytes: int | None
    fused: bool
    draft: bool


@dataclass(frozen=True, slots=True)
class RecordReport:
    """Experts whose record (gate, up and down of one expert) has the same size in bytes."""

    bytes: int
    layers: int
    records: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `sparkctl inspect` shows. None where the file does not say; bytes are bytes."""

    path: str
    architecture: str
    name: str | None
    label: str | None
    version: int
    fingerprint: str
    parameters: int
    file_bytes: int
    tensor_bytes: int
    blocks: int | None
    draft_blocks: int
    width: int | None
    context: int | None
    tokens: int | None
    experts: int | None
    experts_used: int | None
    tied_head: bool
    files: tuple[FileReport, ...]
    formats: tuple[FormatReport, ...]
    shapes: tuple[ShapeReport, ...]
    layers: tuple[LayerReport, ...]
    records: tuple[RecordReport, ...]
    notes: tuple[str, ...]


def inspect(model: ModelFile) -> Report:
    """Describe a model; ModelFileError where a key that the report shows has the wrong type."""
    metadata, architecture = model.metadata, model.architecture

    def integer(key: str) -> int | None:
        return metadata.integer(f"{architecture}.{key}") if f"{architecture}.{key}" in metadata else None

    tensors = list(model.tensors.values())
    blocks, draft_blocks = integer("block_count"), integer("nextn_predict_layers") or 0
    layers = _layers(tensors, (blocks or 0) - draft_blocks if draft_blocks else None)
    formats = _formats(tensors)
    refused = [f"{row.name} ({row.tensors} tensors)" for row in formats if not row.computable]
    vocabulary = "tokenizer.ggml.tokens"
    return Report(
        path=model.where,
        architecture=architecture,
        name=metadata.text("general.name") if "general.name" in metadata else None,
        label=file_type(metadata),
        version=model.version,
        fingerprint=model.fingerprint,
        parameters=sum(tensor.elements for tensor in tensors),
        file_bytes=model.total_bytes,
        tensor_bytes=model.tensor_bytes,
        blocks=blocks,
        draft_blocks=draft_blocks,
        width=integer("embedding_length"),
        context=integer("context_length"),
        tokens=len(metadata.strings(vocabulary)) if vocabulary in metadata else None,
        experts=integer("expert_count"),
        experts_used=integer("expert_used_count"),
        tied_head="token_embd.weight" in model.tensors and "output.weight" not in model.tensors,
        files=tuple(
            FileReport(shard.path.name, shard.size, shard.data_offset, sum(t.shard == index for t in tensors))
            for index, shard in enumerate(model.shards)
        ),
        formats=formats,
        shapes=_shapes(tensors),
        layers=layers,
        records=_records(layers),
        notes=(*model.notes, *([f"sparkd cannot compute yet with {', '.join(refused)}"] if refused else [])),
    )


def _formats(tensors: Iterable[Tensor]) -> tuple[FormatReport, ...]:
    """One row per type, most bytes first."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.format.id, []).append(tensor)
    rows = [
        FormatReport(
            name=group[0].format.name,
            tensors=len(group),
            weights=sum(t.elements for t in group),
            bytes=sum(t.nbytes for t in group),
            computable=group[0].format.arithmetic is not None,
        )
        for group in groups.values()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.name)))


def _shapes(tensors: Iterable[Tensor]) -> tuple[ShapeReport, ...]:
    """One row per name without block number, shape and type, in the file's order."""
    groups: dict[tuple[str, tuple[int, ...], str], list[Tensor]] = {}
    for tensor in tensors:
        name = _BLOCK.sub("blk.N.", tensor.name, count=1)
        groups.setdefault((name, tensor.shape, tensor.format.name), []).append(tensor)
    return tuple(ShapeReport(*key, len(group), sum(t.nbytes for t in group)) for key, group in groups.items())


def _layers(tensors: Iterable[Tensor], first_draft: int | None) -> tuple[LayerReport, ...]:
    """One row per block that has tensors."""
    blocks: dict[int, dict[str, Tensor]] = {}
    for tensor in tensors:
        if match := _BLOCK.match(tensor.name):
            blocks.setdefault(int(match[1]), {})[tensor.name[match.end() :]] = tensor
    return tuple(
        _layer(index, blocks[index], draft=first_draft is not None and index >= first_draft) for index in sorted(blocks)
    )


def _layer(index: int, block: dict[str, Tensor], *, draft: bool) -> LayerReport:
    fused = block.get("ffn_gate_up_exps.weight")
    gate, up, down = (
        block.get(f"ffn_{part}_exps.weight", block.get(f"ffn_{part}.weight")) for part in ("gate", "up", "down")
    )
    if fused is not None:
        gate = up = fused
    parts = {part.name: part for part in (gate, up, down) if part is not None}.values()
    stacks = [part for part in parts if "_exps." in part.name]
    return LayerReport(
        index=index,
        gate=gate.format.name if gate else None,
        up=up.format.name if up else None,
        down=down.format.name if down else None,
        experts=max((stack.slices for stack in stacks), default=0),
        record_bytes=sum(stack.slice_bytes for stack in stacks) if stacks else None,
        fused=fused is not None,
        draft=draft,
    )


def _records(layers: Iterable[LayerReport]) -> tuple[RecordReport, ...]:
    """One row per record size, largest first."""
    sizes: dict[int, list[LayerReport]] = {}
    for layer in layers:
        if layer.record_bytes is not None:
            sizes.setdefault(layer.record_bytes, []).append(layer)
    return tuple(
        RecordReport(size, len(group), sum(layer.experts for layer in group))
        for size, group in sorted(sizes.items(), reverse=True)
    )
