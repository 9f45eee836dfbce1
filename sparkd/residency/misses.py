"""What becomes of the experts that a step on a device chooses and that are in no slot of it. Pure.

Kernels read them over the link where they lie in host memory, each once a step; or the CPU computes them there, which
takes a call of the host in every layer, whether it misses anything or not. With L layers, c seconds a call, and bytes
per second of the link and of the CPU's kernels, a step that misses M bytes is sooner done by the CPU where

    L · c + M / host < M / link        that is        M > L · c / (1 / link - 1 / host)

What the CPU computes while the device computes the rest is not taken off, so this errs against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

#: Steps over which what is missed is averaged.
_STEPS = 64
#: The CPU begins where so many times the bytes are missed at which it is worth it, and ends at one over that.
_CLEARLY = 1.25


class Misses(Enum):
    """What becomes of what is missed."""

    #: Kernels read it in host memory, as far as that is registered; the rest is copied.
    IN_PLACE = "in_place"
    #: It is copied to the reserve, part by part of a step.
    COPY = "copy"
    #: The CPU computes it.
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of the link and of the CPU's products with experts; seconds of a call of the host."""

    link: float
    host: float
    call_s: float

    def worth_bytes(self, layers: int) -> float:
        """Bytes that a step of so many expert layers must miss before the CPU is worth its calls; infinite: never."""
        gain = 1 / self.link - 1 / self.host
        return layers * self.call_s / gain if gain > 0 else math.inf

    def better(self, layers: int, missed_bytes: float) -> Misses:
        """Whichever is sooner done where every step misses so many."""
        return Misses.HOST if missed_bytes > self.worth_bytes(layers) else Misses.IN_PLACE


class Chooser:
    """Chooses between `IN_PLACE` and `HOST` by what steps have missed of late."""

    def __init__(self, rates: Rates, layers: int) -> None:
        self.worth_bytes = rates.worth_bytes(layers)
        self.choice = Misses.IN_PLACE
        #: Bytes that a step misses, on average; None before the first.
        self.missed_bytes: float | None = None

    def saw(self, missed_bytes: int, readable: bool) -> Misses:
        """A step has missed so many bytes. `readable`: kernels can read all host memory.

        Where they cannot, the host is called in every layer anyway, to look at the choice.
        """
        mean = missed_bytes if self.missed_bytes is None else self.missed_bytes
        self.missed_bytes = mean + (missed_bytes - mean) / _STEPS
        if not readable:
            self.choice = Misses.IN_PLACE if math.isinf(self.worth_bytes) else Misses.HOST
        elif self.missed_bytes > self.worth_bytes * _CLEARLY:
            self.choice = Misses.HOST
        elif self.missed_bytes < self.worth_bytes / _CLEARLY:
            self.choice = Misses.IN_PLACE
        return self.choice
