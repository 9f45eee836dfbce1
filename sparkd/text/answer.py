"""An answer while it arrives: thought, text, and calls of tools, the same wherever the pieces are cut.

                    ┌────── <think> ───────┐   ┌───── a stray tag ─────┐
                    ▼                      │   ▼                       │
    (inside one) ─► thought ─ </think> ─► start ─── other text ───► text
                    │                      ▲   ▲                       │
                    │  (else) ─────────────┘   └── ends ── call ◄──────┤ a call
                    └───── a call of a tool that exists ──► ▲  │ key   │
                                                 value ends └─ value   │

White space around markup is dropped, everything else that is not markup comes out: what only looks like markup is text,
and what is slightly wrong is read as what it means. A tag within a value is part of it unless what follows shows that
it ends there. Arguments come out as pieces of one JSON object; text of string arguments as it arrives, others whole.
An answer that was cut off (its length, a stop string) leaves that object unfinished: nobody shall act on half a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparkd.ipc.messages import Part
from sparkd.text.markup import (
    CALL,
    THINK,
    THINK_END,
    UNSURE,
    Syntax,
    Tag,
    Tools,
    best,
    call_opening,
    closing,
    key_opening,
    literal,
    skip_space,
    typed,
)

_State = Callable[[bool], bool]
_STRING = frozenset(["string"])


class AnswerParser:
    """Reads one answer. `thinking`: the prompt ended inside a thought. Without tools there are no calls, only text.

    `begun`: the first words of the answer, which the prompt ended with; what they say comes out with the first `push`.
    """

    def __init__(self, syntax: Syntax, tools: Sequence[Mapping[str, Any]], *, thinking: bool, begun: str = "") -> None:
        self._syntax = syntax
        self._tools = Tools(tools)
        self._state: _State = self._before_thought if thinking else self._start
        self._held = begun
        self._parts: list[Part] = []
        #: Calls that have begun.
        self._calls = 0
        self._tool = ""
        #: Of the call that is being read: whether it has arguments already, and what is known of the current one.
        self._arguments = False
        self._types = _STRING
        self._raw: list[str] = []

    def push(self, text: str) -> list[Part]:
        """Take the next piece of the answer; returns what has become certain."""
        self._held += text
        return self._read(over=False)

    def finish(self, *, cut: bool) -> list[Part]:
        """The answer is over; `cut`: not by the model's own will. Returns the rest."""
        if cut and self._in_call:
            return []
        return self._read(over=True)

    @property
    def thinking(self) -> bool:
        """Whether a thought is open."""
        return self._state in (self._before_thought, self._thought)

    @property
    def _in_call(self) -> bool:
        """Whether what is held belongs to a call."""
        if self._state in (self._call, self._first, self._value):
            return True
        return bool(self._tools.names) and self._held.lstrip().startswith((CALL, self._syntax.function or CALL))

    def _read(self, over: bool) -> list[Part]:
        while self._state(over):
            pass
        parts, self._parts = self._parts, []
        return joined(parts)

    # ---- states: take something of what is held and return true, or wait for more ----

    def _start(self, over: bool) -> bool:
        self._held = self._held[skip_space(self._held, 0) :]
        opened, closed = (literal(self._held, 0, tag, over) for tag in (THINK, THINK_END))
        found = best(opened, closed)
        if not self._held or found is UNSURE:
            return False
        if found is None:
            self._state = self._text
            return True
        self._held = self._held[found.end :]
        if found is opened:
            self._state = self._before_thought
        return True

    def _before_thought(self, over: bool) -> bool:
        self._held = self._held[skip_space(self._held, 0) :]
        if not self._held:
            return False
        self._state = self._thought
        return True

    def _thought(self, over: bool) -> bool:
        def tag(at: int) -> Tag | None:
            return best(literal(self._held, at, THINK_END, over), self._opening(at, True, over))

        return self._prose("reasoning", tag, over)

    def _text(self, over: bool) -> bool:
        def tag(at: int) -> Tag | None:
            # Tags that a call has left behind.
            strays = self._syntax.call_ends if self._calls else ()
            return best(*(literal(self._held, at, end, over) for end in strays), self._opening(at, False, over))

        return self._prose("text", tag, over)

    def _call(self, over: bool) -> bool:
        """Between the arguments of a call."""
        at = skip_space(self._held, 0)
        end = best(*(literal(self._held, at, tag, over) for tag in self._syntax.call_ends))
        key = key_opening(self._syntax, self._held, at, over)
        found = best(end, key)
        if found is not None and not found.sure:
            return False
        self._held = self._held[at if found is None else found.end :]
        if found is not None and found is key:
            self._begin_value(key.name)
        else:
            self._end_call()
        return True

    def _first(self, over: bool) -> bool:
        """The line break that belongs to the tag before a value."""
        if self._syntax.newline:
            if not self._held and not over:
                return False
            self._held = self._held.removeprefix("\n")
        self._state = self._value
        return True

    def _value(self, over: bool) -> bool:
        """Within a value: give out what cannot belong to the tag that ends it."""
        held, ends_value, found, end = self._held, False, None, len(self._held)
        for at in _places(held):
            tags = [closing(held, at, tag, following, over) for tag, following in self._syntax.followers.items()]
            found = best(*tags)
            if found is not None:
                ends_value, end = found is tags[0], at
                break
        body = held[:end]
        if self._syntax.newline:
            body = body.removesuffix("\n")
        self._argument(body)
        if not over and (found is None or not found.sure):
            self._held = held[len(body) :]
            return False
        self._held = held[len(held) if found is None else found.end :]
        self._end_value()
        if ends_value:
            self._state = self._call
        else:
            self._end_call()
        return True

    # ---- inside ----

    def _prose(self, kind: str, tag: Callable[[int], Tag | None], over: bool) -> bool:
        """Give out text up to the first tag and the white space before it."""
        held, found, end = self._held, None, len(self._held)
        for at in _places(held):
            found = tag(at)
            if found is not None:
                end = at
                break
        certain = held[:end]
        if found is not None or not over:
            certain = certain.rstrip()
        if certain:
            self._parts.append(Part(kind, certain))
        if found is None or not found.sure:
            self._held = held[len(certain) :]
            return False
        self._held = held[found.end :]
        if found.name:
            self._begin_call(found.name)
        else:
            self._state = self._start
        return True

    def _opening(self, at: int, strict: bool, over: bool) -> Tag | None:
        if not self._tools.names:
            return None
        return call_opening(self._syntax, self._held, at, self._tools.names, strict, over)

    def _begin_call(self, name: str) -> None:
        self._parts.append(Part("call", "{", self._calls, name))
        self._calls += 1
        self._tool = name
        self._arguments = False
        self._state = self._call

    def _end_call(self) -> None:
        self._emit("}")
        self._state = self._start

    def _begin_value(self, key: str) -> None:
        self._types = self._tools.types(self._tool, key)
        self._raw = []
        self._emit((", " if self._arguments else "") + json.dumps(key, ensure_ascii=False) + ": ")
        if self._types == _STRING:
            self._emit('"')
        self._arguments = True
        self._state = self._first

    def _argument(self, text: str) -> None:
        if self._types == _STRING:
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._raw.append(text)

    def _end_value(self) -> None:
        self._emit('"' if self._types == _STRING else typed("".join(self._raw), self._types))

    def _emit(self, text: str) -> None:
        """More of the arguments of the call that is being read."""
        if text:
            self._parts.append(Part("call", text, self._calls - 1))


def _places(text: str) -> Iterator[int]:
    """Where tags may begin."""
    at = text.find("<")
    while at >= 0:
        yield at
        at = text.find("<", at + 1)


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same with neighbours that belong together in one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last is not None and last.kind == part.kind and last.call == part.call and not part.name:
            result[-1] = Part(last.kind, last.text + part.text, last.call, last.name)
        else:
            result.append(part)
    return result
