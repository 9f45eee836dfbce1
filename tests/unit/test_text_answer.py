"""Answers in parts: the same wherever they are cut, tolerant of markup that is slightly wrong."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkd.ipc.messages import Part
from sparkd.text.answer import AnswerParser, joined
from sparkd.text.markup import LAGUNA, QWEN, Syntax, syntax_of, typed

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"enum": ["a", "b"]},
                    "lines": {"type": "integer"},
                    "deep": {"type": ["object", "null"]},
                    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
QWEN_TWO = (
    "Let me look.\n</think>\n\nI will write.\n\n<tool_call>\n<function=write>\n<parameter=path>\n"
    "  a\n\nb \n</parameter>\n"
    "<parameter=lines>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
LAGUNA_TWO = (
    "Let me look.</think>I will write.\n<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>  a\n\nb </arg_value>\n"
    "<arg_key>lines</arg_key><arg_value>3</arg_value></tool_call>\n<tool_call>now\n</tool_call>\n"
)
TWO = [
    Part("reasoning", "Let me look."),
    Part("text", "I will write."),
    Part("call", '{"path": "  a\\n\\nb ", "lines": 3}', 0, "write"),
    Part("call", "{}", 1, "now"),
]


def read(syntax: Syntax, pieces: list[str], *, thinking: bool = False, tools: Any = TOOLS, cut: bool = False) -> Any:
    parser = AnswerParser(syntax, tools, thinking=thinking)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.finish(cut=cut)])


def call(name: str, number: int = 0, /, **arguments: Any) -> Part:
    return Part("call", json.dumps(arguments, ensure_ascii=False), number, name)


@pytest.mark.parametrize(("syntax", "text"), [(QWEN, QWEN_TWO), (LAGUNA, LAGUNA_TWO)])
def test_two_calls_cut_at_every_place_are_the_calls_of_the_whole_text(syntax: Syntax, text: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert read(syntax, pieces, thinking=True) == TWO


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "write>", "now>", "</function>"),
    *("<parameter=", "path>", "lines>", "</parameter>", "\n", "3", "a", "<", "&", "{", "}", '"', " "),
    *("write", "now", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "path", "either", "é", "</"),
    "<tool_call>\n<function=write>\n<parameter=path>\n",
    "\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>",
    "</arg_value>\n</tool_call>",
]


@settings(deadline=None)
@given(
    st.sampled_from([QWEN, LAGUNA]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@example(QWEN, "x<tool_call>\n<function=now>", [1], False, True, True)
def test_every_cut_of_any_text_gives_the_same_parts(
    syntax: Syntax, text: str, cuts: list[int], thinking: bool, tools: bool, cut: bool
) -> None:
    places = sorted({0, len(text), *(at for at in cuts if at < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    given_tools = TOOLS if tools else []
    whole = read(syntax, [text], thinking=thinking, tools=given_tools, cut=cut)
    assert read(syntax, pieces, thinking=thinking, tools=given_tools, cut=cut) == whole
    assert read(syntax, list(text), thinking=thinking, tools=given_tools, cut=cut) == whole
    calls = [part for part in whole if part.kind == "call"]
    assert [part.call for part in calls] == list(range(len(calls))) and all(part.name for part in calls)
    for part in calls[:-1] if cut else calls:
        assert isinstance(json.loads(part.text), dict)


@settings(deadline=None)
@given(st.sampled_from([QWEN, LAGUNA]), st.text())
def test_any_string_is_an_argument_unharmed(syntax: Syntax, value: str) -> None:
    if syntax is QWEN:
        text = f"<tool_call>\n<function=write>\n<parameter=path>\n{value}\n</parameter>\n</function>\n</tool_call>"
    else:
        text = f"<tool_call>write<arg_key>path</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert read(syntax, list(text)) == [call("write", path=value)]


def test_text_without_markup_is_text_to_the_letter() -> None:
    for text in (
        "a < b <tool> <functional> </think",
        "code:\n  x\n\n  y\n",
        "what does </think> mean?",
        "<tool_call> is",
    ):
        assert read(QWEN, list(text)) == [Part("text", text)]
    assert read(QWEN, ["\n\n Hello. \n"]) == [Part("text", "Hello. \n")]
    assert read(QWEN, []) == [] == read(LAGUNA, ["\n"])


def test_without_tools_a_call_is_text() -> None:
    text = "<tool_call>now</tool_call>"
    assert read(LAGUNA, [text], tools=[]) == [Part("text", text)]


def test_a_thought_that_is_opened_or_closed_without_need_is_no_text() -> None:
    assert read(LAGUNA, ["<think>\nHm.\n</think>\nYes."]) == [Part("reasoning", "Hm."), Part("text", "Yes.")]
    assert read(LAGUNA, ["</think>Yes."]) == [Part("text", "Yes.")]
    assert read(QWEN, ["Hm. <", "/"], thinking=True) == [Part("reasoning", "Hm. </")]


def test_a_call_ends_a_thought_if_the_tool_exists() -> None:
    known = "Hm.\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert read(QWEN, [known], thinking=True) == [Part("reasoning", "Hm."), call("now")]
    unknown = known.replace("now", "such")
    assert read(QWEN, [unknown], thinking=True) == [Part("reasoning", unknown)]
    assert read(QWEN, [unknown]) == [Part("text", "Hm."), call("such")]


VALUES = [
    "if a < b: pass",
    "</parameter>",
    "x </parameter> y",
    "<parameter=path>",
    "</tool_call> x",
    "a\n</parameter>\nb",
]


@pytest.mark.parametrize("value", [*VALUES, "<function=now>", "<tool_call>", "", "\n", " x\n", "</arg_value> </arg"])
def test_a_value_may_contain_what_looks_like_its_end(value: str) -> None:
    text = f"<tool_call>\n<function=write>\n<parameter=path>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert read(QWEN, list(text)) == [call("write", path=value)]
    text = f"<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>\n"
    assert read(LAGUNA, list(text)) == [call("write", path=value)]


WRONG = [
    (QWEN, "<function=now>\n</function>", [call("now")]),
    (QWEN, "<function=now>\n</function>\n</tool_call>", [call("now")]),
    (QWEN, "<tool_call>\n<function=now>", [call("now")]),
    (
        QWEN,
        "<tool_call><function=write><parameter=path>x</parameter></function></tool_call>",
        [call("write", path="x")],
    ),
    (QWEN, "<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>", [call("write", path="x")]),
    (QWEN, "<tool_call>\n<function=write>\n<parameter=path>\nx\n", [call("write", path="x")]),
    (QWEN, "<tool_call>\n<function=write>\n<parameter=path>\nx\n</function>\n</tool_call>", [call("write", path="x")]),
    (QWEN, "<tool_call>\n<function=write>\n<parameter=path>\nx\n</tool_call>", [call("write", path="x")]),
    (QWEN, "<tool_call>\n<function=now>\nSo.", [call("now"), Part("text", "So.")]),
    (QWEN, "<tool_call>\nnow()\n</tool_call>", [Part("text", "<tool_call>\nnow()\n</tool_call>")]),
    (QWEN, "<function=such>", [Part("text", "<function=such>")]),
    (QWEN, "<tool_call>\n<function=now>\n</function>\n</tool_call>\n So.", [call("now"), Part("text", "So.")]),
    (LAGUNA, "<tool_call>now", [call("now")]),
    (LAGUNA, "<tool_call>now ", [call("now")]),
    (LAGUNA, "<tool_call>such", [Part("text", "<tool_call>such")]),
    (LAGUNA, "<tool_call>write<arg_key>path<arg_value>x</arg_value></tool_call>", [call("write", path="x")]),
    (LAGUNA, "<tool_call>write<arg_key>path</arg_key><arg_value>x</tool_call>", [call("write", path="x")]),
    (LAGUNA, "<tool_call>write<arg_key>path</arg_key><arg_value>x", [call("write", path="x")]),
    (LAGUNA, '<tool_call>{"name": "now"}</tool_call>', [Part("text", '<tool_call>{"name": "now"}</tool_call>')]),
]


@pytest.mark.parametrize(("syntax", "text", "parts"), WRONG)
def test_what_is_slightly_wrong_is_repaired_or_passed_on(syntax: Syntax, text: str, parts: list[Part]) -> None:
    assert read(syntax, [text]) == parts == read(syntax, list(text))


def test_half_a_call_is_no_json_and_half_a_tag_no_text() -> None:
    whole = read(QWEN, ["<tool_call>\n<function=write>\n<parameter=path>\nrm -rf /tm"], cut=True)
    assert whole == [Part("call", '{"path": "rm -rf /tm', 0, "write")]
    with pytest.raises(json.JSONDecodeError):
        json.loads(whole[0].text)
    assert read(QWEN, ["So.\n<tool_call>\n<func"], cut=True) == [Part("text", "So.")]
    assert read(QWEN, ["a <"], cut=True) == [Part("text", "a <")]


TYPED = [
    ("3", ["integer"], "3"),
    ("3.0", ["integer"], "3"),
    ("3.5", ["number"], "3.5"),
    ("three", ["integer"], '"three"'),
    ("True", ["boolean"], "true"),
    ("FALSE", ["boolean"], "false"),
    ("None", ["string", "null"], "null"),
    ("3", ["string", "null"], '"3"'),
    (' {"a": [1]} ', ["object"], '{"a": [1]}'),
    ("[1, 2", ["array"], '"[1, 2"'),
    ("3", [], "3"),
    ('"x"', [], '"\\"x\\""'),
    ("x", [], '"x"'),
    ("NaN", ["number"], '"NaN"'),
    ("1e999", ["number"], '"1e999"'),
    ("[" * 100_000, ["array"], json.dumps("[" * 100_000)),
    ("9" * 5000, ["integer"], json.dumps("9" * 5000)),
]


@pytest.mark.parametrize(("raw", "types", "expected"), TYPED)
def test_arguments_get_the_type_that_their_schema_names(raw: str, types: list[str], expected: str) -> None:
    assert typed(raw, frozenset(types)) == expected


def test_schemas_of_any_kind_are_understood_or_left_alone() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": 7}}}}, {"function": None}, {}]
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>x</arg_value>"
    assert read(LAGUNA, [text], tools=tools) == [call("f", a=1, b="x")]
    text = "<tool_call>write<arg_key>either</arg_key><arg_value>None</arg_value><arg_key>text</arg_key><arg_value>1"
    assert read(LAGUNA, [text]) == [call("write", either=None, text="1")]


def test_each_family_has_its_syntax() -> None:
    assert syntax_of("laguna") is LAGUNA and syntax_of("qwen35moe") is QWEN
    assert {"<tool_call>", "<think>", "<arg_key>"} <= LAGUNA.texts
    assert QWEN.opener("now") == ("<tool_call>\n<function=", "now>\n") and LAGUNA.opener("") == ("<tool_call>", "")
