"""How a request wants its tokens chosen, and the choice: the native sampler, one for all executors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import RequestError
from sparkd.kernels import native

#: Beyond this every distribution is flat.
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of one request, checked; the defaults are greedy decoding.

    temperature 0 takes the best token and ignores the rest. top_k keeps the k best (0: all), top_p the fewest best that
    have this share of the probability (1: all), `seed` determines the draws. RequestError when a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, MAX_TEMPERATURE)
        _check_integer("top_k", self.top_k, 31)
        _check_number("top_p", self.top_p, 1.0)
        _check_integer("seed", self.seed, 64)


def _check_number(option: str, value: object, greatest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= greatest:
        raise RequestError(f"{option} is {value!r}", fix=f"give a number from 0 to {greatest:g}")


def _check_integer(option: str, value: object, bits: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise RequestError(f"{option} is {value!r}", fix=f"give a whole number from 0 to 2^{bits} - 1")


@cache
def _native() -> ModuleType:
    return native()


def sample(logits: NDArray[np.float32], sampling: Sampling, index: int) -> int:
    """The token for output number `index` of a request, from its logits [vocabulary].

    The same arguments give the same token everywhere (docs/arithmetic.md, "Sampling"). RequestError when a logit is not
    finite.
    """
    try:
        token = _native().sample(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, index)
    except ValueError as error:
        raise RequestError(str(error), fix="try another prompt, or check the model file") from error
    return int(token)
