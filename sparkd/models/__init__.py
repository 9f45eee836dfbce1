"""Programs of the supported architectures, built from a model file's metadata and tensor list."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparkd.errors import UnsupportedError
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.models import laguna, qwen35moe
from sparkd.models.rope import Reading

_ARCHITECTURES: Mapping[str, Callable[[ModelFile, Reading], Program]] = {
    "laguna": laguna.build,
    "qwen35moe": qwen35moe.build,
}


def build_program(model: ModelFile, yarn: str = "keys") -> Program:
    """The program of `model`; `yarn` is the setting `numerics.yarn` (keys, llama or final).

    Raises UnsupportedError for an architecture, a tensor type or an option that sparkd does not compute, ModelFileError
    for a missing or misshapen tensor or an impossible key.
    """
    build = _ARCHITECTURES.get(model.architecture)
    if build is None:
        raise UnsupportedError(
            f"architecture '{model.architecture}' is not supported",
            where=model.metadata.where,
            fix=f"sparkd runs {' and '.join(sorted(_ARCHITECTURES))}",
        )
    return build(model, Reading.of(yarn))
