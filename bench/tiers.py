"""A model larger than its memory: sparkd and llama.cpp within a cgroup of the same size, and both without limit.

    python bench/tiers.py MODEL.gguf [--peer PYTHON] [--shares 0.6 0.4] [--warm 64] [--tokens 192] [--peer-s 120]

The limit of the cgroup is a share of the model's files. In it runs, in turn, the whole daemon (all processes, the arena
included; it finds the limit itself) and a process with llama.cpp (weights mapped from the file and not repacked: the
limit then holds its page cache). The tokens are the same everywhere: sampled once without limit, with a fixed seed, and
given to the peer as they are. The first `--warm` of them are not measured; the peer stops after `--peer-s` seconds.

Per run: tokens per second, times of a token, and what was read from the disk per token. For sparkd also

    lower bound   bytes of the distinct experts that were not in memory: no policy that misses these could read less
    layer bound   the sum over layers of mixer and router, then the longer of computing what is there and reading what
                  is not, then computing the last to arrive; at the speed this disk reads random experts with, the mean
                  of before and after (a shared disk is not always as fast). It takes every token and layer to miss
                  equally, which can only make it smaller. The time of a token is the median, here and there; without
                  limit, the smaller one of a run before and a run after.
    whole token   the longer of all computing and all reading, if they could overlap fully

The model's files should not be mapped by anybody else meanwhile: what others keep in the page cache is not charged to
the cgroup, and makes the peer look fast. The kernel is told to forget them before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving import serving

from spark_client import Client, messages
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.program import Program
from sparkd.ipc.mapping import HUGE_PAGE
from sparkd.ipc.memory import Region
from sparkd.models import build_program
from sparkd.residency.budget import GIB
from sparkd.store._readers import Readers
from sparkd.store.copier import EXPRESS
from sparkd.store.layout import PAGE, ArenaLayout, record_extents
from sparkd.store.reading import ShardFile

PEER = Path(__file__).with_name("tiers_peer.py")
CONTEXT = 2048
PROMPT = 32
_READS = 400
#: Places in memory that are read to in turn, and bytes of each: more than a record.
_PLACES = 256
_PLACE = 4 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of each measured token, and bytes read from disk meanwhile."""

    seconds: list[float]
    read: int
    #: Uses of experts by decoding, and those that were not in memory; sparkd alone.
    uses: int = 0
    misses: int = 0
    note: str = ""

    @property
    def per_second(self) -> float:
        return len(self.seconds) / sum(self.seconds) if self.seconds else 0.0

    def quantile(self, share: float) -> float:
        return sorted(self.seconds)[min(int(share * len(self.seconds)), len(self.seconds) - 1)]


# ---- the cgroup ----


@contextmanager
def cgroup(limit: int | None) -> Iterator[list[str]]:
    """The beginning of a command that runs within so many bytes of memory."""
    if limit is None:
        yield []
        return
    folder, name = _parent()
    made = folder / f"sparkd-tiers-{os.getpid()}"
    made.mkdir()
    try:
        (made / name).write_text(str(limit))
        swap = made / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(made)]
    finally:
        while (made / "cgroup.procs").read_text():
            time.sleep(0.05)
        made.rmdir()


def _parent() -> tuple[Path, str]:
    mounts = Path("/proc/self/mountinfo").read_text()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") and (mount := re.search(r" (\S+) \S+ - cgroup \S+ \S*memory", mounts)):
            own = Path(mount[1] + path)
            return own if own.exists() else Path(mount[1]), "memory.limit_in_bytes"
    if mount := re.search(r" (\S+) \S+ - cgroup2 ", mounts):
        return Path(mount[1]), "memory.max"
    raise SystemExit("this machine has no cgroup that limits memory")


def forget(model: ModelFile) -> None:
    """Have the kernel drop the model's files from the page cache."""
    for shard in model.shards:
        fd = os.open(shard.path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# ---- who is measured ----


def ours(given: argparse.Namespace, limit: int | None) -> tuple[Run, list[int], dict[str, Any]]:
    """A daemon within `limit` bytes; also all tokens, those of the prompt first, and its status at the end."""
    prompt = [random.Random(1).randrange(10, 4000) for _ in range(PROMPT)]
    flags = ["--limits-context", str(CONTEXT), "--limits-sequences", "1", "--cpu-threads", str(given.threads)]
    with cgroup(limit) as around, serving(given.model, *flags, around=around) as (client, _):
        tokens: list[int] = []
        times: list[float] = []
        before: list[tuple[int, int, int]] = []
        asking = threading.Thread(target=lambda: before.append(_traffic(client)))
        count = given.warm + given.tokens
        ask = {"tokens": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 1.0, "seed": 1}
        with client.generate(**ask) as stream:
            for event in stream.events(600):
                if isinstance(event, messages.Chunk):
                    tokens += event.tokens
                    times += [time.perf_counter()] * len(event.tokens)
                if asking.ident is None and len(tokens) >= given.warm:
                    asking.start()
        asking.join()
        after = _traffic(client)
        status = client.status()
    read, uses, misses = (b - a for a, b in zip(before[0], after, strict=True))
    seconds = [b - a for a, b in pairwise(times[given.warm - 1 :])]
    return Run(seconds, read, uses, misses), [*prompt, *tokens], status


def _traffic(client: Client) -> tuple[int, int, int]:
    residency = client.status()["residency"]
    decode = residency["uses"]["decode"]
    return residency["read_bytes"], decode["uses"], decode["misses"]


def theirs(given: argparse.Namespace, limit: int | None, tokens: Sequence[int]) -> Run:
    with cgroup(limit) as around, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(list(tokens), file)
        file.flush()
        command = [*around, given.peer, str(PEER), str(given.model), file.name, str(CONTEXT), str(given.threads)]
        done = subprocess.run(
            [*command, str(PROMPT), str(given.warm), str(given.peer_s)], stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode != 0:
        return Run([], 0, note=f"ended with status {done.returncode}")
    answer = json.loads(done.stdout)
    return Run(answer["seconds"], answer["read"])


# ---- what could be reached ----


def disk_speed(model: ModelFile, program: Program, layout: ArenaLayout) -> float:
    """Bytes per second of reading random records as the store does: its threads, straight into huge pages."""
    chance = random.Random(2)
    files = [ShardFile(shard) for shard in model.shards]
    size = 0
    with Region.create(_PLACES * _PLACE) as memory:
        memory.allocate()
        for page in range(memory.size // HUGE_PAGE):
            with suppress(OSError):
                memory.mapping.make_huge(page)
        readers = Readers(EXPRESS, {file.direct: astuple(file.identity) for file in files})
        start = time.perf_counter()
        for job in range(_READS):
            layer = chance.randrange(len(layout.layers))
            records = layout.layers[layer]
            pieces = []
            at = job % _PLACES * _PLACE
            for extent in record_extents(
                program.expert_layers[layer], records, model, chance.randrange(records.experts)
            ):
                at += PAGE + -at % PAGE + extent.source % PAGE
                straight = files[extent.shard].straight(extent.source, extent.size, at)
                if straight is None:
                    raise SystemExit(f"{model.where}: takes no direct reads")
                fd, first, needed, asked = straight
                pieces.append((fd, first, needed, asked, memory.address + at - (extent.source - first)))
                at += extent.size
                size += extent.size
            readers.begin(job, pieces)
        ended = 0
        while ended < _READS:
            ended += len(readers.ended())
        elapsed = time.perf_counter() - start
        readers.close()
    for file in files:
        file.close()
    return size / elapsed


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds per token that cannot be beaten."""

    layers: float
    whole: float


def bounds(whole_s: float, layout: ArenaLayout, program: Program, missed: float, disk: float) -> Bounds:
    """`whole_s`: seconds of a token with everything in memory; `missed` experts per token; bytes per second of disk."""
    depth = len(layout.layers)
    sizes = [layout.slabs[records.slab].record_bytes for records in layout.layers]
    used = [layer.top_k * size for layer, size in zip(program.expert_layers, sizes, strict=True)]
    experts_s = whole_s * sum(used) / (sum(used) + layout.core_bytes)
    total = whole_s - experts_s
    for layer, size, mine in zip(program.expert_layers, sizes, used, strict=True):
        one = experts_s * mine / sum(used) / layer.top_k
        absent = missed / depth
        total += max((layer.top_k - absent) * one, absent * size / disk) + min(absent, 1.0) * one
    return Bounds(total, max(whole_s, missed * sum(sizes) / depth / disk))


# ---- the report ----


def line(who: str, run: Run) -> str:
    if not run.seconds:
        return f"  {who:10} {run.note}"
    p50, p99 = run.quantile(0.5), run.quantile(0.99)
    return (
        f"  {who:10} {run.per_second:7.2f} tok/s   p50 {p50 * 1e3:7.1f} ms   p99 {p99 * 1e3:7.1f} ms "
        f"({p99 / p50:.1f} x)   {run.read / len(run.seconds) / 1e6:8.2f} MB read/token   ({len(run.seconds)} tokens)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", help="interpreter that has llama-cpp-python")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.6, 0.4])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--warm", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--peer-s", type=float, default=120.0)
    given = parser.parse_args()
    given.model = given.model.absolute()
    model = ModelFile.open(given.model)
    program = build_program(model)
    layout = ArenaLayout.of(program, model)
    size = sum(shard.identity.size for shard in model.shards)
    print(f"{given.model.name}: {size / GIB:.2f} GiB, {given.threads} threads, load {os.getloadavg()[0]:.1f}")
    free, tokens, _ = ours(given, None)
    print("without limit")
    print(line("sparkd", free), flush=True)
    if given.peer:
        print(line("llama.cpp", theirs(given, None, tokens)), flush=True)
    limited: list[tuple[float, Run, float]] = []
    for share in given.shares:
        limit = int(size * share)
        forget(model)
        disk = disk_speed(model, program, layout)
        run, again, status = ours(given, limit)
        forget(model)
        disk = statistics.mean([disk, disk_speed(model, program, layout)])
        if again != tokens:
            sys.exit("the tokens differ from those without limit")
        report(share, limit, run, status, disk)
        limited.append((share, run, disk))
        if given.peer:
            forget(model)
            peer = theirs(given, limit, tokens)
            print(line("llama.cpp", peer))
            if peer.seconds:
                print(f"    sparkd is {run.per_second / peer.per_second:.1f} times as fast", flush=True)
    again_free, _, _ = ours(given, None)
    print(f"without limit once more\n{line('sparkd', again_free)}")
    whole_s = min(free.quantile(0.5), again_free.quantile(0.5))
    for share, run, disk in limited:
        best = bounds(whole_s, layout, program, run.misses / len(run.seconds), disk)
        reached = run.quantile(0.5)
        print(
            f"{share:.0%}: layer bound {best.layers * 1e3:.1f} ms, {best.layers / reached:.0%} of it reached; "
            f"whole token {best.whole * 1e3:.1f} ms, {best.whole / reached:.0%}"
        )


def report(share: float, limit: int, run: Run, status: dict[str, Any], disk: float) -> None:
    residency = status["residency"]
    print(f"within {share:.0%} ({limit / GIB:.2f} GiB)")
    print(line("sparkd", run))
    record = statistics.mean(slab["record_bytes"] for slab in residency["slabs"])
    missing = run.misses * record
    print(
        f"    room for {residency['slots']} of {residency['records']} experts; {run.misses / run.uses:.1%} of the uses "
        f"missed, {run.misses / len(run.seconds):.2f} a token; read {run.read / missing if missing else 0:.2f} times "
        f"the lower bound; disk {disk / 1e9:.2f} GB/s"
    )


if __name__ == "__main__":
    main()
