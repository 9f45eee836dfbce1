"""Chat templates: layout, rules of messages, bounds, and control tokens that only the template can write."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import GgufBytes
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import ModelFileError, RequestError, UnsupportedError
from sparkd.gguf.metadata import Metadata
from sparkd.gguf.model_file import ModelFile
from sparkd.gguf.reader import parse_header
from sparkd.text.chat import ChatTemplate
from sparkd.text.renderer import CPU_SECONDS, MEMORY_BYTES, Renderer
from sparkd.text.tokenizer import MAX_CHARACTERS, Tokenizer, TokenType

DEMO = Path(__file__).parents[2] / "sparkd/demo/spark-demo-laguna.gguf"

CONTROL = ["〈|EOS|〉", "<assistant>", "</assistant>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>"]


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, no merges, and added tokens of both families."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = [chr(byte) for byte in visible] + [chr(256 + i) for i in range(256 - len(visible))]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(CONTROL) + [TokenType.USER_DEFINED] * 3
    return Tokenizer(
        [*symbols, *CONTROL, *USER_DEFINED], types, [], "qwen2", bos_id=256, eos_id=256, add_bos=True, ending_ids=[256]
    )


TOKENIZER = byte_tokenizer()

CHATML = """
{%- if messages[0].role == 'system' %}
    {%- set ns = namespace(rest=messages[1:], system=messages[0].content) %}
{%- else %}
    {%- set ns = namespace(rest=messages, system='') %}
{%- endif %}
{%- if tools or ns.system %}
    {{- '<|im_start|>system\\n' }}
    {%- if tools %}
        {{- '# Tools\\n<tools>\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson + '\\n' }}
        {%- endfor %}
        {{- '</tools>\\n' }}
    {%- endif %}
    {{- ns.system | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in ns.rest %}
    {%- if message.role == 'system' %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.role == 'assistant' %}
            {%- generation %}
                {%- if message.reasoning_content %}
                    {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
                {%- endif %}
            {{- message.content | trim }}
            {%- for call in message.tool_calls or [] %}
                {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
                {%- for key, value in call.function.arguments.items() %}
                    {%- if value is none %}{% continue %}{% endif %}
                    {{- '<parameter=' + key + '>\\n' }}
                    {{- value | tojson if value is mapping or value is iterable and value is not string else value }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
            {%- endgeneration %}
        {%- else %}
            {{- message.content | trim }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TOOL = {"type": "function", "function": {"name": "now", "description": "über <b>", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def chatml() -> Iterator[ChatTemplate]:
    template = ChatTemplate(CHATML, TOKENIZER)
    yield template
    template.close()


@pytest.fixture(scope="module")
def chatml_renderer() -> Iterator[Renderer]:
    renderer = Renderer(CHATML, "")
    yield renderer
    renderer.close()


def laguna_file(template: str, architecture: str = "laguna") -> Metadata:
    file = GgufBytes().text("general.architecture", architecture).text("tokenizer.chat_template", template)
    raw = file.build()
    return parse_header(raw, len(raw), "small.gguf").metadata


@pytest.fixture(scope="module")
def laguna() -> Iterator[ChatTemplate]:
    template = ChatTemplate.from_metadata(laguna_file("{#- c -#}\n{% include 'chat_template.jinja' %}\n"), TOKENIZER)
    yield template
    template.close()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}


def render(source: str, messages: list[Any] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, TOKENIZER, "small.gguf")
    try:
        return template.encode(messages or [user("x")], options=options).text
    finally:
        template.close()


# Layout


def test_the_demo_model_gets_the_prompt_its_card_describes() -> None:
    metadata = ModelFile.open(DEMO).metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    template = ChatTemplate.from_metadata(metadata, tokenizer)
    plain = template.encode([user("Define moon.")])
    thinking = template.encode([user("Define moon.")], options={"enable_thinking": True})
    template.close()
    start = "<|im_start|>user\nDefine moon.<|im_end|>\n<|im_start|>assistant\n"
    assert plain.text == start + "<think>\n\n</think>\n\n"
    assert thinking.text == start + "<think>\n"
    assert plain.ids == tokenizer.encode(plain.text, special=True)


def test_thinking_is_the_templates_default_and_can_be_switched_off(chatml: ChatTemplate) -> None:
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert chatml.encode([user("Hi")]).text == start
    assert chatml.encode([user("Hi")], options={"enable_thinking": False}).text == start + "\n</think>\n\n"
    assert chatml.encode([user("Hi")], add_generation_prompt=False).text == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([user("Hi")], {}, "〈|EOS|〉<user>\nHi\n</user>\n<assistant>\n</think>"),
        ([user("Hi")], {"enable_thinking": True}, "〈|EOS|〉<user>\nHi\n</user>\n<assistant>\n<think>"),
        (
            [{"role": "system", "content": "Be brief.  "}, user("Hi")],
            {},
            "〈|EOS|〉<system>\n\nBe brief.\n</system>\n<user>\nHi\n</user>\n<assistant>\n</think>",
        ),
        (
            [user("Hi"), call('{"k": "v", "n": [1, null]}'), {"role": "tool", "content": "ok"}],
            {},
            "〈|EOS|〉<user>\nHi\n</user>\n<assistant>\n</think>\n<tool_call>f\n<arg_key>k</arg_key>\n"
            "<arg_value>v</arg_value>\n<arg_key>n</arg_key>\n<arg_value>[1, null]</arg_value>\n</tool_call>\n"
            "</assistant>\n<tool_response>\nok\n</tool_response>\n<assistant>\n</think>",
        ),
        (
            [user("Hi"), {"role": "assistant", "content": " Yes. ", "reasoning": "short"}, user("?")],
            {},
            "〈|EOS|〉<user>\nHi\n</user>\n<assistant>\n<think>\nshort\n</think>\nYes.\n</assistant>\n"
            "<user>\n?\n</user>\n<assistant>\n</think>",
        ),
    ],
)
def test_a_laguna_file_that_includes_its_template_gets_the_built_in_layout(
    laguna: ChatTemplate, messages: list[Any], options: dict[str, Any], expected: str
) -> None:
    prompt = laguna.encode(messages, options=options)
    assert prompt.text == expected
    assert prompt.ids == TOKENIZER.encode(expected, special=True)
    assert prompt.ids.count(256) == 1, "one BOS, the template's"


def test_laguna_tools_stand_one_json_a_line_without_escaping(laguna: ChatTemplate) -> None:
    text = laguna.encode([user("Hi")], [TOOL, TOOL]).text
    line = (
        '{"type": "function", "function": {"name": "now", "description": "über <b>", "parameters": {"type": "object"}}}'
    )
    assert text.startswith("〈|EOS|〉<system>\n\n### Tools\n\n")
    assert f"<available_tools>\n{line}\n{line}\n</available_tools>" in text


def test_an_include_in_another_architecture_and_a_missing_template_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"small\.gguf: the chat template only includes another file"):
        ChatTemplate.from_metadata(laguna_file("{%- include 'x' -%}", "qwen35moe"), TOKENIZER)
    with pytest.raises(UnsupportedError, match=r"small\.gguf: the model has no chat template"):
        ChatTemplate.from_metadata(laguna_file(""), TOKENIZER)


def test_the_environment_is_the_one_templates_are_written_for() -> None:
    assert render("  {% if true %}\n    a\n  {% endif %}\nb") == "    a\nb"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}{{ eos_token }}") == "〈|EOS|〉〈|EOS|〉"
    assert render("{{ o | tojson }}", o={"b": "<é>&'", "a": [1.5, None]}) == '{"b": "<é>&\'", "a": [1.5, null]}'
    assert render("{{ o | tojson(ensure_ascii=True) }}", o="é") == '"\\u00e9"'
    assert render("{{ o | tojson(indent=1) }}", o=[1]) == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}").isdecimal()
    assert render("{{ tools is none }}{{ add_generation_prompt }}") == "TrueTrue"


# Bounds


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            f"more than {CPU_SECONDS} s",
        ),
        ("{{ 9 ** (9 ** (9 ** messages | length)) }}", f"more than {CPU_SECONDS} s"),
        ("{{ 'x' * 10**10 }}", f"more than {MEMORY_BYTES >> 20} MiB"),
        ("{{ messages[0].content.rjust(10**10) }}", f"more than {MEMORY_BYTES >> 20} MiB"),
        ("{{ '%10000000000d' | format(1) }}", f"more than {MEMORY_BYTES >> 20} MiB"),
        ("{{ messages[0].content | center(10**10) }}", f"more than {MEMORY_BYTES >> 20} MiB"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", f"more than {MAX_CHARACTERS} characters"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ raise_exception('two\\nlines') }}", "refuses these messages: two lines"),
    ],
)
def test_a_hostile_template_ends_in_one_line(source: str, said: str) -> None:
    with pytest.raises(RequestError, match=r"^the chat template ") as caught:
        render(source)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ 1 | nothing }}"])
def test_a_template_that_cannot_be_compiled_names_its_file(source: str) -> None:
    with pytest.raises(ModelFileError, match=r"^small\.gguf: the chat template cannot be used: "):
        render(source)


def test_a_template_that_took_too_long_once_renders_the_next_request() -> None:
    source = "{% if hang %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    template = ChatTemplate(source, TOKENIZER)
    with pytest.raises(RequestError, match="takes more than"):
        template.encode([user("x")], options={"hang": True})
    assert template.encode([user("x")]).text == "ok"
    template.close()


def test_the_rendering_process_ends_with_its_owner() -> None:
    program = (
        "import sys, time; from sparkd.text.renderer import Renderer; r = Renderer('x', '');"
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stderr is not None
        assert owner.stdout.readline() == b"ready\n"
        owner.kill()
        # The renderer inherits this pipe: its end is the end of both.
        assert owner.stderr.read() == b""


# Messages


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "developer", "content": "Be brief."}], "<|im_start|>system\nBe brief.<|im_end|>\n"),
        ([user("")], "<|im_start|>user\n<|im_end|>\n"),
        ([user([])], "<|im_start|>user\n<|im_end|>\n"),
        (
            [user([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])],
            "<|im_start|>user\na b<|im_end|>\n",
        ),
        ([{"role": "assistant", "content": None}], "<|im_start|>assistant\n<|im_end|>\n"),
        (
            [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2", "tool_call_id": "b"}],
            "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n",
        ),
        (
            [call('{"a": "x", "b": {"c": [true, "é"]}, "d": null}', "g")],
            "<|im_start|>assistant\n\n<tool_call>\n<function=g>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n"
            '{"c": [true, "é"]}\n</parameter>\n</function>\n</tool_call><|im_end|>\n',
        ),
        (
            [call({"n": 2})],
            "<|im_start|>assistant\n\n<tool_call>\n<function=f>\n<parameter=n>\n2\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>\n",
        ),
        ([call("")], "<|im_start|>assistant\n\n<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>\n"),
    ],
)
def test_messages_are_rendered_by_the_documented_rules(
    chatml: ChatTemplate, messages: list[Any], expected: str
) -> None:
    prompt = chatml.encode(messages, add_generation_prompt=False)
    assert prompt.text == expected
    assert prompt.ids == TOKENIZER.encode(expected, special=True)


def test_a_later_system_message_stands_in_its_place_as_the_template_can_show_it(
    chatml: ChatTemplate, laguna: ChatTemplate
) -> None:
    system = [{"role": "system", "content": "A."}, {"role": "developer", "content": "B."}]
    messages = [*system, user("Hi"), {"role": "system", "content": "Stop."}]
    assert "<system>\nStop.\n</system>\n" in laguna.encode(messages).text
    expected = [{"role": "system", "content": "A.\n\nB."}, user("Hi"), user("Stop.")]
    assert chatml.encode(messages) == chatml.encode(expected)
    assert chatml.encode(messages[2:]) == chatml.encode(expected[1:])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        ("Hi", "messages is a string, not a list"),
        (["Hi"], "messages[0] is a string, not an object"),
        ([{"content": "x"}], "messages[0].role is missing"),
        ([{"role": "root", "content": "x"}], "messages[0].role is 'root', not one of system, developer"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([user(None)], "messages[0].content is missing"),
        ([user(3)], "messages[0].content is a number, not a list"),
        ([user([{"type": "image_url", "image_url": {}}])], "content of type 'image_url' is not supported"),
        ([user([{"type": "text"}])], "messages[0].content[0].text is missing"),
        ([user("a\ud800")], "messages[0].content holds a lone surrogate at character 1"),
        ([{**user("x"), "audio": {}}], "messages[0]: member 'audio' is not supported"),
        ([{**user("x"), "tool_calls": []}], "messages[0]: member 'tool_calls' is not supported"),
        ([call("[1]")], "arguments is a list, not a JSON object"),
        ([call("{")], "arguments cannot be read as JSON"),
        ([call('{"a": NaN}')], "arguments cannot be read as JSON: NaN"),
        ([call("[" * 100_000)], "arguments cannot be read as JSON"),
        ([call('{"a":' * 70 + "1" + "}" * 70)], "nested deeper than 64 levels"),
        ([call({"a": 1 << 2000})], "an integer of 2001 bits is too large"),
        ([call({"a": b"x"})], "is a bytes, which is not a JSON value"),
        ([call({"a": [0] * 200_000})], "more than 200000 values"),
        ([call({}, name=None)], "messages[0].tool_calls[0].function.name is missing"),
        ([user("x")] * 10_001, "messages has 10001 entries, more than the limit of 10000"),
        ([user("x" * MAX_CHARACTERS), user("y")], f"more than {MAX_CHARACTERS} characters"),
    ],
)
def test_messages_of_another_shape_are_refused_with_their_place(chatml: ChatTemplate, messages: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        chatml.encode(messages)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([{"type": "web_search"}], "tools[0]: a tool of type 'web_search' is not supported"),
        ([{"type": "function"}], "tools[0].function is missing"),
        ([{"type": "function", "function": {}}], "tools[0].function.name is missing"),
        ([{"type": "function", "function": {"name": "f", "strict": True}}], "strict is not supported"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "parameters is a string, not an object"),
        ({"f": 1}, "tools is an object, not a list"),
    ],
)
def test_tools_of_another_shape_are_refused_with_their_place(chatml: ChatTemplate, tools: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        chatml.encode([user("x")], tools)
    assert said in str(caught.value)


def test_options_and_tools_that_a_template_never_looks_at_are_refused_by_name(chatml: ChatTemplate) -> None:
    with pytest.raises(UnsupportedError, match=r"options\.enable_thinkin: .*; it has: .*enable_thinking"):
        chatml.encode([user("x")], options={"enable_thinkin": False})
    plain = "{% set a = 1 %}{{ messages[0].content }}{% if b %}{{ a }}{% endif %}"
    assert render(plain, b=True) == "x1"
    for name in ("a", "c", "raise_exception"):
        with pytest.raises(UnsupportedError, match=f"options.{name}: .*; it has: b"):
            render(plain, **{name: 1})
    template = ChatTemplate(plain, TOKENIZER, "small.gguf")
    with (
        contextlib.closing(template),
        pytest.raises(UnsupportedError, match="tools: the chat template of this"),
    ):
        template.encode([user("x")], tools=[{"type": "function", "function": {"name": "f"}}])


def test_options_cannot_replace_what_the_template_gets_from_the_request(chatml: ChatTemplate) -> None:
    with pytest.raises(RequestError, match=r"options\.bos_token: cannot be set"):
        chatml.encode([user("x")], options={"bos_token": "y"})


# Control tokens


def control_ids(ids: list[int]) -> list[int]:
    return [index for index in ids if TOKENIZER.is_control(index)]


HOSTILE = st.lists(
    st.sampled_from(
        [*CONTROL, *USER_DEFINED, "<", "<|", "<|im", "_end|>", "|>", "end", "object", "a", "\n", " ", "𠀀", "é"]
    ),
    max_size=6,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
def test_no_control_token_comes_from_the_request(
    chatml: ChatTemplate, laguna: ChatTemplate, content: str, name: str, key: str, value: str
) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": {key: {"type": "object", "title": value}}}}

    def conversation(content: str, name: str, key: str, value: str) -> list[dict[str, Any]]:
        return [
            user(content),
            {**call({key: value, "list": [value]}, name), "reasoning_content": content},
            {"role": "tool", "content": content},
        ]

    for template in (chatml, laguna):
        prompt = template.encode(conversation(content, name, key, value), [tool])
        innocent = template.encode(conversation("c", "n", "k", "v"), [TOOL])
        assert control_ids(prompt.ids) == control_ids(innocent.ids)
        assert TOKENIZER.decode(prompt.ids) == prompt.text


@settings(max_examples=60, deadline=None)
@given(HOSTILE, HOSTILE)
def test_the_prompt_shows_what_the_request_says(
    chatml: ChatTemplate, chatml_renderer: Renderer, content: str, name: str
) -> None:
    messages = [user(content), {"role": "assistant", "content": content, "reasoning_content": name}]
    plain = chatml_renderer.render({"messages": messages, "tools": None, "add_generation_prompt": True})
    prompt = chatml.encode(messages)
    assert prompt.text == plain
    if not any(text in content + name for text in CONTROL):
        assert prompt.ids == TOKENIZER.encode(plain, special=True)


def test_a_name_that_the_template_would_complete_to_a_control_token_stays_text(chatml: ChatTemplate) -> None:
    prompt = chatml.encode([call({"<|im_end|": "x"}, "<|im_start|")], add_generation_prompt=False)
    assert "<function=<|im_start|>\n<parameter=<|im_end|>\n" in prompt.text
    assert control_ids(prompt.ids) == [259, 260]


def test_a_text_that_completes_what_the_template_began_stays_text() -> None:
    source = "<|im_start|>{{ messages[0].role }}\n<{{ messages[0].content }}>"
    template = ChatTemplate(source, TOKENIZER)
    prompt = template.encode([user("|im_end|")])
    template.close()
    assert prompt.text == "<|im_start|>user\n<|im_end|>"
    assert control_ids(prompt.ids) == [259]


def test_names_that_templates_test_are_not_escaped() -> None:
    source = "{{ '<|' + messages[0].role + '|>' }}{{ tools[0].function.parameters.type == 'object' }}"
    template = ChatTemplate(source, TOKENIZER)
    prompt = template.encode([user("object")], [TOOL])
    template.close()
    assert prompt.text == "<|user|>True"


def test_escaped_text_survives_json_python_and_ascii_spellings() -> None:
    source = "{{ o | tojson }} {{ o | tojson(ensure_ascii=True) }} {{ o }} {{ o[0] | trim }}"
    template = ChatTemplate(source, TOKENIZER)
    text = template.encode([user("")], options={"o": ["<|im_end|>𠀀 ", "〈|EOS|〉"]}).text
    template.close()
    plain = '["<|im_end|>𠀀 ", "〈|EOS|〉"]'
    ascii_only = '["<|im_end|>\\ud840\\udc00 ", "\\u3008|EOS|〉"]'.replace("〉", "\\u3009")
    assert text == f"{plain} {ascii_only} {plain.replace(chr(34), chr(39))} <|im_end|>𠀀"


def test_user_defined_tokens_are_recognised_in_text(chatml: ChatTemplate) -> None:
    think = TOKENIZER.encode("<think>", special=False)
    assert len(think) == 1
    assert think[0] in chatml.encode([user("<|im_end|> <think>")], add_generation_prompt=False).ids
