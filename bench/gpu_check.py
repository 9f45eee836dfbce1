"""Whether a GPU gives the bits of the CPU, and how fast it is: one command wherever a card appears.

    python bench/gpu_check.py [MODEL.gguf ...] [--vram 4 8 16] [--tokens 256] [--out FOLDER] [--device cuda]

Needs this checkout with its test dependencies, CuPy, and a driver; no network. In order:

    same bits     the tests of every kernel and of whole models (tests/emulator), run on the card
    sanitizers    a few of these tests under compute-sanitizer's memcheck and racecheck, where that is installed
    the link      registering host memory where it lies; copies to the card by size, alone and beside a replay
    residency     each model, the built-in one by default, with 100, 60, 40 and 25 % of its experts in slots, beside
                  rings of 0 to 48 slots a layer: the tokens must be those of the CPU; misses, tokens per second
    misses        each model with 10 to 60 % of its experts in slots, and what is missed read in place, copied first,
                  or computed by the CPU: tokens as above; bytes of missed experts per second; what `auto` measures
    decode        the whole daemon with each model at each limit of `memory.vram_gib`: the tokens must be those of the
                  CPU; tokens per second at the residency that came of it
    prompts       the same with prompts of 512 to 32,768 tokens: tokens per second, bytes of experts over the link and
                  the rate of those; the next token must be the CPU's, where the prompt is short enough for it

Each part goes on where another failed. Writes gpu_check.md and gpu_check.json into FOLDER (the present one), prints the
tables, and ends with 1 if anything differed or failed. `--device host` runs all but sanitizers and daemons on the host
instead: it shows that this script works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import gpu_residency
import numpy as np
from serving import serving

from spark_client import messages
from sparkd.config import ModelSettings, Settings
from sparkd.demo.main import MODEL
from sparkd.errors import BudgetError, DeviceError
from sparkd.executors.cuda_device import CudaDevice
from sparkd.executors.device import Device, Stream
from sparkd.executors.gpu import gpu_missing
from sparkd.ipc.memory import Region
from sparkd.planning.shape import Shape
from sparkd.residency.misses import Misses

ROOT = Path(__file__).parents[1]
TESTS = [f"tests/emulator/test_cuda_{name}.py" for name in ("kernels", "prefill", "models")]
#: What runs under compute-sanitizer, which is slow: every kind of kernel once.
_FEW = "Q4_K or Q8_0 or routing or attention or recurrent or rms_norm or best_token"
_TOOLS = ("memcheck", "racecheck")
MIB = 1 << 20
sys.path.insert(0, str(ROOT / "tests" / "emulator"))
#: Lengths of prompts, as far as the model's context goes; the CPU reads those up to the last figure too.
PROMPTS, ON_CPU = (512, 2048, 8192, 32768), 2048
_PROMPT = "Once upon a time there was a little fox who"


@dataclass
class Table:
    """One table of the report."""

    title: str
    heads: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """As it is printed."""
        lines = [f"## {self.title}", "", "| " + " | ".join(self.heads) + " |", "|" + " --- |" * len(self.heads)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""])


class Failed(Exception):
    """Something was not as it has to be."""


def same_bits(device: str) -> Table:
    """The tests of kernels and models. Failed with the end of what pytest said."""
    table = Table("Same bits", ["tests", "outcome", "seconds"])
    for tests in TESTS:
        began = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-m", "not soak", tests]
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"SPARKD_TEST_DEVICE": device}, capture_output=True, text=True
        )
        said = (run.stdout + run.stderr).strip().splitlines() or ["pytest said nothing"]
        table.rows.append([tests, said[-1], f"{time.perf_counter() - began:.0f}"])
        if run.returncode:
            raise Failed("\n".join([table.markdown(), *said[-40:]]))
    return table


def sanitizers(tool_path: str | None) -> Table:
    """Tests of kernels under compute-sanitizer. Failed with the end of what it said."""
    table = Table("Sanitizers", ["tool", "outcome", "seconds"])
    if tool_path is None:
        table.rows.append(["compute-sanitizer", "is not installed", ""])
        return table
    for tool in _TOOLS:
        began = time.perf_counter()
        command = [tool_path, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", "-x"]
        command += ["--no-header", "-m", "not soak", "-p", "no:cacheprovider", "-o", "timeout=0", "-k", _FEW, TESTS[0]]
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"SPARKD_TEST_DEVICE": "cuda"}, capture_output=True, text=True
        )
        said = (run.stdout + run.stderr).strip().splitlines() or ["nothing was said"]
        table.rows.append([tool, said[-1], f"{time.perf_counter() - began:.0f}"])
        if run.returncode:
            raise Failed("\n".join([table.markdown(), *said[-40:]]))
    return table


def residencies(device: Device, models: list[Path], tokens: int) -> Table:
    """Each model at each residency. Failed where tokens are not those of the CPU."""
    heads = ["model", "hot", "ring", "slots", "missed", "tokens/s", "of the CPU's", "tokens"]
    table = Table("Residency", heads)
    for path in models:
        with gpu_residency.opened(path, device, tokens) as (model, expected):
            table.rows.append([path.name, "CPU", "", "", "", f"{expected.speed:.1f}", "1.00", ""])
            warmed = False
            for share in gpu_residency.SHARES:
                for ring in gpu_residency.RINGS if share < 1 else [0]:
                    row = [path.name, f"{share:.0%}", str(ring)]
                    try:
                        if not warmed:  # graphs are captured by the first steps
                            model.at(expected, share, ring)
                            warmed = True
                        found = model.at(expected, share, ring)
                    except (BudgetError, DeviceError) as error:
                        table.rows.append([*row, "", "", "", "", f"does not fit: {error}"])
                        continue
                    told = [str(found.slots), f"{found.missed:.2%}", f"{found.speed:.1f}"]
                    verdict = "equal" if found.equal else "DIFFERENT"
                    table.rows.append([*row, *told, f"{found.speed / expected.speed:.2f}", verdict])
    if any(row[-1] == "DIFFERENT" for row in table.rows):
        raise Failed(table.markdown() + "\nother tokens than the CPU's")
    return table


def misses(device: Device, models: list[Path], tokens: int) -> Table:
    """Each model at low residencies, and all that may become of what is missed. Failed where tokens differ."""
    heads = ["model", "hot", "missed experts", "missed", "missed GB/s", "tokens/s", "of the CPU's", "tokens"]
    table = Table("Misses", heads)
    for path in models:
        with gpu_residency.opened(path, device, tokens) as (model, expected):
            table.rows.append([path.name, "CPU", "", "", "", f"{expected.speed:.1f}", "1.00", ""])
            table.rows.append([path.name, "", "auto", "", "", "", "", model.policy().why()])
            for share in gpu_residency.LOW_SHARES:
                for ways in Misses:
                    model.at(expected, share, 0, ways)  # graphs are captured by the first steps
                    found = model.at(expected, share, 0, ways)
                    told = [f"{found.missed:.2%}", f"{found.missed_bytes_s / 1e9:.2f}", f"{found.speed:.1f}"]
                    verdict = "equal" if found.equal else "DIFFERENT"
                    speed = f"{found.speed / expected.speed:.2f}"
                    table.rows.append([path.name, f"{share:.0%}", ways.value, *told, speed, verdict])
    if any(row[-1] == "DIFFERENT" for row in table.rows):
        raise Failed(table.markdown() + "\nother tokens than the CPU's")
    return table


def seconds(stream: Stream, work: Callable[[], None], times: int = 5) -> float:
    """The least of some runs that are waited for."""
    found = []
    for _ in range(times):
        stream.synchronize()
        began = time.perf_counter()
        work()
        stream.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def link(device: Device, most: int) -> Table:
    """Registration and copies of up to `most` bytes of a region as the store makes it."""
    table = Table("The link", ["what", "bytes", "seconds", "GB/s"])

    def row(what: str, size: int, took: float) -> None:
        table.rows.append([what, str(size), f"{took:.6f}", f"{size / took / 1e9:.2f}"])

    region = Region.create(most)
    try:
        np.frombuffer(region.mapping.bytes, np.uint8)[:] = 1  # pages that were never touched take longer
        began = time.perf_counter()
        there = device.register(region.address, most)
        row("register host memory", most, time.perf_counter() - began)
        stream = device.stream()
        target, other = device.allocate(most), device.allocate(most)
        size = most
        while size >= 64 << 10:
            row("host to card", size, seconds(stream, lambda size=size: device.copy(stream, target, there, size)))
            size //= 8
        row("within the card", most, seconds(stream, lambda: device.copy(stream, other, target, most)))
        graph = device.capture(lambda captured: device.zero(captured, other, most))
        row("a replayed graph that clears", most, seconds(stream, lambda: graph.replay(stream)))
        beside = device.stream()

        def both() -> None:
            device.copy(beside, target, there, most)
            graph.replay(stream)
            beside.synchronize()

        row("host to card, beside that graph", most, seconds(stream, both))
        found = np.zeros(most, np.uint8)
        device.download(stream, target, found)
        stream.synchronize()
        if not (found == 1).all():
            raise Failed(f"{np.count_nonzero(found != 1)} of {most} copied bytes came out wrong")
        device.free(target)
        device.free(other)
    finally:
        region.close()
    return table


def decode(models: list[Path], limits: list[float], tokens: int) -> Table:
    """Whole daemons. Failed where a card gives other tokens than the CPU."""
    table = Table("Decode", ["model", "memory.vram_gib", "experts in slots", "tokens/s", "of the CPU's", "tokens"])
    different = []
    for model in models:
        expected, alone = stream(model, tokens, "--worker-device", "cpu")[:2]
        table.rows.append([model.name, "CPU", "", f"{alone:.1f}", "1.00", ""])
        for limit in limits:
            flags = ("--worker-device", "cuda", "--memory-vram-gib", str(limit))
            found, speed, resident = stream(model, tokens, *flags)
            same = found == expected
            verdict = "equal" if same else "DIFFERENT"
            row = [model.name, f"{limit:g}", resident, f"{speed:.1f}", f"{speed / alone:.2f}", verdict]
            table.rows.append(row)
            if not same:
                different.append(f"{model.name} at {limit:g} GiB")
    if different:
        raise Failed(table.markdown() + f"\nother tokens than the CPU's: {', '.join(different)}")
    return table


def stream(model: Path, tokens: int, *flags: str) -> tuple[list[int], float, str]:
    """Greedy tokens of a daemon's second answer (the first one warms it), tokens per second, experts in slots."""
    with serving(model, *flags) as (client, _):
        for _ in range(2):
            said, speed = [], 0.0
            with client.generate(_PROMPT, max_tokens=tokens, ignore_eos=True) as answer:
                for event in answer.events(600):
                    if isinstance(event, messages.Chunk):
                        said += list(event.tokens)
                    if isinstance(event, messages.Finished):
                        speed = (event.output_tokens - 1) / event.timings.decode_s
        device = client.status().get("device") or {}
        resident = f"{device['resident']} of {device['records']}" if device else ""
        return said, speed, resident


def prompts(models: list[Path], limits: list[float]) -> Table:
    """Whole daemons that read long prompts. Failed where the token after one is not the CPU's."""
    heads = ["model", "memory.vram_gib", "tokens", "tokens/s", "GB streamed", "GB/s", "next token"]
    table = Table("Prompts", heads)
    different = []
    for model in models:
        context = Shape.open(Settings(model=ModelSettings(str(model)))).program.context
        lengths = [length for length in PROMPTS if length < context]
        flags = ("--limits-context", str(min(context, PROMPTS[-1] + 64)), "--limits-sequences", "1")
        expected = {
            length: token
            for length, token, *_ in read([n for n in lengths if n <= ON_CPU], model, *flags, "--worker-device", "cpu")
        }
        for limit in limits:
            card = (*flags, "--worker-device", "cuda", "--memory-vram-gib", str(limit))
            for length, token, took, streamed in read(lengths, model, *card):
                wanted = expected.get(length)
                verdict = "" if wanted is None else "equal" if token == wanted else "DIFFERENT"
                speeds = [f"{length / took:.0f}", f"{streamed / 1e9:.2f}", f"{streamed / took / 1e9:.2f}"]
                table.rows.append([model.name, f"{limit:g}", str(length), *speeds, verdict])
                if verdict == "DIFFERENT":
                    different.append(f"{model.name} at {limit:g} GiB after {length} tokens")
    if different:
        raise Failed(table.markdown() + f"\nanother token than the CPU's: {', '.join(different)}")
    return table


def read(lengths: list[int], model: Path, *flags: str) -> Iterator[tuple[int, int, float, int]]:
    """Of each prompt its length, the token after it, the seconds of reading it, and bytes that were streamed for it."""
    with serving(model, *flags) as (client, _):
        # Steps grow to their size first.
        for number, length in enumerate([*lengths[-1:], *lengths]):
            before = (client.status().get("device") or {}).get("streamed_bytes", 0)
            took, said = 0.0, []
            ids = [100 + (7919 * (number * PROMPTS[-1] + i)) % 200 for i in range(length)]
            with client.generate(tokens=ids, max_tokens=1, ignore_eos=True) as answer:
                for event in answer.events(3600):
                    if isinstance(event, messages.Chunk):
                        said += list(event.tokens)
                    if isinstance(event, messages.Finished):
                        took = event.timings.prefill_s
            if number:
                after = (client.status().get("device") or {}).get("streamed_bytes", 0)
                yield length, said[0], took, after - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", default=[MODEL])
    parser.add_argument("--vram", type=float, nargs="+", default=[0.0], help="limits in GiB; 0: the whole card (0)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer (256)")
    parser.add_argument("--most-mib", type=int, default=1024, help="the largest copy, MiB (1024)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the report (the present one)")
    parser.add_argument("--device", choices=["cuda", "host"], default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and (missing := gpu_missing()):
        print(f"gpu_check: nothing was checked: {missing}", file=sys.stderr)
        return 1
    parts: dict[str, Callable[[], Table]] = {
        "same bits": lambda: same_bits(given.device),
        "the link": lambda: link(open_device(given.device), given.most_mib * MIB),
        "residency": lambda: residencies(open_device(given.device), given.models, given.tokens),
        "misses": lambda: misses(open_device(given.device), given.models, given.tokens),
    }
    if given.device == "cuda":
        parts["sanitizers"] = lambda: sanitizers(shutil.which("compute-sanitizer"))
        parts["decode"] = lambda: decode(given.models, given.vram, given.tokens)
        parts["prompts"] = lambda: prompts(given.models, given.vram)
    tables: list[Table] = []
    failures: dict[str, str] = {}
    for name, part in parts.items():
        try:
            tables.append(part())
            print(tables[-1].markdown(), flush=True)
        except Exception as error:  # the other parts may tell why
            failures[name] = str(error) if isinstance(error, Failed) else traceback.format_exc()
            print(f"{name} FAILED\n{failures[name]}\n", flush=True)
    report = [table.markdown() for table in tables] + [f"## {n} FAILED\n\n```\n{e}\n```\n" for n, e in failures.items()]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu_check.md").write_text("\n".join(report))
    said = {"device": given.device, "tables": [asdict(table) for table in tables], "failures": failures}
    (given.out / "gpu_check.json").write_text(json.dumps(said, indent=1))
    return 1 if failures else 0


def open_device(name: str) -> Device:
    """The card, or what the tests have instead of one."""
    if name == "cuda":
        return CudaDevice()
    from host_device import HostDevice

    return HostDevice(size=4 << 30)


if __name__ == "__main__":
    raise SystemExit(main())
