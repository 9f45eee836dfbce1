"""What one request may ask for; the supervisor and the worker refuse with the same words."""

from __future__ import annotations

from collections.abc import Sequence

from sparkd.errors import RequestError


def check_length(prompt: int, max_tokens: int, context: int) -> None:
    """RequestError, with both numbers, for a prompt that is empty or needs more positions than a request may have."""
    if prompt == 0:
        raise RequestError("the prompt has no tokens", fix="give it one at least")
    if prompt + max_tokens > context:
        raise RequestError(
            f"{prompt} prompt tokens and max_tokens {max_tokens} are {prompt + max_tokens} positions,"
            f" a request may have {context}",
            fix="shorten the prompt, ask for fewer tokens, or raise limits.context",
        )


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """RequestError naming the first id that is not in a vocabulary of `vocab` tokens."""
    outside = next((token for token in tokens if not 0 <= token < vocab), None)
    if outside is not None:
        raise RequestError(f"token {outside} is not in the vocabulary", fix=f"ids are 0 to {vocab - 1}")
