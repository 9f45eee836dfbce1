"""How near to the golden vectors an executor has to be, whatever it runs on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = Mapping[str, NDArray]

#: Largest error of any logit where nothing is rounded to 8 bits; the logits' standard deviation is about 2.3.
FLOAT_LIMIT = 1e-3
#: Where activations are rounded to 8 bits, the median error of a position may be this many times that of the other
#: implementation that rounds so; its logits stand in the vectors beside those of its exact twin.
INTEGER_FACTOR = 2.0
#: Greedy tokens are compared up to the first step decided by less than four times the usual error (0.1, 1e-3).
NARROW = {True: 4e-3, False: 0.4}


class Said(Protocol):
    """What one sequence gave so far."""

    @property
    def all_logits(self) -> NDArray[np.float32]: ...

    @property
    def all_experts(self) -> NDArray[np.int16]: ...


class Runner(Protocol):
    """Runs sequences of a model, one step after another."""

    def prefill(self, tokens: Sequence[int]) -> Said: ...

    def greedy(self, run: Said, count: int) -> list[int]: ...

    def end(self, run: Said) -> None: ...


def rms(errors: NDArray) -> NDArray:
    return np.sqrt(np.mean(np.square(errors), axis=-1))


def exact(stored: Vectors, prompt: str, field: str) -> NDArray:
    """A field of the run that rounds no activations: the twin's where the file is quantised."""
    twin = f"{prompt}_twin_{field}"
    return stored[twin] if twin in stored else stored[f"{prompt}_{field}"]


def last_errors(logits: NDArray, stored: Vectors, prompt: str) -> NDArray:
    """Errors of the logits after a prompt; for big vocabularies of the 256 largest ones."""
    if f"{prompt}_logits_last" in stored:
        return logits - exact(stored, prompt, "logits_last")
    return logits[exact(stored, prompt, "top_ids")] - exact(stored, prompt, "top_logits")


def usual_error(stored: Vectors, prompt: str) -> float:
    """How far the implementation that rounds activations is from its twin after a prompt, rms."""
    if f"{prompt}_twin_logits_last" in stored:
        return float(rms(stored[f"{prompt}_logits_last"].astype(np.float32) - stored[f"{prompt}_twin_logits_last"]))
    _, i, j = np.intersect1d(stored[f"{prompt}_top_ids"], stored[f"{prompt}_twin_top_ids"], return_indices=True)
    return float(rms(stored[f"{prompt}_top_logits"][i] - stored[f"{prompt}_twin_top_logits"][j]))


def check_greedy(tokens: list[int], stored: Vectors, prompt: str, narrow: float) -> None:
    margins = exact(stored, prompt, "greedy_margin")
    decided = next((i for i, margin in enumerate(margins) if margin < narrow), len(margins))
    assert tokens[:decided] == exact(stored, prompt, "greedy").tolist()[:decided]


def check_floats(
    runner: Runner, stored: Vectors, prompts: Collection[str], layers: Callable[[], NDArray] | None = None
) -> None:
    """Every logit, expert and token of a file that rounds nothing; and `layers`, what each layer left, if given."""
    for prompt in prompts:
        run = runner.prefill(stored[f"{prompt}_tokens"].tolist())
        assert np.abs(last_errors(run.all_logits[-1], stored, prompt)).max() < FLOAT_LIMIT
        if f"{prompt}_logits_all" in stored:
            assert np.abs(run.all_logits - exact(stored, prompt, "logits_all")).max() < FLOAT_LIMIT
        if layers is not None and f"{prompt}_layer_out" in stored:
            kept = stored[f"{prompt}_layer_out"]
            assert np.abs(layers()[:, -kept.shape[1] :] - kept).max() < FLOAT_LIMIT
        if f"{prompt}_experts" in stored:
            assert (run.all_experts == stored[f"{prompt}_experts"]).all()
        check_greedy(runner.greedy(run, 32), stored, prompt, NARROW[True])
        runner.end(run)


def check_quantised(runner: Runner, stored: Vectors, prompts: Collection[str]) -> None:
    """Errors of a quantised file: no more than rounded activations make."""
    errors, usual, same_best = [], [], 0
    for prompt in prompts:
        run = runner.prefill(stored[f"{prompt}_tokens"].tolist())
        errors.append(float(rms(last_errors(run.all_logits[-1], stored, prompt))))
        usual.append(usual_error(stored, prompt))
        if f"{prompt}_twin_logits_all" in stored:
            twin, rounded = stored[f"{prompt}_twin_logits_all"], stored[f"{prompt}_logits_all"]
            assert np.median(rms(run.all_logits - twin)) < INTEGER_FACTOR * np.median(rms(rounded - twin))
            assert (run.all_logits.argmax(-1) == twin.argmax(-1)).mean() >= 0.8
        tokens = runner.greedy(run, 32)
        same_best += tokens[0] == exact(stored, prompt, "greedy")[0]
        check_greedy(tokens, stored, prompt, NARROW[False])
        runner.end(run)
    assert np.median(errors) < INTEGER_FACTOR * np.median(usual)
    assert same_best >= len(prompts) - 1
