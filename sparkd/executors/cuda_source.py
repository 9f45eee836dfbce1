"""The CUDA C++ of the kernels as one text: NVRTC gets no files, so that no header need be installed with a service."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib.resources import files
from importlib.resources.abc import Traversable

from sparkd.errors import UnsupportedError
from sparkd.gguf.formats import Arithmetic, Format
from sparkd.graph.program import Program

#: Types that the kernels multiply.
TYPES = frozenset(
    (
        "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
        "Q6_K", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4",
    )
)  # fmt: skip
#: The fixed sizes of kernels: `kMaxTopK` and `kMaxExperts` in experts.cu.
MAX_TOP_K = 16
_MAX_EXPERTS = 1024
_MAX_HEAD_DIM = 256
#: Numbers of rows that there are kernels for: a step runs in the smallest that holds it.
COUNTS = (1, 2, 4, 8)
_SIZED = ("linear", "logits", "route", "gate_up", "down")
_KERNELS = (
    "add", "angles", "argmax", "attend_pages", "begin_sequences", "causal_conv", "delta_inputs", "embed",
    "gated_delta", "gated_rms_norm", "merge_and_gate", "merge_pages", "mixture_sum", "output_gate",
    "prefill_attention_2", "prefill_attention_4", "prefill_attention_8", "prefill_choose", "prefill_conv",
    "prefill_conv_state", "prefill_delta", "prefill_experts", "prefill_inner", "prefill_linear", "prepare_heads",
    "qk_norm", "quantise", "rms_norm", "rope", "sort_pairs", "swiglu", "take_host", "tell_host", "weighted_sum",
    "write_kv",
)  # fmt: skip
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_GUARD = "#pragma once\n"


def check_shapes(program: Program) -> None:
    """UnsupportedError for what the kernels' fixed sizes do not hold."""
    for layer in program.expert_layers:
        if layer.top_k > MAX_TOP_K or layer.experts > _MAX_EXPERTS:
            raise UnsupportedError(
                f"layer {layer.layer} chooses {layer.top_k} of {layer.experts} experts; a GPU worker takes at most"
                f" {MAX_TOP_K} of {_MAX_EXPERTS}"
            )
    heads = [(cache.layer, cache.head_dim) for cache in program.caches]
    for number, head_dim in [*heads, *((state.layer, state.head_dim) for state in program.delta_states)]:
        if head_dim > _MAX_HEAD_DIM or head_dim % 2:
            raise UnsupportedError(f"layer {number} has heads of {head_dim}, a GPU worker takes {_MAX_HEAD_DIM}")


def kernel_source(formats: Collection[Format], counts: Collection[int] = COUNTS) -> str:
    """All kernels, able to multiply weights of `formats`, for steps of `counts` rows at most.

    UnsupportedError for a type that the kernels do not know.
    """
    unknown = sorted(f.name for f in formats if f.name not in TYPES)
    if unknown:
        known = ", ".join(sorted(TYPES))
        raise UnsupportedError(f"a GPU worker cannot compute {', '.join(unknown)} yet", fix=f"it knows {known}")
    kinds = {Arithmetic.INT256: "INT256", Arithmetic.INT32: "INT32", Arithmetic.FLOAT: "FLOAT"}
    types = " ".join(
        f"{kinds[f.arithmetic]}({f.name})" for f in sorted(formats, key=lambda f: f.id) if f.arithmetic is not None
    )
    prelude = f"#define SPARK_TYPES(INT256, INT32, FLOAT) {types}\n"
    prelude += f"#define SPARK_COUNTS(KERNELS) {' '.join(f'KERNELS({count})' for count in sorted(counts))}\n"
    kernels = files("sparkd.kernels")
    return prelude + _inlined(kernels, ("cuda",), "kernels.cu", set())


def kernel_names(counts: Collection[int] = COUNTS) -> list[str]:
    """The kernels of `kernel_source`."""
    return [*_KERNELS, *(f"{name}_{count}" for name in _SIZED for count in sorted(counts))]


def _inlined(root: Traversable, folder: tuple[str, ...], name: str, seen: set[str]) -> str:
    """A file with every file that it includes in place, each once."""
    path = [*folder, *name.split("/")]
    while ".." in path:
        index = path.index("..")
        del path[index - 1 : index + 1]
    if "/".join(path) in seen:
        return ""
    seen.add("/".join(path))
    text = root.joinpath(*path).read_text().replace(_GUARD, "")
    return _INCLUDE.sub(lambda found: _inlined(root, tuple(path[:-1]), found.group(1), seen), text)
