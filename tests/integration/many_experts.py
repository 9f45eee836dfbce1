"""Models with so many experts that a part of them is a tier: 64 in each of seven or eight layers, or fewer; 4 used."""

from __future__ import annotations

import sys
from pathlib import Path

ARCHITECTURES = ("laguna", "qwen35moe")
_TOOLS = Path(__file__).parent.parent / "data" / "tools"


def many_experts(arch: str, folder: Path, experts: int = 64, layers: int = 8) -> Path:
    """Write the model; contexts of 32,768 positions."""
    sys.path.insert(0, str(_TOOLS))
    import make_gguf

    path = folder / f"{arch}-many.gguf"
    changes = {"n_expert": experts, "n_used": 4, "n_layer": layers, "n_ctx": 32768}
    make_gguf.generate(arch, "tinyk", "q4_k_m", 1, str(path), None, overrides=changes)
    return path
