"""A worker whose GPU is the host: kernels in the emulator, streams as late as the dice say.

Its size in bytes, how many bytes its driver pins at once and in all, its seed, and a file that makes it fail once it is
there come from the environment. While a file RESTLESS is there, every few steps another placement becomes the goal of
swaps.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
from emulated_tiers import any_placement
from host_device import HostDevice, HostStream
from numpy.typing import NDArray

from sparkd.errors import DeviceError
from sparkd.executors.device import HostCall, Launch
from sparkd.worker import device_backend, main, server
from sparkd.worker.engine import Routing


class LosableDevice(HostDevice):
    """Is lost, once, when the file LOST is there; others take as much of it as the file FOREIGN says.

    Where the file CONFUSED is there, the host is called for an expert that does not exist, once.
    """

    def __init__(self, **given: object) -> None:
        super().__init__(**given)
        self._host_memory: list[NDArray[np.uint8]] = []

    def pinned(self, size: int) -> NDArray[np.uint8]:
        self._host_memory.append(super().pinned(size))
        return self._host_memory[-1]

    def launch(self, stream: HostStream, launch: Launch) -> None:
        super().launch(stream, launch)
        stream.push(self._lose)

    def call(self, stream: HostStream, call: HostCall) -> None:
        stream.push(self._confuse)
        super().call(stream, call)

    def memory(self) -> tuple[int, int]:
        foreign = _file("FOREIGN")
        self.foreign = int(foreign.read_text()) if foreign.exists() else 0
        return super().memory()

    def _lose(self) -> None:
        lost = _file("LOST")
        if lost.exists():
            lost.unlink()
            raise DeviceError("the GPU refuses: cudaErrorDevicesUnavailable")

    def _confuse(self) -> None:
        confused = _file("CONFUSED")
        if confused.exists():
            confused.unlink()
            # What `HostExperts` pins is the first of it, and begins with the number of rows.
            self._host_memory[0].view("<i4")[:2] = 1, 9999


class RestlessBackend(device_backend.DeviceBackend):
    """Is told of placements that nobody has advised."""

    dice = random.Random(os.environ["HOST_DEVICE_SEED"])
    version = 0

    def used(self, routing: Routing) -> None:
        super().used(routing)
        if _file("RESTLESS").exists() and self.dice.random() < 0.3:
            self.version += 1
            self._tier.place(any_placement(self.dice, self._tier, self.version))


def _file(name: str) -> Path:
    return Path(os.environ["HOST_DEVICE_FOLDER"]) / name


def open_device() -> HostDevice:
    seed = int(os.environ["HOST_DEVICE_SEED"])
    print(f"SPARKD_SEED={seed}", file=sys.stderr)
    device = LosableDevice(size=int(os.environ["HOST_DEVICE_SIZE"]), seed=seed, order="random")
    device.pinned_at_once, device.pinnable = map(float, os.environ["HOST_DEVICE_PINNED"].split(","))
    return device


server.open_device = open_device
device_backend.DeviceBackend = RestlessBackend
device_backend._CALM_S = 1.5  # half a minute is long for a test

if __name__ == "__main__":
    sys.exit(main.main())
