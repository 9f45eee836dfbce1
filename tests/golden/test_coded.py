"""Models of the weight types with code books, which no generator writes: random blocks mean what they should."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkd.executors.reference import Reference, Weights
from sparkd.gguf.formats import FORMATS_BY_NAME, Format, dequantise
from sparkd.gguf.model_file import ModelFile
from sparkd.kernels import available

sys.path.insert(0, str(Path(__file__).parents[1] / "data" / "tools"))
import make_gguf

#: Type, architecture of the model made of it.
MODELS = [
    ("IQ2_XXS", "laguna"),
    ("IQ2_XS", "qwen35moe"),
    ("IQ2_S", "laguna"),
    ("IQ3_XXS", "qwen35moe"),
    ("IQ3_S", "laguna"),
    ("NVFP4", "qwen35moe"),
]
#: As for files of floats: nothing is rounded to 8 bits.
LIMIT = 1e-3


def random_blocks(format: Format, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks whose values vary as much as those of x, and have nothing else of it."""
    count = x.size // format.block
    blocks = np.random.default_rng(count).integers(0, 256, (count, format.bytes), np.uint8)
    if format.name == "NVFP4":
        # Factors of a power of two and 7 steps up to the next, in E4M3: 2^(exponent - 7), halved.
        exponent = round(np.log2(x.std() / 6.5 * 2)) + 7
        blocks[:, :4] = np.clip(8 * exponent, 1, 119) + blocks[:, :4] % 8
        return blocks
    blocks[:, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    ones = dequantise(format, blocks[:64].reshape(-1), (min(count, 64), format.block))
    blocks[:, :2] = np.frombuffer(np.float16(x.std() / ones.std()).tobytes(), np.uint8)
    return blocks


@pytest.mark.parametrize(("name", "architecture"), MODELS)
def test_a_model_of_a_type_with_a_code_book_means_its_values(
    load_file, machine, monkeypatch, tmp_path, name, architecture
):
    format = FORMATS_BY_NAME[name]
    monkeypatch.setitem(make_gguf.TYPES, name, (format.id, format.block, format.bytes))
    monkeypatch.setitem(make_gguf.QUANTS, name, (0, name))
    monkeypatch.setitem(make_gguf.QUANTIZE, name, lambda x: random_blocks(format, x))
    path = tmp_path / "m.gguf"
    make_gguf.generate(architecture, "tinyk", name, 1, str(path))
    model = ModelFile.open(path)
    assert model.tensor("token_embd.weight").format is format
    loaded = load_file(path)
    tokens = np.random.default_rng(1).integers(0, loaded.program.vocab, 9).tolist()

    run = machine(loaded).prefill(tokens)
    meant = Reference(loaded.program, Weights(model)).run(tokens)
    assert (run.all_experts == meant.experts.numpy()).all()
    assert np.abs(run.all_logits - meant.logits.numpy()).max() < LIMIT
    assert run.all_logits.std() > 0.1
    for isa in available():
        for threads, chunk in ((1, 1), (2, 5)):
            same = machine(loaded, threads=threads, isa=isa).prefill(tokens, chunk)
            assert same.all_logits.tobytes() == run.all_logits.tobytes()
