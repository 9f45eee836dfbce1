"""What the CUDA kernels take of a multiprocessor, by GPU generation: registers, shared memory, spills.

    python bench/kernel_table.py [--write docs/kernels.md] [--architectures 75,86,...] [--types Q4_K,...] [--counts 1,8]

Has the kernels compiled by NVRTC as a GPU worker does, and reads what ptxas says. Occupancy is what registers, threads
and static shared memory allow of the warps that a multiprocessor can hold. Ends with status 1 when a kernel spills.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nvrtc
from roofline import BEGIN

from sparkd.executors.cuda_device import OPTIONS
from sparkd.executors.cuda_source import COUNTS, kernel_source
from sparkd.gguf.formats import FORMATS_BY_NAME

#: Compute capability: registers, warps, blocks and bytes of shared memory of a multiprocessor.
LIMITS = {
    75: (65536, 32, 16, 65536),
    80: (65536, 64, 32, 167936),
    86: (65536, 48, 16, 102400),
    89: (65536, 48, 24, 102400),
    90: (65536, 64, 32, 233472),
    120: (65536, 48, 32, 102400),
}
#: Types that the table's kernels multiply: those of a Q4_K_M file, and Q8_0.
TYPES = ("F32", "Q4_K", "Q6_K", "Q8_0")
#: Threads of a block of the kernels that multiply (and of some for prompts); the others are launched with at most 256.
_THREADS = 128
#: What the document says of the compiler, before its version.
COMPILER = "Compiled by NVRTC"
#: And of what it compiled, before its digest.
SOURCE = "The source without comments has the digest"
_MULTIPLY = re.compile(r"(linear|logits|route|gate_up|down)_\d+$|prefill_(attention_\d|choose|delta|experts|linear)$")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\d+'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers.*?(?:, (\d+) bytes smem)?(?:,|$)")


@dataclass(frozen=True, slots=True)
class Usage:
    """One kernel on one architecture. Bytes; `spilled` counts stores and loads."""

    kernel: str
    registers: int
    shared: int
    spilled: int

    def occupancy(self, architecture: int) -> float:
        """Share of the warps of a multiprocessor that can be there at a time."""
        registers, warps, blocks, shared = LIMITS[architecture]
        threads = _THREADS if _MULTIPLY.match(self.kernel) else 256
        per_warp = -(-self.registers * 32 // 256) * 256
        fitting = min(blocks, registers // (per_warp * threads // 32), warps * 32 // threads)
        if self.shared:
            fitting = min(fitting, shared // (self.shared + 1024))
        return fitting * threads / 32 / warps

    def cell(self, architecture: int) -> str:
        """As it stands in the table."""
        spilled = f", **{self.spilled} spilled**" if self.spilled else ""
        return f"{self.registers} r, {self.shared} B, {self.occupancy(architecture):.0%}{spilled}"


def compile_for(architecture: int, types: Sequence[str], counts: Sequence[int]) -> list[Usage]:
    """Usage of all kernels. RuntimeError with the compiler's words."""
    source = kernel_source([FORMATS_BY_NAME[name] for name in types], counts)
    return parse(nvrtc.compile_log(source, [*OPTIONS, f"-arch=sm_{architecture}", "--ptxas-options=-v"]))


def compile_all(counts: Mapping[int, Sequence[int]], types: Sequence[str] = TYPES) -> dict[int, list[Usage]]:
    """Usage of all kernels on each architecture, for steps of its `counts`."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda one: compile_for(one[0], types, one[1]), counts.items())
        return dict(zip(counts, found, strict=True))


def digest() -> str:
    """Of the kernels in the table, for all counts of rows, and of how they are compiled; comments do not matter."""
    source = kernel_source([FORMATS_BY_NAME[name] for name in TYPES], COUNTS)
    code = " ".join(re.sub(r"//.*", "", source).split())
    return hashlib.sha256(repr((code, OPTIONS)).encode()).hexdigest()[:16]


def parse(text: str) -> list[Usage]:
    """What ptxas says of each kernel."""
    usages, kernel, spilled = [], "", 0
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            kernel, spilled = entry.group(1), 0
        elif spills := _SPILLS.search(line):
            spilled = int(spills.group(2)) + int(spills.group(3))
        elif used := _USED.search(line):
            shared = re.search(r"(\d+) bytes smem", line)
            usages.append(Usage(kernel, int(used.group(1)), int(shared.group(1)) if shared else 0, spilled))
    return sorted(usages, key=lambda usage: usage.kernel)


def table(found: dict[int, list[Usage]]) -> str:
    """Markdown: a row for each kernel, a column for each architecture."""
    rows = ["| kernel | " + " | ".join(f"sm_{a}" for a in found) + " |", "| --- |" + " --- |" * len(found)]
    for number, usage in enumerate(next(iter(found.values()))):
        cells = [usages[number].cell(architecture) for architecture, usages in found.items()]
        rows.append(f"| {usage.kernel} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--architectures", default=",".join(map(str, LIMITS)))
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    given = parser.parse_args()
    if not nvrtc.version():
        print(f"kernel_table: no compiler; pip install {nvrtc.PACKAGE}", file=sys.stderr)
        return 2
    types, counts = given.types.split(","), [int(count) for count in given.counts.split(",")]
    found = compile_all({int(a): counts for a in given.architectures.split(",")}, types)
    text = f"""# Kernels

Made by `python bench/kernel_table.py --write docs/kernels.md`: kernels that multiply {given.types} weights, for
steps of {given.counts} rows. Registers of a thread, bytes of static shared memory of a block, and the share of a
multiprocessor's warps that both allow. {COMPILER} {nvrtc.version()}; nothing here was run on a GPU.
{SOURCE} {digest()}.

{table(found)}
"""
    if given.write:
        # What bench/roofline.py has put there stays.
        _, mark, kept = given.write.read_text().partition(BEGIN) if given.write.exists() else ("", "", "")
        given.write.write_text(f"{text}\n{mark}{kept}" if kept else text)
    else:
        print(text)
    return 1 if any(usage.spilled for usages in found.values() for usage in usages) else 0


if __name__ == "__main__":
    sys.exit(main())
