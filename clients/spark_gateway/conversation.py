"""Conversations of other dialects in the words of the daemon (docs/chat.md). What these rules do not take is refused
with its place; the daemon checks the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from spark_gateway.errors import refused

Message = dict[str, Any]

#: Members that clients send along and that mean nothing to a model: hints for caches, empty leftovers of answers.
_DROPPED = ("cache_control",)
_DROPPED_EMPTY = ("annotations", "audio", "refusal", "function_call", "tool_calls", "citations")


def openai_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Messages of a chat completion."""
    return [_openai_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _openai_message(message: Mapping[str, Any], where: str) -> Message:
    made = {
        name: value
        for name, value in message.items()
        if name not in _DROPPED and not (name in _DROPPED_EMPTY and not value)
    }
    if isinstance(made.get("content"), list):
        parts = made["content"]
        made["content"] = [_openai_part(part, f"{where}.content[{number}]") for number, part in enumerate(parts)]
    return made


def _openai_part(part: Any, where: str) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return {name: value for name, value in part.items() if name not in _DROPPED}


# ---- Anthropic -------------------------------------------------------------------------------------------------------


def anthropic_messages(system: Any, messages: list[dict[str, Any]]) -> list[Message]:
    """System prompt and messages of Anthropic's dialect."""
    made: list[Message] = []
    if system is not None:
        made.append({"role": "system", "content": _texts(system, "system", "\n\n")})
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        role, content = message.get("role"), message.get("content")
        if unknown := message.keys() - {"role", "content"}:
            raise refused(f"{where}.{min(unknown)}", "is not supported")
        if role == "user":
            made += _anthropic_user(content, f"{where}.content")
        elif role == "assistant":
            made.append(_anthropic_assistant(content, f"{where}.content"))
        elif role == "system":
            made.append({"role": "system", "content": _texts(content, f"{where}.content", "\n\n")})
        else:
            raise refused(f"{where}.role", f"is {str(role)[:40]!r}, not user or assistant")
    if made and made[-1]["role"] == "assistant":
        raise refused("messages", "end with the assistant: an answer that has begun is not continued")
    return made


def _anthropic_user(content: Any, where: str) -> list[Message]:
    """Results of tools are messages of their own; text between them stays where it is."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    made: list[Message] = []
    for number, block in enumerate(_blocks(content, where)):
        place = f"{where}.{number}"
        if block.get("type") == "tool_result":
            result = _texts(block.get("content", ""), f"{place}.content", "\n")
            if block.get("is_error"):
                result = f"Error: {result}"
            made.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", place), "content": result})
        else:
            text = _text(block, place)
            if made and made[-1]["role"] == "user":
                made[-1]["content"] += f"\n\n{text}"
            else:
                made.append({"role": "user", "content": text})
    return made


def _anthropic_assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(_blocks(content, where)):
        place = f"{where}.{number}"
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                pass  # somebody else's thought, which nobody can read
            case "tool_use":
                arguments = block.get("input", {})
                function = {"name": _string(block, "name", place), "arguments": arguments}
                calls.append({"type": "function", "id": _string(block, "id", place), "function": function})
            case _:
                texts.append(_text(block, place))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _texts(content: Any, where: str, between: str) -> str:
    if isinstance(content, str):
        return content
    blocks = _blocks(content, where)
    return between.join(_text(block, f"{where}.{number}") for number, block in enumerate(blocks))


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise refused(where, f"content of type {str(block.get('type'))[:40]!r} is not supported, only text")
    return _string(block, "text", where)


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise refused(where, "is neither text nor a list of blocks")
    return content


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise refused(f"{where}.{name}", "is no text")
    return value


def anthropic_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools of Anthropic's dialect; those that its own servers would run are refused."""
    made = []
    for number, tool in enumerate(tools or []):
        where = f"tools.{number}"
        if tool.get("type", "custom") != "custom":
            raise refused(f"{where}.type", f"{str(tool['type'])[:40]!r} is not supported, only tools of the client")
        known = {"type", "name", "description", "input_schema", "cache_control", "eager_input_streaming", "strict"}
        if unknown := {name for name in tool if tool[name] is not None} - known:
            raise refused(f"{where}.{min(unknown)}", "is not supported")
        function = {"name": _string(tool, "name", where), "parameters": tool.get("input_schema", {})}
        if tool.get("description") is not None:
            function["description"] = _string(tool, "description", where)
        made.append({"type": "function", "function": function})
    return made or None


# ---- OpenAI's responses ----------------------------------------------------------------------------------------------


def response_messages(instructions: str | None, given: Any) -> list[Message]:
    """Instructions and input items of a response."""
    made: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}]
    for number, item in enumerate(_blocks(given, "input")):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        handler = _ITEMS.get(kind) if isinstance(kind, str) else None
        if handler is None:
            raise refused(f"{where}.type", f"{str(kind)[:40]!r} is not supported")
        handler(made, item, where)
    return made


def _message_item(made: list[Message], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise refused(f"{where}.role", f"is {str(role)[:40]!r}, not user, assistant, system or developer")
    message = {"role": role, "content": _item_text(item.get("content"), f"{where}.content")}
    if role == "assistant":
        _assistant(made)["content"] += message["content"]
    else:
        made.append(message)


def _reasoning_item(made: list[Message], item: Mapping[str, Any], where: str) -> None:
    content = item.get("content") or []
    texts = [_string(part, "text", f"{where}.content.{n}") for n, part in enumerate(_blocks(content, where))]
    if any(texts):
        message = _assistant(made, fresh=True)
        message["reasoning_content"] = "".join(texts)


def _call_item(made: list[Message], item: Mapping[str, Any], where: str) -> None:
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    call = {"type": "function", "id": _string(item, "call_id", where), "function": function}
    _assistant(made).setdefault("tool_calls", []).append(call)


def _output_item(made: list[Message], item: Mapping[str, Any], where: str) -> None:
    output = item.get("output")
    text = output if isinstance(output, str) else _item_text(output, f"{where}.output")
    made.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})


def _assistant(made: list[Message], fresh: bool = False) -> Message:
    """The turn of the assistant that is being told."""
    last = made[-1] if made else None
    if last is None or last["role"] != "assistant" or (fresh and (last["content"] or "tool_calls" in last)):
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _item_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(_blocks(content, where)):
        place = f"{where}[{number}]"
        if part.get("type") not in ("input_text", "output_text", "text"):
            raise refused(place, f"content of type {str(part.get('type'))[:40]!r} is not supported, only text")
        texts.append(_string(part, "text", place))
    return "".join(texts)


_ITEMS: dict[str, Callable[[list[Message], Mapping[str, Any], str], None]] = {
    "message": _message_item,
    "reasoning": _reasoning_item,
    "function_call": _call_item,
    "function_call_output": _output_item,
}


def response_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools of a response, which name their function without a wrapper."""
    made = []
    for number, tool in enumerate(tools or []):
        where = f"tools[{number}]"
        if tool.get("type") != "function":
            raise refused(f"{where}.type", f"{str(tool.get('type'))[:40]!r} is not supported, only 'function'")
        inner = {name: value for name, value in tool.items() if name not in ("type", "strict")}
        made.append({"type": "function", "function": inner})
    return made or None


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as a map; empty where the answer was cut off within them."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
