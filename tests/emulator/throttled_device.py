"""A device whose link to the host has a speed: its time is simulated, and every copy ends as late as the link has it.

Time passes where somebody waits, or is told to (`sleep`); no clock is asked. Streams go on as a GPU's do: each in its
order, copies of one direction one at a time, the one first that has waited longest. What kernels read of host memory in
place takes no time here, and is not counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from host_device import HostDevice, HostEvent, HostStream
from numpy.typing import NDArray


class Crossed(NamedTuple):
    """Bytes that the link has moved, up to the device or down from it, and where they begin in host memory."""

    up: bool
    host: int
    size: int


@dataclass(frozen=True, eq=False)
class _Crossing:
    """A copy over the link, whose bytes are read and written when it ends."""

    what: Crossed
    move: Callable[[], None]

    def __call__(self) -> None:
        self.move()


@dataclass(frozen=True, eq=False)
class _Wait:
    event: HostEvent

    def __call__(self) -> None:
        assert self.event.reached


class ThrottledDevice(HostDevice):
    """`now`: simulated seconds. `crossed`: what the link has moved, in its order."""

    def __init__(self, bytes_s: float = math.inf, work_s: float = 0.0, **given: object) -> None:
        """The link moves `bytes_s` each way; what is neither a copy over it nor a wait takes `work_s` seconds."""
        super().__init__(**given)
        self.bytes_s, self.work_s = bytes_s, work_s
        self.now = 0.0
        self.crossed: list[Crossed] = []
        self._streams: list[_TimedStream] = []
        self._at = 0.0
        self._free_at = {True: 0.0, False: 0.0}

    def crossed_from(self, memory: range) -> list[Crossed]:
        """Of what went up, all that lay in some host memory."""
        return [one for one in self.crossed if one.up and one.host in memory]

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.catch_up()

    def catch_up(self) -> None:
        """Let everything end that ends by now."""
        while (moment := self._next()) is not None and moment[0] <= self.now:
            self._go_on(moment)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Let as much time pass as it takes."""
        while not holds():
            moment = self._next()
            assert moment is not None, "streams wait for each other"
            self._go_on(moment)
        self.now = max(self.now, self._at)

    def stream(self) -> _TimedStream:
        self._streams.append(_TimedStream(self))
        return self._streams[-1]

    def upload(self, stream: HostStream, address: int, data: NDArray[np.generic]) -> None:
        self._cross(stream, Crossed(True, data.ctypes.data, data.nbytes), super().upload, address, data)

    def download(self, stream: HostStream, address: int, out: NDArray[np.generic]) -> None:
        self._cross(stream, Crossed(False, out.ctypes.data, out.nbytes), super().download, address, out)

    def copy(self, stream: HostStream, target: int, source: int, size: int) -> None:
        if any(start <= source < start + memory.nbytes for start, memory in self._memory.items()):
            super().copy(stream, target, source, size)
        else:
            self._cross(stream, Crossed(True, source, size), super().copy, target, source, size)

    def _cross(self, stream: HostStream, what: Crossed, give: Callable[..., None], *arguments: object) -> None:
        """Give the stream what the device would have given it, as a copy over the link."""
        given: list[Callable[[], None]] = []
        give(_Collecting(given), *arguments)
        stream.push(_Crossing(what, given[0]))
        stream.poke()

    def _next(self) -> tuple[float, float, _TimedStream] | None:
        """When something begins or ends next; since when it could have; and the stream."""
        moments = [moment for stream in self._streams if (moment := stream.moment()) is not None]
        return min(moments, key=lambda moment: moment[:2], default=None)

    def _go_on(self, moment: tuple[float, float, _TimedStream]) -> None:
        self._at = max(self._at, moment[0])
        moment[2].go_on(self._at)


@dataclass
class _Collecting:
    """In the place of a stream: keeps what it is given."""

    given: list[Callable[[], None]]

    def push(self, work: Callable[[], None]) -> None:
        self.given.append(work)

    def poke(self) -> None:
        pass


class _TimedStream(HostStream):
    def __init__(self, device: ThrottledDevice) -> None:
        super().__init__(device.dice)
        self._device = device
        self._given_at: deque[float] = deque()
        self._ended_at = 0.0
        #: When what is under way ends.
        self._ends_at: float | None = None

    def push(self, work: Callable[[], None]) -> None:
        if self.capture is None:
            self._given_at.append(self._device.now)
        super().push(work)

    def wait(self, event: HostEvent) -> None:
        if isinstance(event, HostEvent):
            self.push(_Wait(event))
        else:
            super().wait(event)

    def poke(self) -> None:
        self._device.catch_up()

    def run_to(self, mark: int) -> None:
        self._device.wait_until(lambda: self.run >= mark)

    def moment(self) -> tuple[float, float, _TimedStream] | None:
        """When it goes on, unless others have to before; and since when it could have."""
        if self._ends_at is not None:
            return self._ends_at, 0.0, self
        if not self._queue:
            return None
        work, device = self._queue[0], self._device
        since = max(self._ended_at, self._given_at[0])
        if isinstance(work, _Wait):
            return (max(since, device._at), since, self) if work.event.reached else None
        free_at = device._free_at[work.what.up] if isinstance(work, _Crossing) else 0.0
        return max(since, free_at), since, self

    def go_on(self, now: float) -> None:
        """End what is under way, or begin what comes next."""
        if self._ends_at is None:
            self._begin(now)
            return
        work = self._queue.popleft()
        self._given_at.popleft()
        work()
        if isinstance(work, _Crossing):
            self._device.crossed.append(work.what)
        self.run += 1
        self._ended_at, self._ends_at = now, None

    def _begin(self, now: float) -> None:
        work, device = self._queue[0], self._device
        if isinstance(work, _Crossing):
            self._ends_at = device._free_at[work.what.up] = now + work.what.size / device.bytes_s
        else:
            self._ends_at = now if isinstance(work, _Wait) else now + device.work_s
