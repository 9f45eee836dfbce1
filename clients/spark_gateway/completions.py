"""`/v1/completions`: OpenAI's continuation of a text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from spark_client import AsyncClient
from spark_gateway.answer import Alive, Answer, Piece, new_id
from spark_gateway.chat import Irrelevant, StreamOptions, biases, usage
from spark_gateway.daemon import Daemon
from spark_gateway.errors import refused
from spark_gateway.logprobs import text_logprobs
from spark_gateway.requests import Call, Sampling
from spark_gateway.sse import comment, data


class CompletionBody(Sampling, Irrelevant):
    """A request to continue a text, or token ids."""

    model: str = ""
    prompt: str | list[str] | list[int] | list[list[int]]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int = 16
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    n: int = 1
    best_of: int = 1
    echo: bool = False
    suffix: str | None = None


def call_of(body: CompletionBody, defaults: Mapping[str, Any]) -> Call:
    """The request for the daemon; ApiError for what it cannot do."""
    for option in ("n", "best_of"):
        if getattr(body, option) != 1:
            raise refused(option, "only one answer is supported")
    if body.echo:
        raise refused("echo", "is not supported")
    if body.suffix is not None:
        raise refused("suffix", "is not supported")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "is for streams")
    call = Call(body.model, prompt=_prompt(body.prompt))
    call.names = {"messages": "prompt", "tokens": "prompt"}
    call.sample(body, defaults)
    call.limit(body.max_tokens)
    call.stop(body.stop)
    if body.logit_bias:
        call.parameters["logit_bias"] = biases(body.logit_bias)
    if body.logprobs is not None:
        call.parameters["logprobs"] = body.logprobs
    return call


def _prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        return prompt[0]
    if not prompt or not isinstance(prompt[0], int):
        raise refused("prompt", f"has {len(prompt)} prompts, one is supported")
    return [token for token in prompt if isinstance(token, int)]


async def whole(body: CompletionBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> dict[str, Any]:
    """The answer in one piece."""
    await answer.read()
    logprobs = None
    if body.logprobs is not None:
        logprobs, _ = await text_logprobs(daemon, client, answer.stream.tokens, answer.stream.choices)
    choice = {"index": 0, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish}
    return {**_head(client), "choices": [choice], "usage": usage(answer)}


async def stream(body: CompletionBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    head, offset = _head(client), 0
    with_usage = body.stream_options is not None and body.stream_options.include_usage

    def chunk(text: str, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return data({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    async for event in answer.events():
        if isinstance(event, Alive):
            yield comment("alive")
        elif isinstance(event, Piece):
            logprobs = None
            if event.choices is not None:
                logprobs, offset = await text_logprobs(daemon, client, event.tokens, event.choices, offset)
            text = "".join(part.text for part in event.parts)
            if text or logprobs:
                yield chunk(text, None, logprobs)
    yield chunk("", answer.finish)
    if with_usage:
        yield data({**head, "choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def _head(client: AsyncClient) -> dict[str, Any]:
    return {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": client.server.model,
        "system_fingerprint": None,
    }
