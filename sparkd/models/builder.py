"""What building a program needs for every architecture: checked keys, checked tensors, and values with names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from sparkd.errors import ModelFileError, UnsupportedError
from sparkd.gguf.model_file import ModelFile
from sparkd.gguf.reader import Tensor, unsupported
from sparkd.graph.ops import (
    Add,
    Embed,
    Experts,
    Linear,
    Logits,
    Op,
    RmsNorm,
    Route,
    Router,
    Routing,
    SwiGlu,
    Value,
    Weight,
)
from sparkd.graph.program import ConvState, DeltaState, ExpertLayer, KvCache, Program

#: Keys that would change the mathematics of a layer, with the values that change nothing.
_NEUTRAL: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("expert_group_count", (0, 1)),
    ("router_logit_softcapping", (0,)),
    ("attn_logit_softcapping", (0,)),
    ("final_logit_softcapping", (0,)),
    ("attention.clamp_kqv", (0,)),
    ("logit_scale", (0, 1)),
    ("embedding_scale", (0, 1)),
    ("residual_scale", (0, 1)),
)
#: Tensors that would change what a layer computes: biases, scales of NVFP4 weights, attention sinks, rotary factors.
_CHANGES_RESULT = re.compile(r"(\.bias|\.scale|\.input_scale|sinks\.weight|(^|\.)rope_.*\.weight)$")
#: ids of experts travel as int16.
MOST_EXPERTS = 32768
#: Bound on the dimensions of a head, so that a damaged file cannot ask for a giant rotary table.
MOST_DIMS = 8192


class Keys:
    """Architecture keys of one file, read with bounds. Raises ModelFileError naming the key."""

    def __init__(self, model: ModelFile) -> None:
        self.where = model.metadata.where
        self.arch = model.architecture
        self.metadata = model.metadata
        for key, neutral in _NEUTRAL:
            value = self.metadata.number(f"{self.arch}.{key}", float(neutral[0]))
            if value not in neutral:
                raise UnsupportedError(f"{self.arch}.{key} = {value:g} is not supported", where=self.where)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Value of `<arch>.key` within low..high; required unless `default` is given."""
        full = f"{self.arch}.{key}"
        value = self.metadata.integer(full) if default is None else self.metadata.integer(full, default)
        return self._within(full, value, low, high)

    def integers(self, key: str, count: int, low: int, high: int, default: int | None = None) -> tuple[int, ...]:
        """A scalar or an array of `count` values, as `count` values within low..high."""
        full = f"{self.arch}.{key}"
        values = (
            self.metadata.integers(full, count) if default is None else self.metadata.integers(full, count, default)
        )
        return tuple(self._within(full, value, low, high) for value in values)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Value of `<arch>.key` within low..high; required unless `default` is given."""
        full = f"{self.arch}.{key}"
        value = self.metadata.number(full) if default is None else self.metadata.number(full, default)
        if not low <= value <= high:
            raise ModelFileError(f"{full} is {value:g}, not within {low:g} to {high:g}", where=self.where)
        return value

    def wrong(self, key: str, why: str) -> ModelFileError:
        """The error for a value that contradicts another."""
        return ModelFileError(f"{self.arch}.{key} {why}", where=self.where)

    def unsupported(self, key: str, why: str) -> UnsupportedError:
        """The error for a value whose mathematics sparkd does not have."""
        return UnsupportedError(f"{self.arch}.{key} {why}", where=self.where)

    def _within(self, full: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise ModelFileError(f"{full} is {value}, not within {low} to {high}", where=self.where)
        return value


class Builder:
    """Operations, state and notes of one program while it is written down.

    Hands out weights only after checking that the tensor exists, with the expected shape and a type that sparkd
    computes.
    """

    def __init__(self, model: ModelFile, hidden: int, eps: float, notes: list[str]) -> None:
        self.where = model.metadata.where
        self.model = model
        self.hidden = hidden
        self.eps = eps
        self.ops: list[Op] = []
        self.caches: list[KvCache] = []
        self.conv_states: list[ConvState] = []
        self.delta_states: list[DeltaState] = []
        self.expert_layers: list[ExpertLayer] = []
        self.layer_outputs: list[Value] = []
        self.notes = notes
        self._used: set[str] = set()
        self._layer = ""

    # --- names

    def enter(self, layer: int) -> None:
        """Names of tensors and values belong to `layer` from here on."""
        self._layer = f"blk.{layer}."

    def leave(self) -> None:
        """Names belong to the whole model again."""
        self._layer = ""

    def value(self, name: str, width: int) -> Value:
        """A new activation of the current layer."""
        return Value(self._layer + name, width)

    def has(self, name: str) -> bool:
        """Whether the current layer has the tensor."""
        return self._layer + name in self.model.tensors

    # --- weights

    def tensor(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """The tensor `name` of the current layer, in one of `shapes` (GGUF order, columns first)."""
        full = self._layer + name
        found = self.model.tensors.get(full)
        expected = " or ".join(_shape(shape) for shape in shapes)
        if found is None:
            raise ModelFileError(f"tensor {full} {expected} is missing", where=self.where)
        if found.shape not in shapes:
            raise ModelFileError(
                f"tensor {full} has shape {_shape(found.shape)}, expected {expected}", where=self.where
            )
        if found.format.arithmetic is None:
            raise unsupported(found, self.where)
        self._used.add(full)
        return found

    def matrix(self, name: str, columns: int, rows: int) -> Weight:
        """A matrix [rows, columns] of any type that sparkd computes."""
        self.tensor(name, (columns, rows))
        return Weight(self._layer + name, rows, columns)

    def vector(self, name: str, size: int) -> Weight:
        """One row of `size` float32 numbers."""
        self._float32(self.tensor(name, (size,)))
        return Weight(self._layer + name, 1, size)

    def taps(self, name: str, taps: int, channels: int) -> Weight:
        """Float32 taps [channels, taps] of a depthwise convolution."""
        self._float32(self.tensor(name, (taps, channels)))
        return Weight(self._layer + name, channels, taps)

    def stack(self, name: str, columns: int, rows: int, experts: int) -> Weight:
        """A stack of `experts` matrices [rows, columns]; the weight describes one of them."""
        self.tensor(name, (columns, rows, experts))
        return Weight(self._layer + name, rows, columns)

    def attention_weights(self, columns: int, *rows: int) -> Sequence[Weight]:
        """Projections to q, k and v of `rows` each: three tensors, or row slices of one fused attn_qkv."""
        if not self.has("attn_qkv.weight"):
            return [self.matrix(f"attn_{x}.weight", columns, n) for x, n in zip("qkv", rows, strict=True)]
        fused = self.matrix("attn_qkv.weight", columns, sum(rows))
        firsts = [sum(rows[:i]) for i in range(len(rows))]
        return [Weight(fused.tensor, n, columns, first) for n, first in zip(rows, firsts, strict=True)]

    def _float32(self, tensor: Tensor) -> None:
        if tensor.format.name != "F32":
            raise UnsupportedError(
                f"tensor {tensor.name} has type {tensor.format.name}, sparkd reads it as F32 only", where=self.where
            )

    # --- operations that both architectures use

    def embed(self, vocab: int) -> Value:
        """The residual stream at the start of the program."""
        out = self.value("embedding", self.hidden)
        self.ops.append(Embed(self.matrix("token_embd.weight", self.hidden, vocab), out))
        return out

    def rms_norm(self, x: Value, tensor: str) -> Value:
        """`x` normed with the weight `tensor`."""
        out = self.value(tensor.removesuffix(".weight"), x.width)
        self.ops.append(RmsNorm(x, self.vector(tensor, x.width), out, self.eps))
        return out

    def linear(self, x: Value, weight: Weight, name: str) -> Value:
        """`weight` · `x`."""
        out = self.value(name, weight.rows)
        self.ops.append(Linear(x, weight, out))
        return out

    def add(self, x: Value, y: Value, name: str) -> Value:
        """`x` + `y`."""
        out = self.value(name, x.width)
        self.ops.append(Add(x, y, out))
        return out

    def swiglu(self, x: Value, width: int, suffix: str = "") -> Value:
        """down · (silu(gate · x) * (up · x)) with the tensors ffn_gate, ffn_up, ffn_down + `suffix`."""
        gate = self.linear(x, self.matrix(f"ffn_gate{suffix}.weight", x.width, width), f"ffn_gate{suffix}")
        up = self.linear(x, self.matrix(f"ffn_up{suffix}.weight", x.width, width), f"ffn_up{suffix}")
        inner = self.value(f"ffn_inner{suffix}", width)
        self.ops.append(SwiGlu(gate, up, inner))
        return self.linear(inner, self.matrix(f"ffn_down{suffix}.weight", width, x.width), f"ffn_down{suffix}")

    def routed_experts(
        self, x: Value, layer: int, experts: int, top_k: int, width: int, router: Router, bias: bool, scale: float
    ) -> Value:
        """The weighted sum of the top_k experts of each row; gate and up experts may be fused in one stack."""
        routing = Routing(self._layer + "routing", top_k)
        self.ops.append(
            Route(
                x,
                self.matrix("ffn_gate_inp.weight", x.width, experts),
                self.vector("exp_probs_b.bias", experts) if bias else None,
                routing,
                experts,
                router,
                scale,
            )
        )
        if self.has("ffn_gate_up_exps.weight"):
            fused = self.stack("ffn_gate_up_exps.weight", x.width, 2 * width, experts)
            gate = Weight(fused.tensor, width, x.width)
            up = Weight(fused.tensor, width, x.width, first_row=width)
        else:
            gate = self.stack("ffn_gate_exps.weight", x.width, width, experts)
            up = self.stack("ffn_up_exps.weight", x.width, width, experts)
        down = self.stack("ffn_down_exps.weight", width, x.width, experts)
        self.expert_layers.append(ExpertLayer(layer, experts, top_k, gate, up, down))
        out = self.value("experts", x.width)
        self.ops.append(Experts(x, routing, out, len(self.expert_layers) - 1))
        return out

    def logits(self, x: Value, vocab: int) -> None:
        """The head; without output.weight the embedding is used (tied)."""
        name = "output.weight"
        if not self.has(name):
            name = "token_embd.weight"
            self.notes.append("no output.weight: the embedding is the head too (tied)")
        self.ops.append(Logits(x, self.matrix(name, x.width, vocab)))

    # --- the end

    def program(self, vocab: int, context: int, layers: int, blocks: int) -> Program:
        """The finished program. Raises UnsupportedError if a tensor was left over that would change the result."""
        self._check_rest(layers, blocks)
        return Program(
            self.model.architecture,
            self.hidden,
            vocab,
            context,
            tuple(self.ops),
            tuple(self.caches),
            tuple(self.conv_states),
            tuple(self.delta_states),
            tuple(self.expert_layers),
            tuple(self.layer_outputs),
            tuple(self.notes),
        )

    def _check_rest(self, layers: int, blocks: int) -> None:
        unknown = []
        for name in self.model.tensors:
            if name in self._used or layers <= _block_of(name) < blocks or ".nextn." in name:
                continue
            if _CHANGES_RESULT.search(name):
                raise UnsupportedError(f"tensor {name} is not supported", where=self.where)
            unknown.append(name)
        if unknown:
            shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            self.notes.append(f"{len(unknown)} unknown tensors are ignored: {shown}")


def count_layers(model: ModelFile, keys: Keys, notes: list[str]) -> tuple[int, int]:
    """(layers of the trunk, blocks of the file): trailing next-token-prediction blocks are draft layers, not trunk.

    Adds to `notes` what was found of them.
    """
    blocks = keys.integer("block_count", 1, 1024)
    drafts = keys.integer("nextn_predict_layers", 0, blocks - 1, default=0)
    declared = "declared"
    if not drafts and blocks > 1 and f"blk.{blocks - 1}.nextn.eh_proj.weight" in model.tensors:
        # Run as a trunk layer it would destroy the output.
        drafts, declared = 1, "found, though not declared"
    layers = blocks - drafts
    if drafts:
        present = sum(layers <= _block_of(name) < blocks for name in model.tensors)
        state = f"its {present} tensors are skipped" if present else "its tensors are absent"
        notes.append(f"next-token prediction: blk.{layers} to blk.{blocks - 1} {declared}; {state}")
    return layers, blocks


def count_vocab(model: ModelFile, keys: Keys) -> int:
    """Rows of the embedding: vocab_size, else the number of tokens."""
    tokens = "tokenizer.ggml.tokens"
    count = len(model.metadata.strings(tokens)) if tokens in model.metadata else 0
    vocab = keys.integer("vocab_size", 1, 1 << 24, default=count or None)
    if count > vocab:
        raise keys.wrong("vocab_size", f"is {vocab}, but the tokenizer has {count} tokens")
    return vocab


def read_attention_scale(keys: Keys, head_dim: int) -> float:
    """Factor on q·k: the key attention.scale, where absent or 0 1/sqrt(head_dim)."""
    return keys.number("attention.scale", 0.0, 1e6, default=0.0) or 1.0 / math.sqrt(head_dim)


def read_weights_scale(keys: Keys) -> float:
    """Factor on the routed experts' weights; writers store 0 where there is none."""
    return keys.number("expert_weights_scale", 0.0, 1e6, default=0.0) or 1.0


def check_rotated(keys: Keys, key: str, n_rot: int, head_dim: int) -> None:
    """n_rot must be an even number of a head's dimensions."""
    if n_rot % 2 or n_rot > head_dim:
        raise keys.wrong(key, f"is {n_rot}, must be even and at most the head size {head_dim}")


def check_value_length(keys: Keys, suffix: str, key_length: int) -> None:
    """Heads of K and V have the same size."""
    found = keys.integer(f"attention.value_length{suffix}", 1, MOST_DIMS, default=key_length)
    if found != key_length:
        why = f"is {found}, but attention.key_length{suffix} is {key_length}"
        raise keys.unsupported(f"attention.value_length{suffix}", why)


def check_heads(keys: Keys, heads: int, kv_heads: int, layer: int) -> None:
    """Every KV head serves the same number of query heads."""
    if heads % kv_heads:
        raise keys.wrong("attention.head_count", f"of layer {layer} is {heads}, no multiple of {kv_heads} KV heads")


def _block_of(name: str) -> int:
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def _shape(shape: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, shape)) + "}"
