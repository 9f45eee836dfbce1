"""Anthropic's own library against the gateway: messages whole and in pieces, counts, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from gateway_house import CALLS, THOUGHT, WEATHER, House, gateway

from spark_client import messages as m

Start = Callable[..., Any]
TALK: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]},
]


def script(ask: m.Generate) -> list[str]:
    thought = THOUGHT if ask.options.get("enable_thinking") else []
    return [*thought, *CALLS] if ask.tools else [*thought, "Hello", ", ", "wörld"]


@pytest.fixture
def house(fake_daemon: Start) -> Iterator[House]:
    with gateway(fake_daemon(plan=script), aliases=frozenset("*")) as made:
        yield made


@pytest.fixture
def client(house: House) -> Iterator[Anthropic]:
    with Anthropic(base_url=house.url, api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_a_message_is_answered_whole(client: Anthropic, house: House) -> None:
    answer = client.messages.create(
        model="claude", max_tokens=9, messages=TALK, system="Be brief.", stop_sequences=["\n"],
        metadata={"user_id": "me"}, extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9},
    )  # fmt: skip
    (block,) = answer.content
    assert block.type == "text" and block.text == "Hello, wörld"
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert answer.usage.input_tokens == 3 and answer.usage.output_tokens == 3
    (ask,) = house.daemon.of(m.Generate)
    assert ask.chat == [{"role": "system", "content": "Be brief."}, *TALK]
    assert (ask.max_tokens, ask.stop, ask.sampling.top_k, ask.shorten) == (9, ["\n"], 3, True)


def test_thought_text_and_calls_are_blocks_whole_and_in_pieces(client: Anthropic) -> None:
    given: dict[str, Any] = {"model": "claude", "max_tokens": 99, "messages": TALK, "tools": TOOLS}
    given["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(**given)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.stop_reason == "tool_use"
    thought, text, first, second = answer.content
    assert thought.type == "thinking" and thought.thinking == "Let me look."
    assert text.type == "text" and text.text == "I will look."
    assert first.type == "tool_use" and first.input == {"city": "Paris & <b>", "days": 2}
    assert second.type == "tool_use" and second.input == {} and second.id != first.id
    with client.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in answer.content
    ]
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == answer.usage.output_tokens
    assert final.usage.input_tokens == 3


@pytest.mark.parametrize(
    ("choice", "call"),
    [({"type": "auto"}, None), ({"type": "any"}, ""), ({"type": "tool", "name": "weather"}, "weather")],
)
def test_the_choice_of_a_tool_is_the_daemons_to_keep(client: Anthropic, house: House, choice: Any, call: Any) -> None:
    client.messages.create(model="claude", max_tokens=99, messages=TALK, tools=TOOLS, tool_choice=choice)
    (ask,) = house.daemon.of(m.Generate)
    assert ask.call == call and [tool["function"]["name"] for tool in ask.tools] == ["weather"]


def test_results_of_tools_and_thoughts_go_back_in_their_order(client: Anthropic, house: House) -> None:
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"days": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    client.messages.create(model="claude", max_tokens=9, messages=talk, system=[{"type": "text", "text": "A."}])
    (ask,) = house.daemon.of(m.Generate)
    assert [message["role"] for message in ask.chat] == ["system", "user", "assistant", "tool", "tool", "user"]
    turn = ask.chat[2]
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["function"] for call in turn["tool_calls"]] == [
        {"name": "weather", "arguments": {"days": 1}}, {"name": "weather", "arguments": {}},
    ]  # fmt: skip
    assert [message["content"] for message in ask.chat[3:]] == ["sun", "Error: no", "And?"]


def test_an_answer_that_is_cut_off_says_so(fake_daemon: Start) -> None:
    with (
        gateway(fake_daemon(plan=script), aliases=frozenset("*")) as house,
        Anthropic(base_url=house.url, api_key="none", max_retries=0) as client,
    ):
        answer = client.messages.create(model="x", max_tokens=2, messages=TALK, tools=TOOLS)
    assert answer.stop_reason == "max_tokens"


def test_tokens_of_a_conversation_are_counted(client: Anthropic, house: House) -> None:
    assert client.messages.count_tokens(model="claude", messages=TALK, system="Be", tools=TOOLS).input_tokens == 4
    (ask,) = house.daemon.of(m.Tokenize)
    assert [message["content"] for message in ask.chat] == ["Be", "Hi"] and len(ask.tools) == 1


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"container": "x"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [*TALK, {"role": "assistant", "content": "Well"}]}, "end with the assistant"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(client: Anthropic, option: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="claude", max_tokens=9, messages=TALK, extra_body=option)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


@pytest.mark.parametrize(
    ("failed", "kind", "name"),
    [
        (m.Failed(None, None, "busy", "full", True), anthropic.RateLimitError, "rate_limit_error"),
        (m.Failed(None, None, "unavailable", "gone", True), anthropic.InternalServerError, "overloaded_error"),
        (m.Failed(None, None, "error", "odd"), anthropic.InternalServerError, "api_error"),
    ],
)
def test_what_the_daemon_refuses_keeps_its_reason(
    fake_daemon: Start, failed: m.Failed, kind: type[anthropic.APIStatusError], name: str
) -> None:
    with gateway(fake_daemon(plan=lambda ask: failed), aliases=frozenset("*")) as house:
        client = Anthropic(base_url=house.url, api_key="none", max_retries=0)
        with client, pytest.raises(kind) as caught:
            client.messages.create(model="claude", max_tokens=9, messages=TALK)
    assert json.loads(caught.value.response.text)["error"] == {"type": name, "message": failed.message}


def test_a_failure_in_the_middle_of_a_stream_reaches_the_reader(fake_daemon: Start) -> None:
    daemon = fake_daemon(fail=m.Failed(None, None, "crashed", "3 workers ended"))
    with gateway(daemon, aliases=frozenset("*")) as house:
        client = Anthropic(base_url=house.url, api_key="none", max_retries=0)
        with client, pytest.raises(anthropic.APIStatusError, match="3 workers ended"):
            list(client.messages.create(model="x", max_tokens=9, messages=TALK, stream=True))
