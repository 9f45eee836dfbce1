"""Log probabilities with the text of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_client import AsyncClient, Choice
from spark_gateway.answer import shown
from spark_gateway.daemon import Daemon


async def chat_logprobs(
    daemon: Daemon, client: AsyncClient, tokens: Sequence[int], choices: Sequence[Choice]
) -> dict[str, Any]:
    """As chat completions have them."""
    texts = await _texts(daemon, client, tokens, choices)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": shown(texts[token]), "logprob": logprob, "bytes": list(texts[token])}

    content = [
        {**entry(token, choice.logprob), "top_logprobs": [entry(best.token, best.logprob) for best in choice.best]}
        for token, choice in zip(tokens, choices, strict=False)
    ]
    return {"content": content, "refusal": None}


async def text_logprobs(
    daemon: Daemon, client: AsyncClient, tokens: Sequence[int], choices: Sequence[Choice], offset: int = 0
) -> tuple[dict[str, Any], int]:
    """As completions have them, and where the text of the next token begins."""
    texts = await _texts(daemon, client, tokens, choices)
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(shown(texts[token]))
    return {
        "tokens": [shown(texts[token]) for token in tokens],
        "token_logprobs": [choice.logprob for choice in choices],
        "top_logprobs": [{shown(texts[best.token]): best.logprob for best in choice.best} for choice in choices],
        "text_offset": offsets,
    }, offset


async def _texts(
    daemon: Daemon, client: AsyncClient, tokens: Sequence[int], choices: Sequence[Choice]
) -> dict[int, bytes]:
    wanted = {*tokens, *(best.token for choice in choices for best in choice.best)}
    return await daemon.token_bytes(client, wanted)
