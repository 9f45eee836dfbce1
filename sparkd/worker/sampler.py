"""The choice of a token from logits: the native sampler, one for all executors.

`sparkd.worker.limits.check_sampling` says which options it takes, docs/arithmetic.md ("Sampling") what they do.
"""

from __future__ import annotations

from array import array
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import RequestError
from sparkd.ipc.messages import Choice, Logprob, Sampling
from sparkd.kernels import native

_NOTHING = array("i")
_NOT_FINITE = "try another prompt, or check the model file"


@cache
def _native() -> ModuleType:
    return native()


def sample(
    logits: NDArray[np.float32], sampling: Sampling, index: int, history: array[int] = _NOTHING, prompt: int = 0
) -> int:
    """The token for output number `index` of a request, from its logits [vocabulary].

    `history` are the ids so far, the first `prompt` of them the prompt's; penalties depend on them. The same arguments
    give the same token everywhere. RequestError when a logit is not finite.
    """
    bias = sampling.logit_bias
    try:
        token = _native().sample(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            np.array([b.token for b in bias], np.int32),
            np.array([b.bias for b in bias], np.float32),
            np.frombuffer(history, np.int32) if history else np.empty(0, np.int32),
            prompt,
            sampling.seed or 0,
            index,
        )
    except ValueError as error:
        raise RequestError(str(error), fix=_NOT_FINITE) from error
    return int(token)


def wants_best(sampling: Sampling) -> bool:
    """Whether `sample` takes the best token of the logits as they are, whatever the history."""
    changed = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
    return sampling.temperature == 0.0 and not sampling.logit_bias and not changed


def best(found: int) -> int:
    """The token of an executor's `StepResult.best`. RequestError, that of `sample`, when a logit was not finite."""
    if found < 0:
        error = f"the logit of token {-1 - found} is not finite"
        raise RequestError(error, fix=_NOT_FINITE)
    return found


def choice(logits: NDArray[np.float32], token: int, best: int) -> Choice:
    """The log probability of `token`, and the `best` most likely tokens with theirs, under the logits as they are."""
    ids, values = _native().logprobs(logits, token, best)
    own, *rest = (Logprob(int(i), float(value)) for i, value in zip(ids, values, strict=True))
    return Choice(own.logprob, rest)
