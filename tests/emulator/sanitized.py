"""The emulator's tests under the address and undefined-behaviour sanitizers, with the threads of a block in some order.

    python tests/emulator/sanitized.py ORDER[,ORDER...] [arguments of pytest, by default all tests of the emulator]

Orders are forward, reverse and random. Kernels alone are compiled so; a read outside of what a device has allocated, or
of shared memory, ends the run with a report. `races` instead: without sanitizers, accesses that nothing orders are
errors (simt_races.h).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def environment(order: str) -> dict[str, str]:
    """For processes that load sanitized kernels: the sanitizer's allocator has to be there first."""
    if order == "races":
        return os.environ | {"SPARKD_SIMT_RACES": "1", "SPARKD_SIMT_ORDER": "random"}
    compiler = os.environ.get("CXX", "g++")
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):
        done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        libraries.append(done.stdout.strip())
        if not Path(libraries[-1]).is_absolute():
            raise SystemExit(f"{compiler} has no {name}")
    return os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        # Python's own memory is never given back, and every cached library defines the same engine.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "SPARKD_SIMT_SANITIZE": "1",
        "SPARKD_SIMT_ORDER": order,
    }


def main() -> int:
    orders, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--capture=sys", *(arguments or [str(FOLDER)])]
    for order in orders.split(","):
        print(f"sanitized, {order}:", flush=True)
        if failed := subprocess.run(command, env=environment(order)).returncode:
            return failed
    return 0


if __name__ == "__main__":
    sys.exit(main())
