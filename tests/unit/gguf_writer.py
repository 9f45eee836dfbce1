"""A writer of small GGUF files, right and wrong ones: it writes what it is told and checks nothing."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
_PACK = {U8: "<B", U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q"}


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class GgufBytes:
    """Keys and tensors in the order of the calls; `build()` gives the file's bytes."""

    version: int = 3
    alignment: int = 32
    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data_bytes: int = 0

    def raw_key(self, name: str, type: int, value: bytes) -> GgufBytes:
        self.keys.append(string(name) + struct.pack("<I", type) + value)
        return self

    def key(self, name: str, type: int, value: Any) -> GgufBytes:
        return self.raw_key(name, type, string(value) if type == STRING else struct.pack(_PACK[type], value))

    def text(self, name: str, value: str | bytes) -> GgufBytes:
        return self.key(name, STRING, value)

    def u32(self, name: str, value: int) -> GgufBytes:
        return self.key(name, U32, value)

    def array(self, name: str, element: int, values: list) -> GgufBytes:
        items = (string(v) if element == STRING else struct.pack(_PACK[element], v) for v in values)
        return self.raw_key(name, ARRAY, struct.pack("<IQ", element, len(values)) + b"".join(items))

    def tensor(
        self, name: str, shape: tuple[int, ...], type: int = 0, *, nbytes: int | None = None, offset: int | None = None
    ) -> GgufBytes:
        """F32 by default, placed after the last one unless an offset is given."""
        if nbytes is None:
            nbytes = 4
            for dimension in shape:
                nbytes *= dimension
        at = self.data_bytes if offset is None else offset
        dimensions = struct.pack(f"<{len(shape)}Q", *shape)
        self.tensors.append(string(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", type, at))
        if offset is None:
            self.data_bytes += -(-nbytes // self.alignment) * self.alignment
        return self

    def header(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        head += b"".join(self.keys) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment)

    def build(self) -> bytes:
        return self.header() + bytes(self.data_bytes)


def tiny_gguf(version: int = 3) -> GgufBytes:
    """A writer that already holds a small, whole, unremarkable model of two blocks."""
    file = GgufBytes(version).text("general.architecture", "laguna").text("general.name", "tiny")
    file.u32("general.file_type", 0).u32("laguna.block_count", 2).u32("laguna.context_length", 128)
    file.array("laguna.attention.head_count", I32, [4, 8]).key("laguna.rope.freq_base", F32, 1e4)
    file.key("laguna.expert_weights_norm", BOOL, True)
    file.array("tokenizer.ggml.tokens", STRING, ["a", "b", "ä", ""])
    file.array("tokenizer.ggml.token_type", I32, [1] * 4).u32("tokenizer.ggml.bos_token_id", 2)
    file.tensor("token_embd.weight", (8, 4)).tensor("output.weight", (8, 4)).tensor("output_norm.weight", (8,))
    for block in range(2):
        for part in ("gate", "up", "down"):
            file.tensor(f"blk.{block}.ffn_{part}_exps.weight", (8, 8, 2))
    return file


def generate_model(arch: str, preset: str, quant: str, path: Path, **options: Any) -> None:
    """Write a model with tests/data/tools/make_gguf.py (seed 1)."""
    tools = str(Path(__file__).parent.parent / "data" / "tools")
    if tools not in sys.path:
        sys.path.insert(0, tools)
    import make_gguf

    make_gguf.generate(arch, preset, quant, 1, str(path), **options)
