"""What is refused over HTTP: with which status, under which name, how early, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_house import TOOLS, House, ask, gateway
from gateway_status import document

from spark_client import messages as m
from spark_gateway import daemon
from spark_gateway.keys import Keys, make
from sparkd.config import LimitSettings
from sparkd.errors import SparkError
from sparkd.supervisor.admission import Served, check, fitted
from sparkd.worker.limits import Room

Start = Callable[..., Any]
TALK = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
}
CHAT, TEXT, RESPONSE, MESSAGE = BODIES
SERVED = Served("model", Room(100, 900), 50)
FULL = m.Failed(None, None, "busy", "1 requests run and 3 wait, limits.queue is 3; try again later", True)
TOO_LONG = "the prompt has 150 tokens and needs room for one more: a request may have 100 (limits.context)"


def admitted(request: Any) -> list[str] | m.Failed:
    """What the daemon's own front door says, in its own words."""
    try:
        check(fitted(request, SERVED), SERVED, LimitSettings())
    except SparkError as error:
        return m.Failed(None, None, error.code, str(error))
    return ["Hello"]


def error_of(house: House, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, said = ask(house, path, body)
    return status, said["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "options", "param", "says"),
    [
        (CHAT, {"temperature": 500}, "temperature", "temperature is 500.0; give a number from 0 to 100"),
        (CHAT, {"top_k": -1}, "top_k", "top_k is -1; give"),
        (CHAT, {"seed": -1}, "seed", "seed is -1; give"),
        (CHAT, {"logprobs": True, "top_logprobs": 30}, "top_logprobs", "top_logprobs is 30; give"),
        (CHAT, {"logit_bias": {"99": 1}}, "logit_bias", "logit_bias: token 99 is not in the vocabulary"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: its keys are token ids"),
        (CHAT, {"stop": ["x"] * 99}, "stop", "stop: 99 strings"),
        (CHAT, {"stop": 5}, "stop", "stop: "),
        (CHAT, {"messages": [5]}, "messages[0]", "messages[0]: "),
        (CHAT, {"logit_bias": {"7": "much"}}, "logit_bias.7", "logit_bias.7: "),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: is 0"),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": 9}, "max_completion_tokens", "max_completion_tokens"),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sun"}}},
            "tool_choice",
            "tool_choice: names 'sun', which is not among the tools",
        ),
        (TEXT, {"logprobs": 30}, "logprobs", "logprobs is 30; give"),
        (TEXT, {"prompt": [99]}, "prompt", "prompt: token 99 is not in the vocabulary"),
        (TEXT, {"prompt": 5}, "prompt", "prompt: "),
        (RESPONSE, {"top_p": 2}, "top_p", "top_p is 2.0; give"),
        (RESPONSE, {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        (MESSAGE, {"stop_sequences": [""]}, None, "stop_sequences: a string has 0 characters"),
        (MESSAGE, {"tool_choice": {"type": "tool", "name": "sun"}, "tools": [{"name": "moon"}]}, None, "tool_choice"),
    ],
)
def test_an_option_is_named_as_the_dialect_names_it(
    fake_daemon: Start, path: str, options: dict[str, Any], param: str | None, says: str, stream: bool
) -> None:
    with gateway(fake_daemon(plan=admitted)) as house:
        status, error = error_of(house, path, {**BODIES[path], **options, "stream": stream})
    assert status == 400 and error["message"].startswith(says), error
    if path != MESSAGE:
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["code"] in ("invalid_value", "unsupported_option")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("words", "param", "says"),
    [
        ("tools: the chat template of this model knows none; send none", "tools", "tools: the chat template"),
        ("options.mood: there is no such option", "chat_template_kwargs.mood", "chat_template_kwargs.mood: there"),
        ("messages[0].content[1]: an image", "messages[0].content[1]", "messages[0].content[1]: an image"),
        (TOO_LONG, "messages", TOO_LONG),
    ],
)
def test_what_the_worker_refuses_has_its_status_in_a_stream_too(
    fake_daemon: Start, path: str, words: str, param: str, says: str
) -> None:
    late = m.Failed(None, 0, "request", words)
    with gateway(fake_daemon(plan=lambda request: late)) as house:
        streamed = ask(house, path, {**BODIES[path], "stream": True})
        whole = ask(house, path, BODIES[path])
    assert streamed[0] == whole[0] == 400 and streamed[2]["error"] == whole[2]["error"]
    if path == CHAT:
        assert streamed[2]["error"]["param"] == param and streamed[2]["error"]["message"].startswith(says)
    if words == TOO_LONG and path != MESSAGE:
        own = {CHAT: "messages", TEXT: "prompt", RESPONSE: "input"}[path]
        assert (streamed[2]["error"]["param"], streamed[2]["error"]["code"]) == (own, "context_length_exceeded")


def test_of_messages_that_a_dialect_counts_differently_only_the_member_is_named(fake_daemon: Start) -> None:
    late = m.Failed(None, 0, "request", "messages[3].tool_calls[0].function.arguments cannot be read as JSON")
    with gateway(fake_daemon(plan=lambda request: late)) as house:
        for path, name in ((RESPONSE, "input"), (MESSAGE, "messages")):
            status, error = error_of(house, path, BODIES[path])
            assert (status, error["message"]) == (400, f"{name}: arguments cannot be read as JSON")


def test_a_switch_of_thoughts_that_a_template_lacks_is_named_as_it_was_sent(fake_daemon: Start) -> None:
    late = m.Failed(None, 0, "unsupported", "options.enable_thinking: there is no such option")
    with gateway(fake_daemon(plan=lambda request: late)) as house:
        sent: list[tuple[str, dict[str, Any], str]] = [
            (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
            (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
            (RESPONSE, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
            (MESSAGE, {"thinking": {"type": "enabled"}}, "thinking"),
            (MESSAGE, {"output_config": {"effort": "low"}}, "output_config.effort"),
        ]
        for path, options, name in sent:
            status, error = error_of(house, path, {**BODIES[path], **options})
            assert status == 400 and error["message"] == f"{name}: there is no such option"


def test_a_queue_that_is_full_is_not_asked_again_for_each_request(
    fake_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_FULL_S", 1000.0)
    with gateway(fake_daemon(plan=lambda request: FULL)) as house:
        for _ in range(3):
            status, headers, said = ask(house, CHAT, BODIES[CHAT])
            assert (status, said["error"]["message"]) == (429, FULL.message) and headers["retry-after"]
        assert len(house.daemon.of(m.Generate)) == 1
        # Nothing of the body is read for that.
        assert ask(house, CHAT, b"{")[0] == 429
    monkeypatch.setattr(daemon, "_FULL_S", 0.0)
    with gateway(fake_daemon(plan=lambda request: FULL)) as house:
        assert [ask(house, CHAT, BODIES[CHAT])[0] for _ in range(2)] == [429, 429]
        assert len(house.daemon.of(m.Generate)) == 2


def test_a_request_that_is_too_large_for_now_keeps_no_other_out(
    fake_daemon: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_FULL_S", 1000.0)
    large = m.Failed(None, None, "busy", "the request takes 99 bytes of memory", True)
    with gateway(fake_daemon(plan=lambda request: large if request.tools else ["Hello"])) as house:
        assert ask(house, CHAT, {**BODIES[CHAT], "tools": TOOLS})[0] == 429
        assert ask(house, CHAT, BODIES[CHAT])[0] == 200


def test_a_key_that_is_used_up_is_refused_before_its_body_is_read(fake_daemon: Start, tmp_path: Path) -> None:
    key, line = make("me")
    (tmp_path / "keys").write_text(f"{line} per_minute=1")
    with gateway(fake_daemon(), keys=Keys(tmp_path / "keys")) as house:
        assert ask(house, CHAT, BODIES[CHAT], {"x-api-key": key})[0] == 200
        status, headers, _ = ask(house, CHAT, b"{", {"x-api-key": key})
    assert status == 429 and 55 <= int(headers["retry-after"]) <= 60


def test_the_log_has_a_line_for_each_that_is_refused_and_nothing_of_what_it_said(
    fake_daemon: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "spark_gateway")
    with gateway(fake_daemon(plan=admitted)) as house:
        ids = [
            ask(house, CHAT, {**BODIES[CHAT], "secret": "x"})[1]["x-request-id"],
            ask(house, CHAT, {**BODIES[CHAT], "temperature": 500})[1]["x-request-id"],
        ]
        _, headers, said = ask(house, MESSAGE, {**BODIES[MESSAGE], "secret": "x"})
        ids.append(headers["request-id"])
        served = ask(house, CHAT, BODIES[CHAT])[1]["x-request-id"]
    assert said["request_id"] == ids[-1] and len({*ids, served}) == 4
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert [line.split("id=")[1].split()[0] for line in lines] == ids
    assert lines[1].endswith(f"route={CHAT} status=400 code=invalid_value")
    assert not any("secret" in line or "500" in line for line in lines)


def test_a_daemon_that_is_not_there_is_said_once(
    fake_daemon: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spark_gateway")
    absent = fake_daemon(status=document())
    there, absent.path = absent.path, tmp_path / "none.sock"
    with gateway(absent) as house:
        assert [ask(house, "/health")[0] for _ in range(3)] == [503] * 3
        (tmp_path / "none.sock").symlink_to(there)
        assert ask(house, "/health")[0] == 200
    said = [record.getMessage() for record in caplog.records if "the daemon answers" in record.getMessage()]
    assert [line.partition(":")[0] for line in said] == [
        "no requests are served until the daemon answers",
        "the daemon answers",
    ]


@pytest.mark.parametrize(("packing", "status"), [("identity", 200), ("gzip", 415), ("br", 415)])
def test_a_body_comes_as_it_is(fake_daemon: Start, packing: str, status: int) -> None:
    with gateway(fake_daemon()) as house:
        assert ask(house, CHAT, BODIES[CHAT], {"content-encoding": packing})[0] == status
