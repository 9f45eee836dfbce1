"""Where weights lie: what whoever holds them tells an executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparkd.gguf.formats import Format


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in memory: the address of its first row, rows one after another."""

    address: int
    format: Format


@dataclass(frozen=True, slots=True)
class Piece:
    """Gate, up or down rows of one expert: byte offset inside the expert's record."""

    offset: int
    format: Format


class Weights(Protocol):
    """Where the weights of a program lie. Whoever provides this keeps the memory alive and unchanged.

    One record holds the gate, up and down rows of one expert, each byte for byte as in the file.
    """

    def tensor(self, name: str) -> Stored:
        """A core tensor (everything but routed experts)."""
        ...

    def pieces(self, layer: int) -> tuple[Piece, Piece, Piece]:
        """Gate, up, down inside the records of expert layer `layer` (an index into `Program.expert_layers`)."""
        ...

    def records(self) -> Sequence[NDArray[np.uint64]]:
        """For each expert layer the address of each expert's record."""
        ...
