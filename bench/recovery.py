"""How long a request waits when its worker is killed.

    python bench/recovery.py MODEL.gguf [--prompt N] [--kills N]

Serves the model, starts a request, kills the worker with SIGKILL while it decodes, and takes the times, from the kill
on, at which: a new worker is ready, upon which it gets the request; its first step has ended (the app is told so; a
step begins when the worker has the request, so that it begins between this time and the one before); the next token is
there. Between the first and the last of these the prompt and what had been said are read again: that is the model's
speed, not the daemon's, and a column of its own. So is the processor time the new worker took until it was ready: that
is the same on a busy machine. Every answer must have the tokens of an undisturbed one. Prints a table: one row for each
kill, then the worst of each column.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from serving import Log, serving

from spark_client import Client, messages

_SPOKEN = 24
_AFTER = 8
_READY = r"worker is ready \(process (\d+)\)"


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds since the kill, and of processor time."""

    ready: float
    first_step: float
    next_token: float
    again: float
    processor: float

    def row(self) -> str:
        """A line of the table."""
        return " | ".join(f"{seconds:.2f}" for seconds in astuple(self))


class Starts:
    """The processor time each worker had taken when it was ready."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def heard(self, line: str) -> None:
        """Look when the log says that a worker is ready."""
        if found := re.search(_READY, line):
            ticks = Path(f"/proc/{found[1]}/stat").read_text().rpartition(")")[2].split()[11:13]
            self.seconds.append(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("--kills", type=int, default=5, help="how often (5)")
    given = parser.parse_args()
    prompt = [100 + i * 7 % 900 for i in range(given.prompt)]
    starts, context = Starts(), max(1024, 2 * given.prompt)
    with serving(given.model, "--limits-context", str(context), heard=starts.heard) as (client, log):
        undisturbed = client.generate(tokens=prompt, max_tokens=_SPOKEN + _AFTER, ignore_eos=True)
        undisturbed.read()
        assert undisturbed.timings is not None
        reads = given.prompt / undisturbed.timings.prefill_s
        print(f"{given.model.name}: {given.prompt} tokens of prompt are read at {reads:.0f} tokens/s\n")
        print("| kill | new worker ready | first step ended | next token | of that, reading again | processor time |")
        print("| --- | --- | --- | --- | --- | --- |")
        recoveries = []
        for kill in range(1, given.kills + 1):
            recoveries.append(_kill(client, log, starts, prompt, undisturbed.tokens))
            print(f"| {kill} | {recoveries[-1].row()} |", flush=True)
        worst = Recovery(*(max(column) for column in zip(*map(astuple, recoveries), strict=True)))
        print(f"| worst | {worst.row()} |\n\nSeconds. The tokens were those of the undisturbed answer every time.")


def _kill(client: Client, log: Log, starts: Starts, prompt: list[int], undisturbed: list[int]) -> Recovery:
    with client.generate(tokens=prompt, max_tokens=len(undisturbed), ignore_eos=True) as stream:
        events = stream.events(300)
        while len(stream.tokens) < _SPOKEN:
            next(events)
        worker = next(p["pid"] for p in client.status()["processes"] if p["role"] == "worker")
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        first_step = next_token = 0.0
        for event in events:
            now = time.monotonic() - killed
            if isinstance(event, messages.Progress) and event.stage == "prefill":
                first_step = first_step or now
            elif isinstance(event, messages.Chunk) and first_step:
                next_token = next_token or now
        assert stream.tokens == undisturbed, "the answer has other tokens"
    ready = log.first(_READY, killed)
    assert ready is not None, "the log tells of no new worker"
    assert first_step and next_token, "the request was not resumed"
    ready -= killed
    return Recovery(ready, first_step, next_token, next_token - ready, starts.seconds[-1])


if __name__ == "__main__":
    main()
