from collections.abc import Sequence
from typing import TypeAlias

#: Descriptor, first byte, bytes that are needed from there on, bytes to ask for (whole blocks), address.
Piece: TypeAlias = tuple[int, int, int, int, int]

class Readers:
    """Threads that read pieces of files straight to their places; jobs begin in the order they came."""
    def __init__(self, threads: int) -> None: ...
    def begin(self, job: int, pieces: Sequence[Piece]) -> None:
        """Have all pieces of a job read, at the same time if there are enough threads."""
    def ended(self) -> list[tuple[int, bool]]:
        """Jobs that ended since the last call, and whether all of their bytes are in place; waits for one.

        Empty: closed.
        """
    def close(self) -> None:
        """End the threads after the piece they are at; what waits is given up, untold."""
