"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import Field

from spark_client import AsyncClient
from spark_gateway.answer import Alive, Answer, Began, Piece, new_id
from spark_gateway.body import Body
from spark_gateway.conversation import anthropic_messages, anthropic_tools, arguments
from spark_gateway.daemon import Daemon
from spark_gateway.errors import refused
from spark_gateway.requests import Call
from spark_gateway.sse import data

_EDITS = "clear_thinking"


class Thinking(Body):
    """Whether the model thinks first. How long is its own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class ToolChoice(Body):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(Body):
    """How hard the model tries."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountBody(Body):
    """A conversation whose tokens are counted."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """A request for a message."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def count_of(body: CountBody) -> Call:
    """The conversation, for the daemon."""
    edits = (body.context_management or {}).get("edits", [])
    kinds = [edit.get("type") if isinstance(edit, dict) else None for edit in edits] if isinstance(edits, list) else [0]
    if not all(isinstance(kind, str) and kind.startswith(_EDITS) for kind in kinds):
        raise refused("context_management", f"only edits of type {_EDITS}_... are supported")
    call = Call(body.model, anthropic_messages(body.system, body.messages), tools=anthropic_tools(body.tools))
    call.names = {"messages": "messages", "stop": "stop_sequences"}
    if body.thinking is not None and body.thinking.type != "adaptive":
        call.switch_thought(body.thinking.type == "enabled", "thinking")
    if body.output_config is not None:
        if body.output_config.format is not None:
            raise refused("output_config.format", "is not supported: no answer is forced into a schema")
        call.think(body.output_config.effort, "output_config.effort")
    if body.tool_choice is not None:
        choice = body.tool_choice
        if choice.type == "tool" and not choice.name:
            raise refused("tool_choice.name", "is missing")
        names = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
        call.choose(names[choice.type], choice.name or "")
        call.parallel = not choice.disable_parallel_tool_use
    return call


def call_of(body: MessagesBody, defaults: Mapping[str, Any]) -> Call:
    """The request for the daemon; ApiError for what it cannot do."""
    call = count_of(body)
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    call.parameters |= {**defaults, **{name: value for name, value in given.items() if value is not None}}
    call.limit(body.max_tokens)
    call.stop(body.stop_sequences)
    return call


async def whole(body: MessagesBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> dict[str, Any]:
    """The answer in one piece."""
    await answer.read()
    content = [_block(block.kind, block.call, block.text, answer) for block in answer.blocks]
    return {
        **_head(client),
        "content": content,
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stream.stop_string,
        "usage": _usage(answer),
    }


async def stream(body: MessagesBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    begun = False
    block: tuple[str, int] | None = None
    number = -1
    async for event in answer.events():
        if not begun and isinstance(event, Began | Piece | Alive):
            begun = True
            yield _start(answer, client)
        if isinstance(event, Alive):
            yield _event("ping")
        if not isinstance(event, Piece):
            continue
        for part in event.parts:
            if block != (part.kind, part.call):
                if block is not None:
                    yield _event("content_block_stop", index=number)
                block, number = (part.kind, part.call), number + 1
                shell = _block(part.kind, part.call, "", answer)
                yield _event("content_block_start", index=number, content_block=shell)
            yield _event("content_block_delta", index=number, delta=_delta(part.kind, part.text))
    if not begun:
        yield _start(answer, client)
    if block is not None:
        yield _event("content_block_stop", index=number)
    end = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stream.stop_string}
    yield _event("message_delta", delta=end, usage=_usage(answer))
    yield _event("message_stop")


def _start(answer: Answer, client: AsyncClient) -> bytes:
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer)}
    return _event("message_start", message={**_head(client), **empty})


def _event(name: str, **members: Any) -> bytes:
    return data({"type": name, **members}, name)


def _block(kind: str, number: int, text: str, answer: Answer) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": text, "citations": None}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    call = answer.calls[number]
    name, given = call["name"], arguments(text) if text else {}
    return {"type": "tool_use", "id": call["id"].replace("call_", "toolu_"), "name": name, "input": given}


def _delta(kind: str, text: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text_delta", "text": text}
    if kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _stop_reason(answer: Answer) -> str:
    if answer.stream.stop_string is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}[answer.finish]


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _head(client: AsyncClient) -> dict[str, Any]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": client.server.model}
