"""Keeps control tokens that users spell out of prompts.

A template mixes its own control tokens with text of users. Before rendering, every place in a user's text where a
control token begins gets its first character replaced by a *placeholder*: a character that occurs nowhere in the
request or the template. After rendering, all control tokens that the prompt spells are the template's own; the text
between them gets its characters back and is tokenized without control tokens.

Three kinds of places (T is a control token's text):

    whole    T itself
    end      the text ends (white space aside) with a beginning of T, which what follows could complete
    start    the text starts with an ending of T, or is a middle part of it, and one of the template's constant texts
             ends with the beginning that it lacks

A template that cuts texts apart at other places or changes their letters is outside of what this guards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sparkd.errors import RequestError

Json = Any

#: Placeholders come from here (CJK ideographs, extension B to F): printable, caseless, not white space.
_CANDIDATES = (*range(0x20000, 0x2A6E0), *range(0x2A700, 0x2EBE0))

#: Names that templates test or look up; they stay as they are wherever they are a whole string.
SPARED = frozenset(
    [
        *("role", "system", "user", "assistant", "tool"),
        *("content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"),
        *("id", "type", "function", "arguments", "description", "parameters", "strict"),
        *("messages", "tools", "options", "properties", "required", "enum", "items"),
        *("object", "array", "string", "number", "integer", "boolean", "null"),
    ]
)


class Escape:
    """Finds and replaces; `literals` are the constant texts of the template."""

    def __init__(self, control_texts: Iterable[str], literals: Sequence[str]) -> None:
        texts = sorted(text for text in set(control_texts) if text)
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        ends = {literal[-self._longest :] for literal in literals}
        self._continuations = {
            text[n:] for text in texts for n in range(1, len(text)) if any(end.endswith(text[:n]) for end in ends)
        }
        self._whole = texts
        self._template_characters = set("".join(literals))

    def places(self, text: str) -> set[int]:
        """Indices of the characters that must be replaced."""
        found = set()
        for whole in self._whole:
            index = text.find(whole)
            while index >= 0:
                found.add(index)
                index = text.find(whole, index + 1)
        end = len(text.rstrip())
        for index in range(max(0, end - self._longest), end):
            if text[index:end] in self._beginnings:
                found.add(index)
        if self._continuations:
            start = len(text) - len(text.lstrip())
            inner = text[start:end]
            if inner and any(inner.startswith(rest) or rest.startswith(inner) for rest in self._continuations):
                found.add(start)
        return found

    def apply(self, value: Json) -> tuple[Json, Restore | None]:
        """A copy of a JSON value with all its strings (and member names) escaped, and what restores them in rendered
        text; None if nothing had to be escaped.

        Raises RequestError if the request leaves no character free to stand for another.
        """
        strings = set(strings_of(value))
        places = {text: found for text in strings - SPARED if (found := self.places(text))}
        if not places:
            return value, None
        needed = {text[index] for text, found in places.items() for index in found}
        placeholders = self._placeholders(needed, strings)

        def escaped(text: str) -> str:
            pieces, position = [], 0
            for index in sorted(places.get(text, ())):
                pieces += [text[position:index], placeholders[text[index]]]
                position = index + 1
            return "".join(pieces) + text[position:]

        return map_strings(value, escaped), Restore(placeholders)

    def _placeholders(self, needed: set[str], strings: set[str]) -> dict[str, str]:
        used = self._template_characters.union(*strings)
        free = (
            character
            for character in map(chr, _CANDIDATES)
            if character not in used and not any(_json(character) in text for text in strings)
        )
        chosen = dict(zip(sorted(needed), free, strict=False))
        if len(chosen) < len(needed):
            raise RequestError(
                "the request spells control tokens and uses too many different characters to escape them"
            )
        return chosen


class Restore:
    """Gives the characters back."""

    def __init__(self, placeholders: Mapping[str, str]) -> None:
        self._table = {ord(new): old for old, new in placeholders.items()}
        self._json = {_json(new): _json(old) for old, new in placeholders.items()}

    def __call__(self, text: str) -> str:
        """The rendered `text` as users meant it, also where the template wrote JSON restricted to ASCII."""
        for new, old in self._json.items():
            text = text.replace(new, old)
        return text.translate(self._table)


def _json(character: str) -> str:
    return json.dumps(character)[1:-1]


def strings_of(value: Json) -> Iterator[str]:
    """Every string in a JSON value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from strings_of(item)


def map_strings(value: Json, change: Callable[[str], str]) -> Json:
    """A copy of a JSON value with `change` applied to every string in it and to every member's name."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return value
