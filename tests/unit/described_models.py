"""The published models as metadata and tensor shapes, to be changed and turned into a header without data.

Written from the published lists of tensors, not from the builders under test.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from gguf_writer import BOOL, F32, I32, STRING, GgufBytes

from sparkd.gguf.formats import FORMATS, FORMATS_BY_NAME
from sparkd.gguf.metadata import ValueType
from sparkd.gguf.model_file import Identity, ModelFile
from sparkd.graph.program import Program
from sparkd.models import build_program

Keys = dict[str, object]
Shapes = dict[str, tuple[int, ...]]
F32_ID = FORMATS_BY_NAME["F32"].id


class Description:
    """Metadata and tensor shapes of a model, to be changed and turned into a header without data."""

    def __init__(self, arch: str, keys: Keys, shapes: Shapes) -> None:
        self.arch = arch
        self.keys = {f"{arch}.{key}": value for key, value in keys.items()}
        self.shapes = shapes
        self.types: dict[str, int] = {}

    def set(self, **changes: object) -> Description:
        """Change keys; `__` stands for a dot, None removes."""
        for name, value in changes.items():
            key = f"{self.arch}.{name.replace('__', '.')}"
            self.keys.pop(key, None)
            if value is not None:
                self.keys[key] = value
        return self

    def model(self) -> ModelFile:
        file = GgufBytes().text("general.architecture", self.arch)
        for name, shape in self.shapes.items():
            kind = FORMATS[self.types.get(name, F32_ID)]
            file.tensor(name, shape, kind.id, nbytes=kind.row_bytes(shape[0]) * math.prod(shape[1:]))
        for key, content in self.keys.items():
            put(file, key, content)
        raw = file.header()
        identity = Identity(0, 0, len(raw) + file.data_bytes, 0)
        return ModelFile.from_headers([raw], [(Path("model.gguf"), identity)])

    def build(self, yarn: str = "keys") -> Program:
        return build_program(self.model(), yarn)


def put(file: GgufBytes, key: str, content: object) -> None:
    """Write a key with the type that the value suggests; an array has that of its first element."""
    match content:
        case list():
            file.array(key, kind_of(content[0]), content)
        case int() if abs(content) >= 1 << 31:
            file.raw_key(key, ValueType.I64, struct.pack("<q", content))
        case _:
            file.key(key, kind_of(content), content)


def kind_of(content: object) -> int:
    match content:
        case bool():
            return BOOL
        case int():
            return I32
        case float():
            return F32
        case _:
            return STRING


def expert_shapes(p: str, hidden: int, experts: int, width: int, shared: int) -> Shapes:
    return {
        f"{p}.ffn_gate_inp.weight": (hidden, experts),
        f"{p}.ffn_gate_exps.weight": (hidden, width, experts),
        f"{p}.ffn_up_exps.weight": (hidden, width, experts),
        f"{p}.ffn_down_exps.weight": (width, hidden, experts),
        f"{p}.ffn_gate_shexp.weight": (hidden, shared),
        f"{p}.ffn_up_shexp.weight": (hidden, shared),
        f"{p}.ffn_down_shexp.weight": (shared, hidden),
    }


def qwen_block(p: str, linear: bool, draft: bool = False) -> Shapes:
    shapes: Shapes = {f"{p}.attn_norm.weight": (2048,), f"{p}.post_attention_norm.weight": (2048,)}
    shapes |= expert_shapes(p, 2048, 256, 512, 512)
    shapes[f"{p}.ffn_gate_inp_shexp.weight"] = (2048,)
    if linear:
        shapes |= {
            f"{p}.attn_qkv.weight": (2048, 8192),
            f"{p}.attn_gate.weight": (2048, 4096),
            f"{p}.ssm_conv1d.weight": (4, 8192),
            f"{p}.ssm_dt.bias": (32,),
            f"{p}.ssm_a": (32,),
            f"{p}.ssm_alpha.weight": (2048, 32),
            f"{p}.ssm_beta.weight": (2048, 32),
            f"{p}.ssm_norm.weight": (128,),
            f"{p}.ssm_out.weight": (4096, 2048),
        }
    else:
        shapes |= {
            f"{p}.attn_q.weight": (2048, 8192),
            f"{p}.attn_k.weight": (2048, 512),
            f"{p}.attn_v.weight": (2048, 512),
            f"{p}.attn_output.weight": (4096, 2048),
            f"{p}.attn_q_norm.weight": (256,),
            f"{p}.attn_k_norm.weight": (256,),
        }
    if draft:
        shapes[f"{p}.nextn.eh_proj.weight"] = (4096, 2048)
        shapes |= {f"{p}.nextn.{norm}.weight": (2048,) for norm in ("enorm", "hnorm", "shared_head_norm")}
    return shapes


def qwen(layers: int = 40) -> Description:
    """Qwen3.6-35B-A3B, or its first layers."""
    shapes: Shapes = {"token_embd.weight": (2048, 248320), "output_norm.weight": (2048,)}
    shapes["output.weight"] = (2048, 248320)
    for layer in range(layers):
        shapes |= qwen_block(f"blk.{layer}", layer % 4 != 3)
    keys: Keys = {
        "block_count": layers,
        "vocab_size": 248320,
        "context_length": 262144,
        "embedding_length": 2048,
        "attention.head_count": 16,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_feed_forward_length": 512,
        "expert_shared_feed_forward_length": 512,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 32,
        "ssm.inner_size": 4096,
        "full_attention_interval": 4,
    }
    return Description("qwen35moe", keys, shapes)


def laguna(layers: int = 40, per_element: bool = False, heads: tuple[int, ...] = (48, 64, 64, 64)) -> Description:
    """Laguna XS-2.1, or its first layers; with other gates and heads more like its larger sister."""
    counts = [heads[layer % len(heads)] for layer in range(layers)]
    shapes: Shapes = {"token_embd.weight": (2048, 100352), "output_norm.weight": (2048,)}
    shapes["output.weight"] = (2048, 100352)
    for layer, n in enumerate(counts):
        p = f"blk.{layer}"
        shapes |= {
            f"{p}.attn_norm.weight": (2048,),
            f"{p}.ffn_norm.weight": (2048,),
            f"{p}.attn_q.weight": (2048, n * 128),
            f"{p}.attn_k.weight": (2048, 1024),
            f"{p}.attn_v.weight": (2048, 1024),
            f"{p}.attn_output.weight": (n * 128, 2048),
            f"{p}.attn_q_norm.weight": (128,),
            f"{p}.attn_k_norm.weight": (128,),
            f"{p}.attn_gate.weight": (2048, n * 128 if per_element else n),
        }
        if layer:
            shapes |= expert_shapes(p, 2048, 256, 512, 512)
            shapes[f"{p}.exp_probs_b.bias"] = (256,)
        else:
            shapes[f"{p}.ffn_gate.weight"] = shapes[f"{p}.ffn_up.weight"] = (2048, 8192)
            shapes[f"{p}.ffn_down.weight"] = (8192, 2048)
    keys: Keys = {
        "block_count": layers,
        "vocab_size": 100352,
        "context_length": 262144,
        "embedding_length": 2048,
        "feed_forward_length": 8192,
        "attention.head_count": counts,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 512,
        "rope.freq_base": 500000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 8192,
        "rope.scaling.yarn_attn_factor": 1.0,
        "rope.scaling.yarn_beta_fast": 64.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_feed_forward_length": 512,
        "expert_shared_feed_forward_length": 512,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    }
    return Description("laguna", keys, shapes)
