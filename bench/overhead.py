"""What supervisor, protocol and client add to each token of one stream.

    python bench/overhead.py [MODEL.gguf] [--tokens N] [--rounds N] [--threads N]

The same tokens are made twice in turn: by the worker's engine alone, in this process, where the time of a token is that
of one step (compute, sample, detokenize); and by a daemon, where it is the time between two chunks at the client. The
difference of the two is the overhead. What a step of the engine takes outside of the native plan is Python's share. A
ping is timed as well: its way from an app to the supervisor and back is that of a token from the supervisor to the app,
twice. Prints a table in milliseconds. MODEL: the built-in one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from serving import serving

from spark_client import Client, messages
from sparkd.config import Settings
from sparkd.demo.main import MODEL
from sparkd.executors.native import NativeExecutor, StateMemory
from sparkd.gguf.model_file import ModelFile
from sparkd.graph.state import StateLayout
from sparkd.ipc import internal
from sparkd.ipc.memory import Region
from sparkd.kernels import available
from sparkd.models import build_program
from sparkd.store.arena import Arena
from sparkd.store.copier import Copier
from sparkd.store.layout import ArenaLayout
from sparkd.store.loader import Loader
from sparkd.store.planned import STEP_ROWS
from sparkd.store.residents import Residents
from sparkd.supervisor.journal import Entry
from sparkd.worker.desk import Texts
from sparkd.worker.engine import Engine
from sparkd.worker.limits import Room
from sparkd.worker.scheduler import Scheduler
from sparkd.worker.sequences import Sequence
from sparkd.worker.state import PoolSize, StatePool
from sparkd.worker.threads import count_threads

_CONTEXT = 2048
_PROMPT = "Once upon a time"


class TimedPlan:
    """A native plan whose steps are timed."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.seconds: list[float] = []

    def step(self, *arguments: object) -> object:
        began = time.perf_counter()
        pause = self._plan.step(*arguments)
        self.seconds.append(time.perf_counter() - began)
        return pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


class Alone:
    """The worker's engine without a daemon around it, built as the worker builds it."""

    def __init__(self, path: Path, region: Region, threads: int) -> None:
        model = ModelFile.open(path)
        program = build_program(model)
        arena = Arena.create(region, model, program, ArenaLayout.of(program, model))
        copier = Copier(arena)
        Loader(Residents(arena, copier), copier).load()
        state = StateLayout.of(program, 2)
        size = PoolSize.worst_case(state, 1, _CONTEXT, STEP_ROWS)
        memory = StateMemory.allocate(state, size.pages, size.records)
        executor = NativeExecutor(
            program, arena, state, memory, max_rows=STEP_ROWS, threads=threads, isa=available()[0]
        )
        self.plan = executor._plan = TimedPlan(executor._plan)
        self._texts = Texts(model.metadata, Room(_CONTEXT), program.vocab)
        scheduler = Scheduler(STEP_ROWS, Settings().scheduler.max_step_ms / 1000)
        ends = self._texts.tokenizer.end_of_generation_ids
        self._engine = Engine(executor, StatePool(state, size, STEP_ROWS), scheduler, ends, 1, vocab=self._texts.vocab)

    def stream(self, tokens: int) -> list[float]:
        """Seconds from each token to the next."""
        ask = messages.Generate(1, prompt=_PROMPT, max_tokens=tokens, ignore_eos=True)
        sequence = self._texts.work(Entry(ask).run(1))
        assert isinstance(sequence, Sequence)
        self._engine.submit(sequence)
        times = []
        while self._engine.busy:
            if any(isinstance(event, internal.Produced) for event in self._engine.step()):
                times.append(time.perf_counter())
        return np.diff(times).tolist()


def through_the_daemon(client: Client, tokens: int) -> list[float]:
    """Seconds from each token to the next, at the client; tokens that come together share the time."""
    times = []
    with client.generate(_PROMPT, max_tokens=tokens, ignore_eos=True) as stream:
        before = 0.0
        for event in stream.events(60):
            now = time.perf_counter()
            if isinstance(event, messages.Chunk) and event.tokens:
                times += [(now - before) / len(event.tokens)] * len(event.tokens) if before else []
                before = now
    return times


def pings(path: Path, count: int) -> list[float]:
    """Seconds that an idle supervisor takes to answer."""
    times = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as app:
        app.connect(f"ipc://{path}")
        app.send(messages.encode(messages.Hello([messages.VERSION], "overhead")))
        app.recv()
        for number in range(count):
            began = time.perf_counter()
            app.send(messages.encode(messages.Ping(number)))
            messages.decode(app.recv())
            times.append(time.perf_counter() - began)
        app.send(messages.encode(messages.Bye()))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of one stream (400)")
    parser.add_argument("--rounds", type=int, default=5, help="streams of each kind (5)")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute (0: as the daemon chooses)")
    given = parser.parse_args()
    threads = count_threads(given.threads)
    flags = ("--cpu-threads", str(threads), "--limits-context", str(_CONTEXT))
    alone: list[float] = []
    daemon: list[float] = []
    size = ArenaLayout.of(build_program(model := ModelFile.open(given.model)), model).total_bytes
    with Region.create(size) as region, serving(given.model, *flags) as (client, _):
        engine = Alone(given.model, region, threads)
        native: list[float] = []
        for number in range(given.rounds + 1):
            engine.plan.seconds.clear()
            rounds = engine.stream(given.tokens), through_the_daemon(client, given.tokens)
            if number:
                alone += rounds[0]
                native += engine.plan.seconds[-len(rounds[0]) :]
                daemon += rounds[1]
        pinged = pings(client.path, 2000)
    print(f"{given.model.name}, {threads} threads, {len(daemon)} tokens each way, milliseconds\n")
    print("| | p50 | p99 | mean |\n| --- | --- | --- | --- |")
    rows = {
        "a step of the engine alone": alone,
        "of it in native code": native,
        "token to token at the client": daemon,
    }
    for name, times in rows.items():
        print(_row(name, _figures(times)))
    print(_row("added", _figures(daemon) - _figures(alone)))
    print(_row("a ping there and back", _figures(pinged)))
    print(f"\nPython's share of a step: {1 - sum(native) / sum(alone):.2%}")


def _figures(seconds: list[float]) -> np.ndarray:
    return 1e3 * np.array([*np.percentile(seconds, [50, 99]), np.mean(seconds)])


def _row(name: str, figures: np.ndarray) -> str:
    return f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |"


if __name__ == "__main__":
    main()
