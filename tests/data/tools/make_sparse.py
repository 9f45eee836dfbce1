"""GGUF files of every tensor's true shape and type with a hole where the weights would be.

A file takes a few MB of disk whatever it says its size is. Same presets and hyperparameters as `make_gguf`; norms and
routers are never computed, and vocabularies are made up in their true length, so this takes about a second.
"""

from __future__ import annotations

import functools
import os
import struct

import make_gguf
import numpy as np


class Shapes(make_gguf.Model):
    """A generated model whose values nobody asks for."""

    def norm(self, name, n, *_, **__):
        self.vec(name, np.zeros(n, np.float32))

    def router(self, il):
        experts = self.hp["n_expert"]
        self.tensors.append(
            make_gguf.Tensor(f"blk.{il}.ffn_gate_inp.weight", [self.hp["n_embd"], experts], None, "router")
        )
        if self.arch == "laguna":
            self.vec(f"blk.{il}.exp_probs_b.bias", np.zeros(experts, np.float32))


def make(path, arch, quant="q4_k_m", preset="full", parts=1, types=None, **overrides):
    """Write a file, or `parts` of a set beside it; returns the path of the first.

    `types` maps parts of tensor names to storage types, after those that `quant` chooses.
    """
    hp = dict(make_gguf.COMMON, **make_gguf.PRESETS[arch][preset])
    hp.update(overrides, preset=preset)
    tokens, kinds, merges = _vocabulary()
    more = hp["n_vocab"] - len(tokens)
    tokens, kinds = tokens + [f"[PAD{i}]" for i in range(more)], kinds + [make_gguf.UNUSED] * more
    model = Shapes(arch, hp, 1, tokens, kinds)
    make_gguf.choose_types(model, quant)
    for tensor in model.tensors:
        for part, kind in (types or {}).items():
            if part in tensor.name:
                tensor.type = kind
    kv = model.metadata(quant, merges)
    if parts == 1:
        _write(path, kv, model.tensors)
        return path
    share = -(-len(model.tensors) // parts)
    stem = str(path).removesuffix(".gguf")
    names = [type(path)(f"{stem}-{i + 1:05d}-of-{parts:05d}.gguf") for i in range(parts)]
    for i, name in enumerate(names):
        split = [("split.no", make_gguf.U16, i), ("split.count", make_gguf.U16, parts),
                 ("split.tensors.count", make_gguf.I32, len(model.tensors))]
        _write(name, (kv if i == 0 else []) + split, model.tensors[i * share : (i + 1) * share])
    return names[0]


@functools.cache
def _vocabulary():
    return make_gguf.tiny_vocab(640)


def _write(path, kv, tensors):
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv)))
    for key, kind, value in kv:
        head += make_gguf.kv_entry(key, kind, value)
    size = 0
    for tensor in tensors:
        head += make_gguf.kv_str(tensor.name) + struct.pack("<I", len(tensor.ne))
        head += struct.pack(f"<{len(tensor.ne)}Q", *tensor.ne)
        head += struct.pack("<IQ", make_gguf.TYPES[tensor.type][0], size)
        size += make_gguf.pad(make_gguf.nbytes(tensor))
    head += b"\0" * (make_gguf.pad(len(head)) - len(head))
    with open(path, "wb") as file:
        file.write(head)
        os.ftruncate(file.fileno(), len(head) + size)
