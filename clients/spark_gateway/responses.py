"""`/v1/responses`: OpenAI's newer dialect, without what it would have to keep between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from spark_client import AsyncClient, SparkClientError
from spark_gateway.answer import Alive, Answer, Block, Piece, new_id
from spark_gateway.body import Body
from spark_gateway.chat import choose
from spark_gateway.conversation import response_messages, response_tools
from spark_gateway.daemon import Daemon
from spark_gateway.errors import of_client, refused
from spark_gateway.requests import Call
from spark_gateway.sse import comment, data


class Reasoning(Body):
    """How the model thinks. There is no summary of it: the thought itself is told."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Body):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(Body):
    """A request for a response."""

    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: bool = False
    background: bool = False
    include: list[str] | None = None
    previous_response_id: str | None = None
    # These change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    client_metadata: dict[str, Any] | None = None


def call_of(body: ResponsesBody, defaults: Mapping[str, Any]) -> Call:
    """The request for the daemon; ApiError for what it cannot do."""
    if body.previous_response_id is not None:
        raise refused("previous_response_id", "nothing is stored here: send the whole conversation")
    if body.store:
        raise refused("store", "nothing is stored here: send false")
    if body.background:
        raise refused("background", "is not supported")
    if body.text is not None and body.text.format not in (None, {"type": "text"}):
        raise refused("text.format", "only {'type': 'text'} is supported")
    unknown = next((item for item in body.include or [] if item != "reasoning.encrypted_content"), None)
    if unknown is not None:
        raise refused("include", f"{unknown[:60]!r} is not supported")
    messages = response_messages(body.instructions, body.input)
    call = Call(body.model, messages, tools=response_tools(body.tools))
    call.names = {"messages": "input"}
    given = {name: getattr(body, name) for name in ("temperature", "top_p")}
    call.parameters |= {**defaults, **{name: value for name, value in given.items() if value is not None}}
    call.limit(body.max_output_tokens, "max_output_tokens")
    if body.reasoning is not None:
        call.think(body.reasoning.effort, "reasoning.effort")
    choose(call, body.tool_choice)
    call.parallel = body.parallel_tool_calls
    return call


async def whole(body: ResponsesBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> dict[str, Any]:
    """The answer in one piece."""
    await answer.read()
    response = _Response(body, client)
    return response.document(answer, [_item(block, new_id(_PREFIX[block.kind]), answer) for block in answer.blocks])


async def stream(body: ResponsesBody, answer: Answer, daemon: Daemon, client: AsyncClient) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    response = _Response(body, client)
    yield response.event("response.created", response=response.document(None, []))
    yield response.event("response.in_progress", response=response.document(None, []))
    items: list[dict[str, Any]] = []
    current: _Item | None = None
    try:
        async for event in answer.events():
            if isinstance(event, Alive):
                yield comment("alive")
            for part in event.parts if isinstance(event, Piece) else []:
                if current is None or (current.block.kind, current.block.call) != (part.kind, part.call):
                    if current is not None:
                        for out in current.end(response):
                            yield out
                        items.append(current.made)
                    current = _Item(Block(part.kind, part.call), len(items), answer)
                    for out in current.begin(response):
                        yield out
                current.block.text += part.text
                yield response.event(f"{_DELTA[part.kind]}.delta", **current.place, delta=part.text, **current.extra)
    except (SparkClientError, TimeoutError) as error:
        what = of_client(error)
        document = response.document(None, items) | {"status": "failed"}
        document["error"] = {"code": "server_error", "message": what.message}
        yield response.event("response.failed", response=document)
        return
    if current is not None:
        for out in current.end(response):
            yield out
        items.append(current.made)
    document = response.document(answer, items)
    yield response.event(f"response.{document['status']}", response=document)


_PREFIX = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_DELTA = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class _Response:
    """One response: its id, and the numbers of its events."""

    def __init__(self, body: ResponsesBody, client: AsyncClient) -> None:
        self._body = body
        self._model = client.server.model
        self._id = new_id("resp_")
        self._created = int(time.time())
        self._events = 0

    def event(self, kind: str, /, **members: Any) -> bytes:
        """One event of the stream."""
        number, self._events = self._events, self._events + 1
        return data({"type": kind, "sequence_number": number, **members}, kind)

    def document(self, answer: Answer | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response as it is now; without an answer it is still being made."""
        body, status, incomplete, usage = self._body, "in_progress", None, None
        if answer is not None:
            status = "completed"
            if answer.finish == "length":
                status, incomplete = "incomplete", {"reason": "max_output_tokens"}
            prompt, made = answer.prompt_tokens, answer.output_tokens
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": prompt + made,
            }
        reasoning = body.reasoning
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": {}, **tool, "strict": False} for tool in body.tools or []],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": body.metadata or {},
            "user": body.user,
        }


class _Item:
    """An item of the output while it arrives."""

    def __init__(self, block: Block, index: int, answer: Answer) -> None:
        self.block = block
        self.made: dict[str, Any] = {}
        self._answer = answer
        self._id = new_id(_PREFIX[block.kind])
        self._index = index

    @property
    def place(self) -> dict[str, Any]:
        """What each event says of where it belongs."""
        place = {"item_id": self._id, "output_index": self._index}
        return place if self.block.kind == "call" else {**place, "content_index": 0}

    @property
    def extra(self) -> dict[str, Any]:
        """What text carries beside its pieces."""
        return {"logprobs": []} if self.block.kind == "text" else {}

    def begin(self, response: _Response) -> list[bytes]:
        """The events before the first piece."""
        shell = {**_item(self.block, self._id, self._answer), "status": "in_progress"}
        if self.block.kind != "call":
            shell["content"] = []
        else:
            shell["arguments"] = ""
        added = [response.event("response.output_item.added", output_index=self._index, item=shell)]
        if self.block.kind != "call":
            added.append(response.event("response.content_part.added", **self.place, part=self._part("")))
        return added

    def end(self, response: _Response) -> list[bytes]:
        """The events after the last piece."""
        block, self.made = self.block, _item(self.block, self._id, self._answer)
        name = f"{_DELTA[block.kind]}.done"
        if block.kind == "call":
            call = self._answer.calls[block.call]
            done = [response.event(name, **self.place, arguments=block.text, name=call["name"])]
        else:
            done = [
                response.event(name, **self.place, text=block.text, **self.extra),
                response.event("response.content_part.done", **self.place, part=self._part(block.text)),
            ]
        return [*done, response.event("response.output_item.done", output_index=self._index, item=self.made)]

    def _part(self, text: str) -> dict[str, Any]:
        if self.block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, item: str, answer: Answer) -> dict[str, Any]:
    """A finished item of the output."""
    if block.kind == "text":
        part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
        return {"id": item, "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    if block.kind == "reasoning":
        thought = [{"type": "reasoning_text", "text": block.text}]
        return {"id": item, "type": "reasoning", "summary": [], "content": thought, "status": "completed"}
    call = answer.calls[block.call]
    return {
        "id": item,
        "type": "function_call",
        "call_id": call["id"],
        "name": call["name"],
        "arguments": block.text,
        "status": "completed",
    }
