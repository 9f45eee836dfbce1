"""OpenAI's own library against the gateway, as strict as it can be: chat, completions, responses, models, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from gateway_house import CALLS, THOUGHT, TOOLS, WEATHER, House, gateway
from gateway_status import document
from openai import OpenAI

from spark_client import messages as m

Start = Callable[..., Any]
TALK: list[Any] = [{"role": "user", "content": "Hi"}]


def script(ask: m.Generate) -> list[str] | m.Failed:
    """An answer with what the request makes possible: a thought, calls of tools."""
    if ask.tools:
        return [*(THOUGHT if ask.options.get("enable_thinking") else []), *CALLS]
    return [*(THOUGHT if ask.options.get("enable_thinking") else []), "Hello", ", ", "wörld"]


@pytest.fixture
def house(fake_daemon: Start) -> Iterator[House]:
    with gateway(fake_daemon(plan=script, status=document()), aliases=frozenset({"gpt-4o"})) as made:
        yield made


@pytest.fixture
def client(house: House) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_a_chat_is_answered_whole(client: OpenAI, house: House) -> None:
    answer = client.chat.completions.create(
        model="model", messages=TALK, temperature=0.5, top_p=0.9, seed=3, stop=["\n"], max_completion_tokens=9,
        presence_penalty=0.1, frequency_penalty=0.2, logit_bias={"5": -1}, user="me", extra_body={"top_k": 7},
    )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hello, wörld", "stop")
    assert choice.message.tool_calls is None and answer.model == "model" and answer.object == "chat.completion"
    assert answer.usage is not None and answer.usage.prompt_tokens == 3
    assert answer.usage.total_tokens == 3 + answer.usage.completion_tokens
    (ask,) = house.daemon.of(m.Generate)
    assert ask.sampling == m.Sampling(0.5, 7, 0.9, 3, 0.0, 1.0, 0.1, 0.2, [m.Bias(5, -1.0)])
    assert (ask.stop, ask.max_tokens, ask.shorten, ask.parts, ask.chat) == (["\n"], 9, True, True, TALK)


def test_a_chat_is_answered_in_pieces_with_usage_at_the_end(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="gpt-4o", messages=TALK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, wörld" and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 3 and not chunks[-1].choices
    assert len({chunk.id for chunk in chunks}) == 1


def test_thought_and_calls_are_told_apart_whole_and_in_pieces(client: OpenAI) -> None:
    given: dict[str, Any] = {"model": "model", "messages": TALK, "tools": TOOLS, "reasoning_effort": "high"}
    answer = client.chat.completions.create(**given)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(THOUGHT)
    message = answer.choices[0].message
    assert message.content == "I will look." and message.reasoning_content == "Let me look."  # type: ignore[attr-defined]
    calls: list[Any] = list(message.tool_calls or [])
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris & <b>", "days": 2}, {}]
    assert len({call.id for call in calls}) == 2
    with client.chat.completions.stream(**given) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert events and final.finish_reason == "tool_calls"
    assert final.message.content == "I will look."
    streamed = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or []]
    assert streamed == [(call.function.name, call.function.arguments) for call in calls]


def test_tools_that_ask_for_strictness_are_taken_as_they_are_read(client: OpenAI, house: House) -> None:
    strict: Any = {**WEATHER, "strict": True}
    client.chat.completions.create(model="model", messages=TALK, tools=[{"type": "function", "function": strict}])
    client.responses.create(model="model", input="Hi", tools=[{"type": "function", **strict}])
    assert [ask.tools for ask in house.daemon.of(m.Generate)] == [TOOLS, TOOLS]


def test_one_call_is_enough_where_no_two_are_wanted(client: OpenAI, house: House) -> None:
    answer = client.chat.completions.create(model="model", messages=TALK, tools=TOOLS, parallel_tool_calls=False)  # type: ignore[arg-type]
    assert len(answer.choices[0].message.tool_calls or []) == 1 and answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "call", "tools"),
    [
        ("auto", None, TOOLS),
        ("none", None, None),
        ("required", "", TOOLS),
        ({"type": "function", "function": {"name": "weather"}}, "weather", TOOLS),
    ],
)
def test_the_choice_of_a_tool_is_the_daemons_to_keep(
    client: OpenAI, house: House, choice: Any, call: str | None, tools: Any
) -> None:
    client.chat.completions.create(model="model", messages=TALK, tools=TOOLS, tool_choice=choice)  # type: ignore[arg-type]
    (ask,) = house.daemon.of(m.Generate)
    assert (ask.call, ask.tools) == (call, tools)


def test_log_probabilities_have_the_text_of_their_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="model", messages=TALK, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    first = logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("\0", -0.25, [0])
    assert [best.token for best in first.top_logprobs] == ["a", "b"]
    stream = client.chat.completions.create(model="model", messages=TALK, logprobs=True, stream=True)
    told = [choice.logprobs.content for chunk in stream for choice in chunk.choices if choice.logprobs]
    assert [entry.logprob for entries in told for entry in entries or []] == [-0.25] * 3


def test_a_text_is_continued_whole_and_in_pieces(client: OpenAI, house: House) -> None:
    answer = client.completions.create(model="model", prompt="Once", max_tokens=5, logprobs=1, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hello, wörld", "stop")
    assert choice.logprobs is not None and choice.logprobs.text_offset == [0, 1, 2]
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    # The library's own types have no null as finish_reason, which every server sends.
    with OpenAI(base_url=client.base_url, api_key="none") as lenient:
        stream = lenient.completions.create(model="model", prompt=[1, 2], max_tokens=5, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, wörld"
    asks = house.daemon.of(m.Generate)
    assert (asks[0].prompt, asks[0].max_tokens, asks[0].sampling.temperature) == ("Once", 5, 0.0)
    assert asks[1].tokens == [1, 2] and not asks[1].parts


def test_the_end_by_length_is_told(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="model", messages=TALK, tools=TOOLS, max_tokens=2)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "length"
    text = client.completions.create(model="model", prompt="Once", max_tokens=1)
    assert text.choices[0].finish_reason == "length"


def test_a_response_has_items_whole_and_in_pieces(client: OpenAI, house: House) -> None:
    given: dict[str, Any] = {
        "model": "model", "input": "Hi", "instructions": "Be brief.", "tools": [{"type": "function", **WEATHER}],
        "reasoning": {"effort": "low"}, "max_output_tokens": 99, "store": False,
    }  # fmt: skip
    answer = client.responses.create(**given)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "I will look." and answer.status == "completed"
    assert answer.usage is not None and answer.usage.input_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == len(THOUGHT)
    with client.responses.stream(**given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    assert final.output_text == "I will look."
    calls = [item for item in final.output if item.type == "function_call"]
    assert json.loads(calls[0].arguments) == {"city": "Paris & <b>", "days": 2}
    ask = house.daemon.of(m.Generate)[0]
    assert ask.chat == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_response_may_go_on_from_the_items_of_another(client: OpenAI, house: House) -> None:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"days": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": "rain"},
    ]
    answer = client.responses.create(
        model="model", input=items, max_output_tokens=1, tools=[{"type": "function", **WEATHER}]
    )  # type: ignore[list-item]
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    (ask,) = house.daemon.of(m.Generate)
    assert [message["role"] for message in ask.chat] == ["developer", "user", "assistant", "tool", "tool"]
    turn = ask.chat[2]
    assert (turn["content"], turn["reasoning_content"], len(turn["tool_calls"])) == ("I look.", "Hm.", 2)


def test_the_model_and_its_other_names_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["model", "gpt-4o"]
    assert client.models.retrieve("model").owned_by == "sparkd"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served"):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0, "n": None}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(client: OpenAI, option: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="model", messages=TALK, extra_body=option)
    assert caught.value.param == named and named in caught.value.message


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        (m.Failed(None, None, "request", "messages[0].role is 'x'"), openai.BadRequestError),
        (m.Failed(None, None, "busy", "the queue is full", True), openai.RateLimitError),
        (m.Failed(None, None, "unavailable", "the worker is being replaced", True), openai.InternalServerError),
        (m.Failed(None, None, "crashed", "3 workers ended"), openai.InternalServerError),
    ],
)
def test_what_the_daemon_refuses_keeps_its_reason(fake_daemon: Start, failed: m.Failed, kind: Any) -> None:
    with gateway(fake_daemon(plan=lambda ask: failed)) as house:
        client = OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(kind) as caught:
            client.chat.completions.create(model="model", messages=TALK)
    assert failed.message in str(caught.value)
    assert ("retry-after" in caught.value.response.headers) == failed.retry


def test_a_failure_in_the_middle_of_a_stream_reaches_the_reader(fake_daemon: Start) -> None:
    daemon = fake_daemon(fail=m.Failed(None, None, "crashed", "3 workers ended"))
    with gateway(daemon) as house, OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(model="model", messages=TALK, stream=True)
        with pytest.raises(openai.APIError, match="3 workers ended"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="3 workers ended"):
            client.chat.completions.create(model="model", messages=TALK)


def test_a_prompt_that_is_too_long_has_the_code_that_agents_look_for(fake_daemon: Start) -> None:
    said = "9000 prompt tokens and max_tokens 1 are 9001 positions, a request may have 8192"
    with gateway(fake_daemon(plan=lambda ask: m.Failed(None, None, "request", said))) as house:
        client = OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="model", messages=TALK)
    assert caught.value.code == "context_length_exceeded"


def test_without_a_daemon_the_reason_is_told(fake_daemon: Start, tmp_path: Any) -> None:
    daemon = fake_daemon()
    daemon.path = tmp_path / "nothing.sock"
    with gateway(daemon) as house:
        client = OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.InternalServerError, match="no daemon at"):
            client.chat.completions.create(model="model", messages=TALK)
