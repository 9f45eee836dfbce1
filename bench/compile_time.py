"""How long a GPU worker waits at its first start until NVRTC has made its kernels.

    python bench/compile_time.py [--architectures 75,86,120] [--types F32,Q4_K,Q6_K,Q8_0]

A worker has all kernels made in one piece for the types of its model, by one thread; CuPy keeps the result on disk, so
later starts read a file. Seconds on the clock and of processor time.
"""

from __future__ import annotations

import argparse
import sys
import time

import nvrtc
from kernel_table import TYPES

from sparkd.executors.cuda_device import OPTIONS
from sparkd.executors.cuda_source import COUNTS, kernel_source
from sparkd.gguf.formats import FORMATS_BY_NAME


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default="75,86,120")
    parser.add_argument("--types", default=",".join(TYPES))
    given = parser.parse_args()
    if not nvrtc.version():
        print(f"compile_time: no compiler; pip install {nvrtc.PACKAGE}", file=sys.stderr)
        return 2
    formats = [FORMATS_BY_NAME[name] for name in given.types.split(",")]
    source = kernel_source(formats, COUNTS)
    print("| architecture | types | seconds | of processor time |\n| --- | --- | --- | --- |")
    for architecture in given.architectures.split(","):
        began, spent = time.perf_counter(), time.process_time()
        nvrtc.compile_log(source, [*OPTIONS, f"-arch=sm_{architecture}"])
        took, used = time.perf_counter() - began, time.process_time() - spent
        print(f"| sm_{architecture} | {given.types.replace(',', ', ')} | {took:.1f} | {used:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
