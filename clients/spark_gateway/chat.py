"""`/v1/chat/completions`: OpenAI's chat."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import Field

from spark_client import AsyncClient
from spark_gateway.answer import Alive, Answer, Piece, new_id, without_none
from spark_gateway.body import Body
from spark_gateway.conversation import openai_messages
from spark_gateway.daemon import Daemon
from spark_gateway.errors import refused
from spark_gateway.logprobs import chat_logprobs
from spark_gateway.requests import Call, Sampling
from spark_gateway.sse import comment, data

_FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Irrelevant(Body):
    """Options that change nothing here: names for accounting, hints for caches and service levels that do not exist."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatBody(Sampling, Irrelevant):
    """A request for a chat completion."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    n: int = 1
    modalities: list[str] | None = None
    store: bool = False


def call_of(body: ChatBody, defaults: Mapping[str, Any]) -> Call:
    """The request for the daemon; ApiError for what it cannot do."""
    if body.n != 1:
        raise refused("n", "only one answer is supported")
    if body.response_format is not None and body.response_format != {"type": "text"}:
        raise refused("response_format", "only {'type': 'text'} is supported")
    if body.modalities not in (None, ["text"]):
        raise refused("modalities", "only text is supported")
    if body.store:
        raise refused("store", "nothing is stored here")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "is for streams")
    call = Call(body.model, openai_messages(body.messages), tools=openai_tools(body.tools))
    call.names = {"options": "chat_template_kwargs", "logprobs": "top_logprobs"}
    call.options = dict(body.chat_template_kwargs or {})
    call.sample(body, defaults)
    if body.max_completion_tokens is None:
        call.limit(body.max_tokens)
    else:
        call.limit(body.max_completion_tokens, "max_completion_tokens")
    call.stop(body.stop)
    call.think(body.reasoning_effort, "reasoning_effort")
    choose(call, body.tool_choice)
    call.parallel = body.parallel_tool_calls
    if body.logit_bias:
        call.parameters["logit_bias"] = biases(body.logit_bias)
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs")
    if body.logprobs:
        call.parameters["logprobs"] = body.top_logprobs or 0
    return call


def openai_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as the daemon takes them; `strict` says what every call is read by anyway, the tool's schema."""
    made = []
    for tool in tools or []:
        function = tool.get("function")
        if isinstance(function, dict):
            kept = {name: value for name, value in function.items() if name != "strict"}
            made.append({**tool, "function": kept})
        else:
            made.append(tool)
    return made or None


def choose(call: Call, choice: str | dict[str, Any] | None) -> None:
    """Apply OpenAI's tool_choice."""
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            what = f"is {choice[:40]!r}, not auto, none, required or a function"
            raise refused("tool_choice", what, "invalid_value")
        call.choose(choice)
        return
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise refused("tool_choice", "only auto, none, required and a function are supported")
    call.choose("named", name)


def biases(given: Mapping[str, float]) -> dict[int, float]:
    """Logit biases by token id."""
    if not all(key.isdecimal() and len(key) < 10 for key in given):
        raise refused("logit_bias", "its keys are token ids", "invalid_value")
    return {int(key): value for key, value in given.items()}


def usage(answer: Answer) -> dict[str, Any]:
    """Token counts."""
    prompt, output = answer.prompt_tokens, answer.output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


async def whole(body: ChatBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> dict[str, Any]:
    """The answer in one piece."""
    await answer.read()
    logprobs = None
    if body.logprobs:
        logprobs = await chat_logprobs(daemon, client, answer.stream.tokens, answer.stream.choices)
    message = without_none(
        reasoning_content=answer.reasoning or None,
        tool_calls=[_tool_call(call) for call in answer.calls] or None,
    )
    text = answer.text if answer.text or not answer.calls else None
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None, **message},
        "logprobs": logprobs,
        "finish_reason": _FINISH[answer.finish],
    }
    return {**_head("chat.completion", client), "choices": [choice], "usage": usage(answer)}


async def stream(body: ChatBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    head = _head("chat.completion.chunk", client)
    with_usage = body.stream_options is not None and body.stream_options.include_usage

    def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return data({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    yield chunk({"role": "assistant", "content": ""})
    async for event in answer.events():
        if isinstance(event, Alive):
            yield comment("alive")
        elif isinstance(event, Piece):
            logprobs = None
            if event.choices is not None:
                logprobs = await chat_logprobs(daemon, client, event.tokens, event.choices)
            deltas = [_delta(part.kind, part.text, part.call, part.name, answer) for part in event.parts]
            for delta in deltas or ([{}] if logprobs else []):
                yield chunk(delta, None, logprobs)
                logprobs = None
    yield chunk({}, _FINISH[answer.finish])
    if with_usage:
        yield data({**head, "choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def _delta(kind: str, text: str, number: int, name: str, answer: Answer) -> dict[str, Any]:
    if kind == "text":
        return {"content": text}
    if kind == "reasoning":
        return {"reasoning_content": text}
    call: dict[str, Any] = {"index": number, "function": {"arguments": text}}
    if name:
        call |= {"id": answer.calls[number]["id"], "type": "function", "function": {"name": name, "arguments": text}}
    return {"tool_calls": [call]}


def _tool_call(call: Mapping[str, str]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _head(kind: str, client: AsyncClient) -> dict[str, Any]:
    return {
        "id": new_id("chatcmpl-"),
        "object": kind,
        "created": int(time.time()),
        "model": client.server.model,
        "system_fingerprint": None,
    }
