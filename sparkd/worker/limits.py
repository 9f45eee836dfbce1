"""What one request may ask for; the supervisor and the worker refuse with the same words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkd.errors import RequestError
from sparkd.ipc.messages import Sampling
from sparkd.tags import MAX_TAG_BYTES, TRAFFIC_TAG

#: Beyond this every distribution is flat.
MAX_TEMPERATURE = 100.0
#: Penalties and biases far beyond what logits differ by.
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 10.0
MAX_BIAS = 100.0
#: Tokens one request may bias, and tokens named beside each chosen one.
MAX_BIASES = 1024
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Room:
    """Positions that a request may have, and those that the model has itself (0: not known)."""

    positions: int
    model: int = 0

    @property
    def holds(self) -> str:
        """What limits the positions: "model", or the setting "limits.context"."""
        return "model" if self.positions == self.model else "limits.context"


def check_length(prompt: int, max_tokens: int, room: Room, *, shorten: bool = False, counted: bool = True) -> None:
    """RequestError, with the numbers, for a prompt that is empty or needs more positions than a request may have.

    `shorten`: fewer output tokens would do, one at least. Not `counted`: the prompt may have more tokens.
    """
    if prompt == 0:
        raise RequestError("the prompt has no tokens", fix="give it one at least")
    if prompt + (1 if shorten else max_tokens) <= room.positions:
        return
    both = f"max_tokens is {max_tokens}, {prompt + max_tokens} positions together"
    more = "needs room for one more" if shorten else both
    least = "" if counted else "at least "
    fixes = ["shorten the prompt", *([] if shorten else ["ask for fewer tokens"])]
    if room.holds == "model":
        why = "the model has no more"
    else:
        why = f"limits.context; the model has {room.model}" if room.model else "limits.context"
        fixes.append("raise limits.context")
    raise RequestError(
        f"the prompt has {least}{prompt} tokens and {more}: a request may have {room.positions} ({why})",
        fix=" or ".join(filter(None, [", ".join(fixes[:-1]), fixes[-1]])),
    )


def check_tokens(tokens: Sequence[int], vocab: int, where: str = "tokens") -> None:
    """RequestError naming the first id that is not in a vocabulary of `vocab` tokens, and what has it."""
    outside = next((token for token in tokens if not 0 <= token < vocab), None)
    if outside is not None:
        raise RequestError(f"{where}: token {outside} is not in the vocabulary", fix=f"ids are 0 to {vocab - 1}")


def check_traffic_tag(tag: str) -> None:
    """RequestError for a tag that is too long, or of other characters than tags have."""
    if TRAFFIC_TAG.fullmatch(tag) is None:
        raise RequestError(
            f"traffic_tag is {tag[:100]!r}",
            fix=f"up to {MAX_TAG_BYTES} characters of a to z, 0 to 9, _ and -; or none",
        )


def check_sampling(sampling: Sampling, vocab: int) -> None:
    """RequestError naming option, value and range for options that cannot be."""
    _check_number("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _check_integer("top_k", sampling.top_k, 31)
    _check_number("top_p", sampling.top_p, 0, 1)
    _check_number("min_p", sampling.min_p, 0, 1)
    _check_number("repetition_penalty", sampling.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_number("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_number("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.seed is not None:
        _check_integer("seed", sampling.seed, 64)
    if len(sampling.logit_bias) > MAX_BIASES:
        raise RequestError(f"logit_bias names {len(sampling.logit_bias)} tokens", fix=f"name at most {MAX_BIASES}")
    seen = set()
    for bias in sampling.logit_bias:
        check_tokens([bias.token], vocab, "logit_bias")
        _check_number(f"logit_bias of token {bias.token}", bias.bias, -MAX_BIAS, MAX_BIAS)
        if bias.token in seen:
            raise RequestError(f"logit_bias names token {bias.token} twice", fix="name each token once")
        seen.add(bias.token)


def check_logprobs(logprobs: int | None) -> None:
    """RequestError for a number of tokens that cannot be named beside each chosen one."""
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs is {logprobs}", fix=f"give a whole number from 0 to {MAX_LOGPROBS}")


def _check_number(option: str, value: float, least: float, greatest: float) -> None:
    if not least <= value <= greatest:
        raise RequestError(f"{option} is {value!r}", fix=f"give a number from {least:g} to {greatest:g}")


def _check_integer(option: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise RequestError(f"{option} is {value!r}", fix=f"give a whole number from 0 to 2^{bits} - 1")
