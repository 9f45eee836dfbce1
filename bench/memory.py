"""How much memory a daemon takes while it serves: the processes' shares added up, against weights and contexts.

    python bench/memory.py MODEL.gguf [--context N] [--tokens N] [--lock auto|off]

Starts a daemon, lets it answer a request of `--tokens` prompt and as many output tokens, and prints a table. The
proportional set size (PSS) counts a page that n processes have mapped 1/n in each, so the sum is what they take
together. Memory that nobody has mapped is not in it: the table has the arena's own account beside it. Pages of the
hugetlb pool are in no PSS and are added once. What contexts take is allowed on top of the target and is not subtracted:
the sum has the pages that the request touched.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from spark_client import Client, SparkClientError
from sparkd.config import Settings

#: What is allowed beside contexts: a share of the weights, and so much for the processes.
_SHARE, _PROCESSES = 1.03, 300 << 20
_PATIENCE_S = 1800
_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lock", choices=("auto", "off"), default="auto")
    given = parser.parse_args()
    settings = Settings.of(
        {
            "model": {"path": str(given.model.absolute())},
            "limits": {"context": given.context},
            "memory": {"lock": given.lock},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "sparkd.supervisor.main", "--run-dir", str(run_dir)]
        with (Path(folder) / "log").open("w+") as log:
            daemon = subprocess.Popen([*command, "--settings", settings.to_json()], stdout=log, stderr=log)
            try:
                with connected(run_dir / "client.sock", daemon) as client:
                    settled(client)
                    prompt = [n % 1000 + 10 for n in range(given.tokens)]
                    client.generate(tokens=prompt, max_tokens=given.tokens, ignore_eos=True).read()
                    report(client.status())
            finally:
                daemon.terminate()
                daemon.wait()


def connected(path: Path, daemon: subprocess.Popen[bytes]) -> Client:
    """A client, as soon as there is something to connect to."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and daemon.poll() is None:
        try:
            return Client(path, timeout=60)
        except SparkClientError:
            time.sleep(0.2)
    sys.exit("the daemon did not start")


def settled(client: Client) -> None:
    """Wait until it serves and neither locks nor joins pages any more."""
    deadline = time.monotonic() + _PATIENCE_S
    before: Any = None
    while time.monotonic() < deadline:
        status = client.status()
        memory = status["memory"]
        now = (memory["locked_bytes"], memory["huge_bytes"])
        if status["state"] == "ready" and now == before:
            return
        before = now if status["state"] == "ready" else None
        time.sleep(2)
    sys.exit("the daemon did not come to rest")


def report(status: dict[str, Any]) -> None:
    memory = status["memory"]
    roles = {process["role"]: process["pid"] for process in status["processes"]}
    print("| process | PSS | of it the arena | alone |\n| --- | --- | --- | --- |")
    total = arena = 0
    for role, pid in roles.items():
        pss, shared = shares(pid)
        total, arena = total + pss, arena + shared
        print(f"| {role} | {mib(pss)} | {mib(shared)} | {mib(pss - shared)} |")
    pooled = memory["arena_bytes"] if memory["huge_kind"] == "hugetlb" else 0
    total, arena = total + pooled, arena + pooled
    print(f"| all | {mib(total)} | {mib(arena)} | {mib(total - arena)} |\n")
    weights = memory["core_bytes"] + memory["records_bytes"]
    allowed = int(_SHARE * weights) + _PROCESSES
    filled = Path(f"/proc/{roles['supervisor']}/fd/{arena_fd(roles['supervisor'])}").stat().st_blocks * 512
    for name, size in (
        ("weights", weights),
        ("arena, used or not", memory["arena_bytes"]),
        ("arena, by the kernel's account", filled),
        ("contexts, if all are full", memory["state_bytes"]),
        ("contexts in use", memory["state_used_bytes"]),
        ("in huge pages", memory["huge_bytes"]),
        ("locked", memory["locked_bytes"]),
        (f"allowed: {_SHARE} x weights + 300 MiB (contexts come on top)", allowed),
        ("sum of PSS", total),
    ):
        print(f"{name:58} {mib(size):>12}")
    print(f"{'':58} {'within' if total <= allowed else 'ABOVE'} the target by {mib(abs(allowed - total))}")
    for note in (memory["lock_note"], memory["huge_note"], *status["loading"]["reading"]):
        print(note)


def shares(pid: int) -> tuple[int, int]:
    """PSS of a process, and the part of it that is the arena, in bytes."""
    pss = arena = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "/memfd:sparkd-arena" in line
        elif line.startswith("Pss:"):
            size = int(line.split()[1]) * 1024
            pss += size
            arena += size if inside else 0
    return pss, arena


def arena_fd(pid: int) -> str:
    return next(fd.name for fd in Path(f"/proc/{pid}/fd").iterdir() if "memfd:sparkd-arena" in str(fd.readlink()))


def mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"


if __name__ == "__main__":
    main()
