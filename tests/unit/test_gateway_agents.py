"""Requests of the shapes that agents send, written by hand: each is answered, and means what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gateway_house import CALLS, TOOLS, WEATHER, House, ask, gateway

from spark_client import messages as m

Start = Callable[..., Any]
SCHEMA = WEATHER["parameters"]
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}

CLAUDE_CODE_LIKE = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
    "metadata": {"user_id": "user_1_account__session_2"},
    "system": [
        {"type": "text", "text": "You are an agent."},
        {"type": "text", "text": "Environment: linux", **EPHEMERAL},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [{"name": "weather", "description": "The weather", "input_schema": SCHEMA, **EPHEMERAL}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                {"type": "text", "text": "Hi"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun", **EPHEMERAL}]},
    ],
}
CODEX_LIKE = {
    "model": "gpt-5-codex",
    "instructions": "You are a coding agent.",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x": "y"},
    "tools": [
        {"type": "function", "name": "weather", "description": "The weather", "strict": False, "parameters": SCHEMA}
    ],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": None,
            "encrypted_content": "x",
        },
        {
            "type": "function_call",
            "name": "weather",
            "arguments": '{"city": "Rome"}',
            "call_id": "c1",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ],
}
OPENCODE_LIKE = {
    "model": "spark",
    "max_tokens": 32000,
    "temperature": 0.55,
    "top_p": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "tools": TOOLS,
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "system", "content": "Environment: linux"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ],
}
AIDER_LIKE = {
    "model": "openai/spark",
    "temperature": 0,
    "stream": True,
    "messages": [
        {"role": "system", "content": "Act as a developer."},
        {"role": "user", "content": "I switched to a new code base."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Hi"},
    ],
}
OPEN_WEBUI_LIKE = {
    "model": "spark",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Hi"}],
    "user": "me",
    "seed": 4,
    "stop": ["###"],
}
SHAPES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/messages?beta=true", CLAUDE_CODE_LIKE, ["system", "user", "assistant", "tool"]),
    ("/v1/responses", CODEX_LIKE, ["system", "developer", "user", "assistant", "tool"]),
    ("/v1/chat/completions", OPENCODE_LIKE, ["system", "system", "user", "assistant", "tool"]),
    ("/v1/chat/completions", AIDER_LIKE, ["system", "user", "assistant", "user"]),
    ("/v1/chat/completions", OPEN_WEBUI_LIKE, ["user"]),
]


@pytest.fixture
def house(fake_daemon: Start) -> Iterator[House]:
    with gateway(fake_daemon(plan=lambda ask: CALLS if ask.tools else ["Hel", "lo"]), aliases=frozenset("*")) as made:
        yield made


@pytest.mark.parametrize(("path", "body", "roles"), SHAPES)
@pytest.mark.parametrize("stream", [True, False])
def test_the_shape_is_answered(house: House, path: str, body: dict[str, Any], roles: list[str], stream: bool) -> None:
    given = {name: value for name, value in body.items() if stream or name != "stream_options"}
    status, headers, answer = ask(house, path, {**given, "stream": stream})
    assert status == 200, answer
    (sent,) = house.daemon.of(m.Generate)
    assert [message["role"] for message in sent.chat] == roles
    text = answer if stream else json.dumps(answer)
    assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert ("weather" in text) == ("tools" in body) and "<tool_call>" not in text and "</function>" not in text


def test_what_the_agents_ask_for_reaches_the_daemon(house: House) -> None:
    for path, body, _ in SHAPES:
        assert ask(house, path, body)[0] == 200
    claude, codex, opencode, aider, webui = house.daemon.of(m.Generate)
    assert (claude.options, claude.max_tokens, claude.shorten) == ({"enable_thinking": True}, 32000, True)
    assert claude.chat[2]["reasoning_content"] == "Hm." and claude.chat[1]["content"].endswith("\n\nHi")
    assert codex.options == {"enable_thinking": True} and codex.chat[3]["tool_calls"][0]["id"] == "c1"
    assert opencode.tools == TOOLS and opencode.sampling.temperature == 0.55
    assert aider.sampling.temperature == 0.0 and aider.tools is None
    assert (webui.sampling.seed, webui.stop) == (4, ["###"])
