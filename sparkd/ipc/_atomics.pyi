from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A buffer of 64-bit words.
Words: TypeAlias = NDArray[np.uint64] | memoryview[int]

def load(words: Words, index: int) -> int: ...
def store(words: Words, index: int, value: int) -> None: ...
def copy(words: NDArray[np.uint64], out: NDArray[np.uint64]) -> None: ...
