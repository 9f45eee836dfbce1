"""What a chat request may contain, and the form in which a chat template sees it.

Roles     system, developer (shown to the template as system), user, assistant, tool; in any order. Where a template
          refuses messages among which are later ones of the system, it is shown the order of `leading_system` instead;
          what it refuses then is refused with its reason.
Content   a string, or a list of parts of which only {"type": "text", "text": ...} is supported, joined without
          separator. It may be empty. An assistant message may leave it out (then it is empty).
assistant may carry `reasoning_content` or `reasoning` (strings) and `tool_calls`; a call's arguments arrive as the JSON
          text of an object or as an object, and the template sees an object.
tool      may carry `tool_call_id`. Every message may carry `name`.
Tools     a list of {"type": "function", "function": {"name", "description", "parameters"}}, which the template sees as
          they are.

Members with the value None count as absent; any other member is refused by name. Everything is bounded. Every fault is
a RequestError that names the place, as in `messages[2].content[0]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparkd.errors import RequestError
from sparkd.text.tokenizer import MAX_CHARACTERS

Json = Any

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_DEPTH = 64
#: Strings, numbers, lists and objects of one request together.
MAX_VALUES = 200_000
MAX_INTEGER_BITS = 1024

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MEMBERS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning_content", "reasoning", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}


class Bounds:
    """Counts what one request holds; `plain` copies a value while counting and checking it."""

    def __init__(self) -> None:
        self._values = 0
        self._characters = 0

    def plain(self, value: object, where: str, depth: int = MAX_DEPTH) -> Json:
        """A copy of a JSON value with plain types; RequestError if it is none or exceeds a bound."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise RequestError(f"the request holds more than {MAX_VALUES} values")
        if isinstance(value, str):
            return self.text(value, where)
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise RequestError(f"{where}: an integer of {value.bit_length()} bits is too large")
            return value
        if depth == 0:
            raise RequestError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            copied = {}
            for key, item in value.items():
                name = self.text(key, f"{where}: a member's name")
                copied[name] = self.plain(item, f"{where}.{name[:40]}", depth - 1)
            return copied
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return [self.plain(item, f"{where}[{index}]", depth - 1) for index, item in enumerate(value)]
        raise RequestError(f"{where} is {_kind(value)}, which is not a JSON value")

    def text(self, value: object, where: str) -> str:
        """`value` as a string that can be tokenized."""
        if not isinstance(value, str):
            raise RequestError(f"{where} is {_kind(value)}, not a string")
        self._characters += len(value)
        if self._characters > MAX_CHARACTERS:
            raise RequestError(f"the request holds more than {MAX_CHARACTERS} characters")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{where} holds a lone surrogate at character {error.start}") from None
        return value


def plain_messages(messages: Sequence[Mapping[str, Json]], bounds: Bounds) -> list[dict[str, Json]]:
    """Messages as the template sees them; RequestError where one breaks the rules above."""
    items = _list(messages, "messages", MAX_MESSAGES)
    if not items:
        raise RequestError("messages is empty", fix="send at least one message")
    return [_message(item, f"messages[{index}]", bounds) for index, item in enumerate(items)]


def leading_system(messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """The same conversation with at most one system message, which comes first.

    Those at the beginning become one, with blank lines between them; a later one becomes a message of the user.
    """
    first = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [message["content"] for message in messages[:first]]
    later = [
        {**message, "role": "user"} if message["role"] == "system" else dict(message) for message in messages[first:]
    ]
    return [{"role": "system", "content": "\n\n".join(texts)}, *later] if texts else later


def plain_tools(tools: Sequence[Mapping[str, Json]] | None, bounds: Bounds) -> list[dict[str, Json]] | None:
    """Tool definitions as the template sees them; None when there are none."""
    if tools is None:
        return None
    items = _list(tools, "tools", MAX_TOOLS)
    return [_tool(item, f"tools[{index}]", bounds) for index, item in enumerate(items)] or None


def _message(item: object, where: str, bounds: Bounds) -> dict[str, Json]:
    given = _members(item, where, None)
    sent_role = bounds.text(given.get("role"), f"{where}.role")
    role = _ROLES.get(sent_role)
    if role is None:
        raise RequestError(f"{where}.role is {sent_role[:40]!r}, not one of {', '.join(_ROLES)}")
    _members(item, where, _MEMBERS[role])
    message: dict[str, Json] = {"role": role}
    if "content" not in given and role != "assistant":
        raise RequestError(f"{where}.content is missing")
    message["content"] = _content(given.get("content", ""), f"{where}.content", bounds)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if name in given:
            message[name] = bounds.text(given[name], f"{where}.{name}")
    if "tool_calls" in given:
        calls = _list(given["tool_calls"], f"{where}.tool_calls", MAX_VALUES)
        message["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]", bounds) for i, c in enumerate(calls)]
    return message


def _content(content: object, where: str, bounds: Bounds) -> str:
    if isinstance(content, str):
        return bounds.text(content, where)
    texts = []
    for index, part in enumerate(_list(content, where, MAX_VALUES)):
        place = f"{where}[{index}]"
        given = _members(part, place, None)
        kind = given.get("type")
        if kind != "text":
            raise RequestError(f"{place}: content of type {str(kind)[:40]!r} is not supported, only 'text'")
        _members(part, place, {"type", "text"})
        texts.append(bounds.text(given.get("text"), f"{place}.text"))
    return "".join(texts)


def _call(item: object, where: str, bounds: Bounds) -> dict[str, Json]:
    given = _members(item, where, {"id", "type", "function", "index"})
    kind = given.get("type", "function")
    if kind != "function":
        raise RequestError(f"{where}: a call of type {str(kind)[:40]!r} is not supported, only 'function'")
    function = _members(given.get("function"), f"{where}.function", {"name", "arguments"})
    arguments = function.get("arguments", {})
    place = f"{where}.function.arguments"
    if isinstance(arguments, str):
        arguments = _parsed(bounds.text(arguments, place), place)
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{place} is {_kind(arguments)}, not a JSON object")
    name = bounds.text(function.get("name"), f"{where}.function.name")
    call: dict[str, Json] = {"function": {"name": name, "arguments": bounds.plain(arguments, place)}}
    call["type"] = "function"
    if "id" in given:
        call["id"] = bounds.text(given["id"], f"{where}.id")
    return call


def _parsed(text: str, where: str) -> Json:
    try:
        return json.loads(text or "{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be read as JSON: {str(error)[:80]}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _tool(item: object, where: str, bounds: Bounds) -> dict[str, Json]:
    given = _members(item, where, {"type", "function"})
    kind = given.get("type")
    if kind != "function":
        raise RequestError(f"{where}: a tool of type {str(kind)[:40]!r} is not supported, only 'function'")
    place = f"{where}.function"
    function = _members(given.get("function"), place, {"name", "description", "parameters", "strict"})
    bounds.text(function.get("name"), f"{place}.name")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise RequestError(f"{place}.parameters is {_kind(function['parameters'])}, not an object")
    if function.get("strict", False) is not False:
        raise RequestError(f"{place}.strict is not supported")
    shown = {name: value for name, value in function.items() if name != "strict"}
    return {"type": "function", "function": bounds.plain(shown, place)}


def _members(item: object, where: str, allowed: set[str] | None) -> dict[str, Json]:
    """The members that are not None; with `allowed`, RequestError for any other."""
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} is {_kind(item)}, not an object")
    given = {name: value for name, value in item.items() if value is not None}
    unknown = next((name for name in given if allowed is not None and name not in allowed), None)
    if unknown is not None:
        raise RequestError(f"{where}: member {str(unknown)[:40]!r} is not supported")
    return given


def _list(value: object, where: str, limit: int) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{where} is {_kind(value)}, not a list")
    if len(value) > limit:
        raise RequestError(f"{where} has {len(value)} entries, more than the limit of {limit}")
    return value


def _kind(value: object) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "missing" if value is None else names.get(type(value), f"a {type(value).__name__}")
