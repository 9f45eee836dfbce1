"""Writes sparkd/kernels/common/grids.h: the code books of the IQ2 and IQ3 formats, from the `gguf` package's constants.

python bench/make_grids.py
"""

from __future__ import annotations

from pathlib import Path

from gguf import quants

HEADER = Path(__file__).parent.parent / "sparkd" / "kernels" / "common" / "grids.h"

HEAD = """\
// The code books of the IQ2 and IQ3 formats: constants of GGUF, as the `gguf` package (MIT) has them. An entry's values
// are its bytes, the first the lowest. Written by bench/make_grids.py.
#pragma once

#include "arithmetic.h"

namespace spark {
"""

ENTRY = """
SPARK_FN const {type}* {name}_grid() {{
    static constexpr {type} grid[{count}] = {{
{lines}
    }};
    return grid;
}}
"""


def grid(name: str) -> str:
    """The function that gives one grid."""
    quant = getattr(quants, name)
    quant.init_grid()
    rows = quant.grid.astype("u1").reshape(quant.grid_shape)
    size = rows.shape[1]
    words = [f"0x{int.from_bytes(row.tobytes(), 'little'):0{2 * size}x}" for row in rows]
    per_line = 5 if size == 8 else 9
    lines = [", ".join(words[i : i + per_line]) for i in range(0, len(words), per_line)]
    return ENTRY.format(
        type=f"uint{8 * size}_t", name=name.lower(), count=len(words), lines="\n".join(f"        {x}," for x in lines)
    )


def header() -> str:
    """The whole file."""
    names = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
    return HEAD + "".join(map(grid, names)) + "\n}  // namespace spark\n"


if __name__ == "__main__":
    HEADER.write_text(header())
