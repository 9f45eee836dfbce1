"""A front door with a clock, and what came out of it; for its tests."""

from __future__ import annotations

from typing import Any

from sparkd.config import LimitSettings
from sparkd.ipc import internal
from sparkd.ipc import messages as m
from sparkd.supervisor.admission import Served
from sparkd.supervisor.front_door import FrontDoor
from sparkd.supervisor.journal import Standing
from sparkd.worker.limits import Room

LIMITS = LimitSettings(context=100, sequences=2, queue=3, timeout_s=1000.0)
SERVED = Served("tiny", Room(100), 50)
NO_TIME = m.Timings(0.0, 0.0, 0.0)


class House:
    """A front door, a clock, and what came out of it."""

    def __init__(self, limits: LimitSettings = LIMITS, ready: bool = True) -> None:
        self.door = FrontDoor(limits, SERVED, pid=7)
        self.now = 0.0
        if ready:
            self.door.worker_ready(self.now)

    def hello(self, peer: bytes) -> None:
        self.door.receive(peer, m.Hello([m.VERSION], "test"), self.now)
        assert isinstance(self.heard(peer)[-1], m.Welcome)

    def ask(self, peer: bytes, **fields: Any) -> m.Accepted | m.Failed:
        given = {"tag": 1, "tokens": [1, 2, 3], "max_tokens": 10} | fields
        self.door.receive(peer, m.Generate(**given), self.now)
        answer = self.heard(peer)[-1]
        assert isinstance(answer, m.Accepted | m.Failed)
        return answer

    def accepted(self, peer: bytes, **fields: Any) -> int:
        answer = self.ask(peer, **fields)
        assert isinstance(answer, m.Accepted), answer
        return answer.request

    def heard(self, peer: bytes) -> list[Any]:
        """Take what is to be sent to one app."""
        mine = [msg for to, msg in self.door.to_clients if to == peer]
        rest = [(to, msg) for to, msg in self.door.to_clients if to != peer]
        self.door.to_clients.clear()
        self.door.to_clients.extend(rest)
        return mine

    def orders(self) -> list[Any]:
        """Take what is to be sent to the worker."""
        taken = list(self.door.to_worker)
        self.door.to_worker.clear()
        return taken

    def standings(self) -> list[Standing]:
        """Of the requests at the worker."""
        return [request.entry.standing for request in self.door._at_worker()]

    def worker(self, *msgs: m.Message) -> None:
        for msg in msgs:
            self.door.from_worker(msg, self.now)

    def produce(self, request: int, start: int, count: int) -> None:
        self.worker(*(internal.Produced(request, start + i, 10 + start + i, f"t{start + i} ") for i in range(count)))

    def done(self, request: int, tokens: int = 0, text: str = "") -> None:
        self.worker(internal.Done(request, "length", None, text, 3, tokens, 42, NO_TIME))

    @staticmethod
    def of_two() -> House:
        """A house with the apps a and b."""
        made = House()
        made.hello(b"a")
        made.hello(b"b")
        return made
