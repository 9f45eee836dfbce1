"""What computes the steps of a worker and holds what they need: the CPU here, a card in `device_backend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sparkd.config import Settings
from sparkd.executors.base import Executor
from sparkd.executors.foresight import Foresight
from sparkd.executors.native import NativeExecutor, StateMemory, product_paths
from sparkd.gguf.formats import Format
from sparkd.graph.state import StateLayout
from sparkd.ipc.internal import Placement, Tier
from sparkd.ipc.messages import Json
from sparkd.ipc.sockets import Channel
from sparkd.kernels import available
from sparkd.log import details
from sparkd.store.arena import Arena
from sparkd.store.planned import STEP_ROWS
from sparkd.worker.engine import Routing
from sparkd.worker.stager import StoreStager
from sparkd.worker.state import PoolSize
from sparkd.worker.threads import count_threads


class Backend(Protocol):
    """An executor, and whoever brings the records of experts to it.

    Its steps have at most `rows` rows, and its sequences state of `size`. A chunk of a prompt that has less than
    `least_rows` rows takes no less time.
    """

    executor: Executor
    rows: int
    size: PoolSize
    least_rows: int

    def used(self, routing: Routing) -> None:
        """A step has ended, whose rows went to these experts."""
        ...

    def advance(self) -> bool:
        """Go on with what goes on beside steps; true: call again soon, whether there are steps or not."""
        ...

    def place(self, placement: Placement) -> None:
        """Take advice of the calibrator, or say in log and status why not."""
        ...

    def tiers(self) -> list[Tier]:
        """Tiers of this worker that the calibrator has to be told of, since they are new or not what they were."""
        ...

    def line(self) -> str:
        """Which kernels compute, for the log."""
        ...

    def status(self) -> dict[str, Json]:
        """The parts `executor` and `device` of the status document."""
        ...

    def close(self) -> None:
        """End what runs beside the steps."""
        ...


class NativeBackend:
    """The CPU. Where records come and go in host memory, the store brings them."""

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        layout: StateLayout,
        size_for: Callable[[int], PoolSize],
        store: Channel,
        worker: int,
        went_on: Callable[[], None],
    ) -> None:
        """`store` leads to the store, which knows this worker; `went_on` is called when it has brought something.

        `size_for`: the state that sequences need where steps have at most so many rows.
        """
        self.rows, self.least_rows = STEP_ROWS, 1
        self.size = size_for(STEP_ROWS)
        self._kv_type = settings.kv.type
        self._threads = count_threads(settings.cpu.threads)
        self._isa = available()[0] if settings.cpu.isa == "auto" else settings.cpu.isa
        self._formats = computed_with(arena)
        self._stager = StoreStager(arena, store, worker, went_on) if arena.layout.partial else None
        self._foresight = Foresight(arena.program, arena) if arena.layout.partial else None
        memory = StateMemory.allocate(layout, self.size.pages, self.size.records)
        self.executor: Executor = NativeExecutor(
            arena.program,
            arena,
            layout,
            memory,
            max_rows=self.rows,
            threads=self._threads,
            isa=self._isa,
            stager=self._stager,
            foresight=self._foresight,
        )

    def used(self, routing: Routing) -> None:
        """Where records come and go, the store is told."""
        if self._stager is not None:
            self._stager.used(routing.step, routing.decode, routing.ids)

    def advance(self) -> bool:
        """Nothing goes on beside steps."""
        return False

    def place(self, placement: Placement) -> None:
        """RuntimeError: the CPU reads the store's tier and has none of its own."""
        raise RuntimeError(f"a placement for tier {placement.tier!r} came to a worker without one")

    def tiers(self) -> list[Tier]:
        """None: the store tells of its own."""
        return []

    def line(self) -> str:
        """The instruction set, the threads, and the kernels of each type."""
        return details(isa=self._isa, threads=self._threads, **product_paths(self._formats, self._isa))

    def status(self) -> dict[str, Json]:
        """The executor."""
        executor: dict[str, Json] = {
            "kind": "native",
            "isa": self._isa,
            "threads": self._threads,
            "max_rows": self.rows,
            "kv_type": self._kv_type,
            "types": product_paths(self._formats, self._isa),
        }
        if self._foresight is not None:
            executor["read_ahead"] = self._foresight.status()
        return {"executor": executor}

    def close(self) -> None:
        """Nothing runs beside the steps."""


def computed_with(arena: Arena) -> list[Format]:
    """The types of all tensors that are computed with, by id."""
    model = arena.model
    used = [model.tensors[name].format for name in arena.layout.core]
    used += [piece.format for records in arena.layout.layers for piece in records.pieces]
    return sorted(set(used), key=lambda f: f.id)
