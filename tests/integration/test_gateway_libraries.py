"""Clients of others against the real daemon and its built-in model: OpenAI's and Anthropic's own libraries, strict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from daemon import daemon, until
from openai import OpenAI
from test_gateway_daemon import ask, port_of

from sparkd.demo.main import MODEL as DEMO

NAME = "spark-demo-laguna"
WHY = "the clients are not installed: make test installs them"
TALK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
#: What changes nothing here, and must be taken all the same.
IDLE: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("libraries")
    with daemon(DEMO, folder / "run", gateway={"enabled": True, "port": 0}) as one:
        until(lambda: ask(port_of(one), "/health")[0] == 200, one.said)
        yield f"http://127.0.0.1:{port_of(one)}"


@pytest.fixture
def gpt(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


@pytest.fixture
def claude(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def test_a_chat_with_every_option_is_the_same_whole_and_in_pieces(gpt: OpenAI) -> None:
    given: dict[str, Any] = {
        "model": NAME, "messages": TALK, "temperature": 0.7, "top_p": 0.9, "seed": 5, "max_completion_tokens": 12,
        "stop": ["\n\n\n"], "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": -1},
        "logprobs": True, "top_logprobs": 2, "n": 1, "store": False, "service_tier": "auto",
        "reasoning_effort": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "modalities": ["text"], "extra_body": {"top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1}, **IDLE,
    }  # fmt: skip
    whole = gpt.chat.completions.create(**given)
    choice = whole.choices[0]
    assert choice.message.content and choice.finish_reason in ("stop", "length")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    assert whole.usage is not None and whole.usage.completion_tokens == len(choice.logprobs.content)
    pieces = list(gpt.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    text = "".join(one.delta.content or "" for piece in pieces for one in piece.choices)
    assert text == choice.message.content and pieces[-1].usage == whole.usage
    assert [one.finish_reason for one in pieces[-2].choices] == [choice.finish_reason]


def test_tokens_of_a_thought_are_counted(gpt: OpenAI) -> None:
    chat = gpt.chat.completions.create(model=NAME, messages=TALK, max_tokens=12, reasoning_effort="high", temperature=0)
    assert chat.usage is not None and chat.usage.completion_tokens_details is not None
    thought = chat.usage.completion_tokens_details.reasoning_tokens
    assert thought and chat.choices[0].message.reasoning_content  # type: ignore[attr-defined]
    answer = gpt.responses.create(
        model=NAME, input=TALK, max_output_tokens=12, reasoning={"effort": "high"}, temperature=0
    )
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == thought


def test_a_text_goes_on_the_same_whole_and_in_pieces(gpt: OpenAI) -> None:
    given: dict[str, Any] = {
        "model": NAME, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "seed": 1, "logprobs": 1,
        "stop": "\n\n\n", "n": 1, "best_of": 1, "echo": False, "user": "me",
    }  # fmt: skip
    whole = gpt.completions.create(**given)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []).startswith(whole.choices[0].text)
    # The library's own types have no null as finish_reason, which every server sends.
    with OpenAI(base_url=gpt.base_url, api_key="none") as lenient:
        pieces = lenient.completions.create(**given, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_a_response_with_every_option_is_the_same_whole_and_in_pieces(gpt: OpenAI) -> None:
    given: dict[str, Any] = {
        "model": NAME, "input": "Who are you?", "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0,
        "top_p": 0.9, "parallel_tool_calls": True, "tool_choice": "auto", "truncation": "disabled", "store": False,
        "background": False, "include": ["reasoning.encrypted_content"], "service_tier": "auto",
        "reasoning": {"effort": "none", "summary": "auto"}, "text": {"format": {"type": "text"}}, **IDLE,
    }  # fmt: skip
    whole = gpt.responses.create(**given)
    assert whole.output_text and whole.status in ("completed", "incomplete")
    events = list(gpt.responses.create(**given, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert (last.usage, last.output_text, last.status) == (whole.usage, whole.output_text, whole.status)


def test_a_message_with_every_option_is_the_same_whole_and_in_pieces(claude: Anthropic) -> None:
    given: dict[str, Any] = {
        "model": NAME, "max_tokens": 12, "messages": TALK[1:], "system": [{"type": "text", "text": "Be brief."}],
        "stop_sequences": ["\n\n\n"], "metadata": {"user_id": "me"}, "service_tier": "auto",
        "thinking": {"type": "disabled"}, "extra_body": {"temperature": 0, "top_k": 5, "top_p": 0.9},
    }  # fmt: skip
    whole = claude.messages.create(**given)
    assert whole.content[0].type == "text" and whole.content[0].text
    with claude.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage == whole.usage
    counted = claude.messages.count_tokens(model=NAME, messages=TALK[1:], system=given["system"])
    assert counted.input_tokens == whole.usage.input_tokens


def test_a_thought_is_a_block_in_pieces(claude: Anthropic) -> None:
    given: dict[str, Any] = {"model": NAME, "max_tokens": 12, "messages": TALK[1:]}
    with claude.messages.stream(**given, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        assert {event.type for event in stream} >= {"thinking", "message_stop"}
        assert stream.get_final_message().content[0].type == "thinking"


def test_errors_are_those_of_the_libraries(gpt: OpenAI, claude: Anthropic) -> None:
    long = "Who are you? " * 3000
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.chat.completions.create(model=NAME, messages=[{"role": "user", "content": long}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n: only one answer"):
        gpt.chat.completions.create(model=NAME, messages=TALK, n=2)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        gpt.chat.completions.create(model="gpt-9", messages=TALK)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        claude.messages.create(model="claude", max_tokens=9, messages=TALK[1:])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model=NAME, max_tokens=0, messages=TALK[1:])
    with pytest.raises(anthropic.BadRequestError, match="a request may have"):
        claude.messages.create(model=NAME, max_tokens=9, messages=[{"role": "user", "content": long}])


def test_the_model_is_listed_for_both(gpt: OpenAI, claude: Anthropic) -> None:
    assert [model.id for model in gpt.models.list()] == [NAME] == [model.id for model in claude.models.list()]


def test_llm_holds_a_conversation(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    pytest.importorskip("llm", reason=WHY)
    from llm.default_plugins.openai_models import Chat

    talk = Chat("spark", model_name=NAME, api_base=f"{url}/v1").conversation()
    assert talk.prompt("Who are you?", key="none", max_tokens=12).text()
    assert talk.prompt("Say it shorter.", key="none", max_tokens=12).text()


def test_pydantic_ai_holds_a_conversation(url: str) -> None:
    pytest.importorskip("pydantic_ai", reason=WHY)
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(NAME, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(model, model_settings={"max_tokens": 12})
    first = agent.run_sync("Who are you?")
    assert first.output and agent.run_sync("Say it shorter.", message_history=first.all_messages()).output
