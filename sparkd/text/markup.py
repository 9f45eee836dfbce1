"""How the model families write calls of tools, and how the values of arguments are typed.

qwen      <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n ... </function>\\n</tool_call>
laguna    <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n ... </tool_call>

White space between tags does not count. `answer.py` reads this while it arrives.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any

CALL = "<tool_call>"
CALL_END = "</tool_call>"
THINK = "<think>"
THINK_END = "</think>"

#: Longest name of a tool or argument; what is longer is no name.
_LONGEST_NAME = 256
_NAME = re.compile(r"\s*([^\s<>{}]*)\s*")
_KEY = re.compile(r"\s*([^\n<>]*)\s*")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
#: How models that have read much Python spell what JSON spells in small letters.
_PYTHON = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True, slots=True)
class Syntax:
    """One family's tags. `key_end` are the tags that stand between a key and its value.

    `followers`: for each tag that may end a value, what must come next (white space aside) for it to be a tag and not
    part of the value; the end of the answer always may. `newline`: one line break belongs to each tag around a value.
    """

    function: str
    function_end: str
    key: str
    key_end: tuple[str, ...]
    followers: Mapping[str, tuple[str, ...]]
    newline: bool

    @property
    def call_ends(self) -> tuple[str, ...]:
        """Tags that end a call."""
        return tuple({self.function_end: None, CALL_END: None})

    @property
    def texts(self) -> frozenset[str]:
        """All tags, for a detokenizer that must not drop them."""
        tags = {CALL, CALL_END, THINK, THINK_END, self.function_end, self.key, *self.key_end, *self.followers}
        return frozenset(tags - {""})

    def opener(self, name: str) -> tuple[str, str]:
        """What begins a call (tags) and names the tool (text); with an empty name the model is left to name it."""
        if self.function:
            return f"{CALL}\n{self.function}", f"{name}>\n" if name else ""
        return CALL, f"{name}\n" if name else ""


QWEN = Syntax(
    function="<function=",
    function_end="</function>",
    key="<parameter=",
    key_end=(">",),
    followers={
        "</parameter>": ("<parameter=", "</function>", CALL_END, CALL, "<function="),
        "</function>": (CALL_END, CALL),
        CALL_END: (CALL,),
    },
    newline=True,
)
LAGUNA = Syntax(
    function="",
    function_end=CALL_END,
    key="<arg_key>",
    key_end=("</arg_key>", "<arg_value>"),
    followers={"</arg_value>": ("<arg_key>", CALL_END, CALL), CALL_END: (CALL,)},
    newline=False,
)


def syntax_of(architecture: str) -> Syntax:
    """The tags that models of an architecture write."""
    return LAGUNA if architecture == "laguna" else QWEN


@dataclass(frozen=True, slots=True)
class Tag:
    """What was found at a place: `end` is where it ends. `sure` is false while more text could change that."""

    end: int
    name: str = ""
    sure: bool = True


#: What follows decides.
UNSURE = Tag(0, sure=False)


def best(*tags: Tag | None) -> Tag | None:
    """The one that is there for sure, else one that may come to be."""
    found = [tag for tag in tags if tag is not None]
    return next((tag for tag in found if tag.sure), found[0] if found else None)


def literal(text: str, at: int, tag: str, over: bool) -> Tag | None:
    """`tag` at a place of `text`; `over`: nothing follows the text."""
    if text.startswith(tag, at):
        return Tag(at + len(tag))
    return UNSURE if not over and tag.startswith(text[at:]) else None


def skip_space(text: str, at: int) -> int:
    """The next place that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def closing(text: str, at: int, tag: str, followers: Sequence[str], over: bool) -> Tag | None:
    """`tag` at a place, if what follows it shows that it is one."""
    found = literal(text, at, tag, over)
    if found is None or not found.sure:
        return found
    next_at = skip_space(text, found.end)
    if next_at == len(text):
        return found if over else UNSURE
    next_tag = best(*(literal(text, next_at, follower, over) for follower in followers))
    return found if next_tag is not None and next_tag.sure else next_tag


def call_opening(syntax: Syntax, text: str, at: int, names: frozenset[str], strict: bool, over: bool) -> Tag | None:
    """The beginning of a call at a place, up to behind the tool's name.

    `strict`: only a tool that exists is one; the same is asked of a call without its outer tag.
    """
    outer = literal(text, at, CALL, over)
    if outer is not None and not outer.sure:
        return outer
    if outer is None and not syntax.function:
        return None
    start = skip_space(text, outer.end) if outer is not None else at
    if start == len(text):
        return None if over else UNSURE
    if syntax.function:
        function = literal(text, start, syntax.function, over)
        if function is None or not function.sure:
            return function
        found = _name(_NAME, text, function.end, (">",), over)
    else:
        found = _name(_NAME, text, start, (syntax.key, CALL_END), over)
    if found is None or not found.sure:
        return found
    cut_off = found.end == len(text)
    if found.name not in names and (strict or outer is None or cut_off):
        return None
    return Tag(found.end + (1 if syntax.function and not cut_off else 0), found.name)


def key_opening(syntax: Syntax, text: str, at: int, over: bool) -> Tag | None:
    """An argument's key at a place, up to where its value begins."""
    found = literal(text, at, syntax.key, over)
    if found is None or not found.sure:
        return found
    key = _name(_KEY, text, found.end, syntax.key_end, over)
    if key is None or not key.sure:
        return key
    end = key.end
    for tag in syntax.key_end:
        closed = literal(text, skip_space(text, end), tag, over)
        if closed is not None and not closed.sure:
            return closed
        if closed is None and tag == syntax.key_end[-1]:
            return None
        end = end if closed is None else closed.end
    return Tag(end, key.name)


def _name(shape: re.Pattern[str], text: str, at: int, tags: Sequence[str], over: bool) -> Tag | None:
    """A name that stands between white space before one of `tags`; its end is where the tag begins."""
    found = shape.match(text, at)
    if found is None or len(found[1].strip()) > _LONGEST_NAME:
        return None
    end, name = found.end(), found[1].strip()
    closed = best(*(literal(text, end, tag, over) for tag in tags))
    if (closed is not None and closed.sure) or (over and end == len(text)):
        return Tag(end, name) if name else None
    return closed


class Tools:
    """The tools of a request, as far as reading calls needs them."""

    def __init__(self, tools: Sequence[Mapping[str, Json]]) -> None:
        """`tools` may be wrong in any way: who renders them says so."""
        self._parameters: dict[str, Mapping[str, Json]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                properties = schema.get("properties") if isinstance(schema, Mapping) else None
                self._parameters[function["name"]] = properties if isinstance(properties, Mapping) else {}
        self.names = frozenset(self._parameters)

    def types(self, tool: str, key: str) -> frozenset[str]:
        """The JSON types an argument may have; empty when its schema does not say."""
        return frozenset(_schema_types(self._parameters.get(tool, {}).get(key)))


def _schema_types(schema: Json, depth: int = 8) -> set[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind} & _TYPES.keys()
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)} & _TYPES.keys()
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            found = [_schema_types(item, depth - 1) for item in schema[union]]
            return set().union(*found) if all(found) else set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    return set()


def typed(raw: str, types: frozenset[str]) -> str:
    """The JSON text of an argument that a model wrote as `raw`: parsed where its types ask for that, else a string."""
    try:
        value = _parsed(raw.strip())
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    if not types:
        fits = not isinstance(value, str)
    else:
        fits = "string" not in types or (not isinstance(value, str) and any(_is(value, kind) for kind in types))
    return json.dumps(value if fits else raw, ensure_ascii=False)


def _is(value: Json, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _parsed(text: str) -> Json:
    if text.lower() in _PYTHON:
        return _PYTHON[text.lower()]
    value = json.loads(text, parse_constant=_no_constant)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("too large")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(name)
