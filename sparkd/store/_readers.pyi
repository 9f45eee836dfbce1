from collections.abc import Mapping, Sequence
from typing import TypeAlias

#: Descriptor, first byte, bytes that are needed from there on, bytes to ask for (whole blocks), address.
Piece: TypeAlias = tuple[int, int, int, int, int]

#: Device, inode, bytes and nanoseconds of the last change of a file.
Identity: TypeAlias = tuple[int, int, int, int]
#: Addresses of a word that gets a value, the value, and of one that is rung then (`sparkd.ipc.directory`).
Told: TypeAlias = tuple[int, int, int]

class Readers:
    """Threads that read pieces of files straight to their places; jobs begin in the order they came."""
    def __init__(self, threads: int, files: Mapping[int, Identity]) -> None:
        """`threads` for what somebody waits for, as many for what is read ahead.

        `files`: what each descriptor's file is expected to be after each read.
        """
    def begin(self, job: int, pieces: Sequence[Piece], told: Told = (0, 0, 0), ahead: bool = False) -> None:
        """Have all pieces of a job read, at the same time if there are enough threads; `ahead`: once there is no other.

        Once all bytes are in place, `told` is: before `ended` tells the same.
        """
    def hurry(self, job: int) -> None:
        """Somebody waits for a job that is read ahead."""
    def withdraw(self, job: int) -> bool:
        """Give up a job that is to be read ahead; false, and nothing is done, if it has begun."""
    def ended(self) -> list[tuple[int, bool]]:
        """Jobs that ended since the last call, and whether all of their bytes are in place; waits for one.

        Empty: closed.
        """
    def close(self) -> None:
        """End the threads after the piece they are at; what waits is given up, untold."""
