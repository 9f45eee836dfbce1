"""The gateway's borders: who may ask, what a body may be, what it says of the daemon."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_house import House, ask, gateway
from gateway_status import document

from spark_client import messages as m
from spark_gateway.body import MAX_BYTES, MAX_DEPTH
from spark_gateway.errors import ApiError
from spark_gateway.keys import Holder, Keys, KeysError, make

Start = Callable[..., Any]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def house(fake_daemon: Start) -> Iterator[House]:
    with gateway(fake_daemon(status=document()), aliases=frozenset({"other"}), defaults={"top_k": 3}) as made:
        yield made


def test_health_says_whether_and_why_not(fake_daemon: Start, house: House) -> None:
    assert ask(house, "/health")[::2] == (200, {"live": True, "ready": True, "state": "ready", "reason": ""})


def test_health_of_a_degraded_daemon_has_the_reason(fake_daemon: Start) -> None:
    with gateway(fake_daemon(status=document("degraded", "the worker is silent"))) as house:
        status, _, said = ask(house, "/health")
    assert (status, said["ready"], said["live"], said["reason"]) == (503, False, True, "the worker is silent")


def test_health_without_a_daemon_is_alive_and_not_ready(fake_daemon: Start, tmp_path: Path) -> None:
    daemon = fake_daemon()
    daemon.path = tmp_path / "none.sock"
    with gateway(daemon) as house:
        status, _, said = ask(house, "/health")
        assert (status, said["state"]) == (503, "unreachable") and "no daemon at" in said["reason"]
        status, _, page = ask(house, "/metrics")
        assert status == 200 and "spark_up 0.0" in page


def test_figures_for_prometheus(house: House) -> None:
    ask(house, CHAT, BODY)
    status, headers, page = ask(house, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    for line in (
        'spark_state{state="ready"} 1.0',
        'spark_resident_records{layer="1"} 2.0',
        'spark_memory_bytes{what="core"} 2.0',
        'spark_expert_misses_total{phase="decode"} 4.0',
        "spark_queued 2.0",
        "spark_output_tokens_total 8.0",
        "spark_decode_tokens_per_second 2.5",
        'spark_restarts_total{role="worker"} 2.0',
        f'spark_gateway_requests_total{{route="{CHAT}",status="200"}} 1.0',
        "spark_gateway_open_requests 0.0",
    ):
        assert line in page.splitlines()


def test_defaults_are_shown_and_used_where_a_request_is_silent(house: House) -> None:
    _, _, props = ask(house, "/props")
    assert props["defaults"]["top_k"] == 3 and props["model"]["context"] == 100 and props["aliases"] == ["other"]
    ask(house, CHAT, BODY)
    ask(house, CHAT, {**BODY, "top_k": 0})
    assert [msg.sampling.top_k for msg in house.daemon.of(m.Generate)] == [3, 0]


def test_the_model_is_told_with_its_age_its_context_and_what_its_template_has(house: House) -> None:
    listed = ask(house, "/v1/models")[2]
    assert ask(house, "/v1/models/")[2] == listed
    model = listed["data"][0]
    assert (model["created"], model["created_at"]) == (1_700_000_000, "2023-11-14T22:13:20Z")
    assert model["context_length"] == 100 and model["chat"]["tools"] and model["chat"]["thinking"]
    assert ask(house, "/v1/models/model")[2] == model and ask(house, "/v1/models/none")[0] == 404
    props = ask(house, "/props")[2]
    assert props["chat"] == model["chat"] and props["model"]["model_context"] == 900
    assert (props["limits"]["context"], props["limits"]["context_from"]) == (100, "limits.context")
    page = ask(house, "/metrics")[2]
    assert 'spark_gateway_requests_total{route="/v1/models/{model}",status="404"} 1.0' in page.splitlines()


def test_the_context_may_be_the_models_and_its_template_not_be_known_yet(fake_daemon: Start) -> None:
    status = document()
    status["model"]["model_context"], status["chat"] = 100, {}
    with gateway(fake_daemon(status=status)) as house:
        props = ask(house, "/props")[2]
    assert (props["limits"]["context_from"], props["chat"]) == ("model", None)


@pytest.mark.parametrize(("state", "words"), [("loading", "50 % of 2 bytes"), ("starting", "the daemon is starting")])
def test_health_says_how_far_the_start_is(fake_daemon: Start, state: str, words: str) -> None:
    status = document(state)
    status["loading"] = {"done_bytes": 1, "total_bytes": 2}
    with gateway(fake_daemon(status=status)) as house:
        code, _, said = ask(house, "/health")
    assert (code, said["state"]) == (503, state) and words in said["reason"]


def test_the_one_model_need_not_be_named(house: House) -> None:
    status, _, said = ask(house, CHAT, {"messages": BODY["messages"]})
    assert (status, said["model"]) == (200, "model")


def test_texts_become_tokens_and_tokens_texts(house: House) -> None:
    assert ask(house, "/tokenize", {"content": "ab", "special": True})[2] == {"tokens": [97, 98], "count": 2}
    assert ask(house, "/tokenize", {"messages": BODY["messages"]})[2]["tokens"] == [72, 105]
    assert ask(house, "/detokenize", {"tokens": [97, 98]})[2] == {"content": "ab"}
    assert ask(house, "/tokenize", {})[0] == 400


DEEP = b'{"model": "model", "messages": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        (b'{"temperature": NaN}', 400, "NaN is not JSON"),
        (b'{"temperature": 1e999}', 400, "too large"),
        (b'{"seed": 18446744073709551616}', 400, "more than 64 bits"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b'{"model": "\\ud800"}', 400, "lone surrogate"),
        (b"\xff", 400, "not JSON"),
        (DEEP, 400, "nested deeper"),
        (b"[" * 100_000, 400, "nested deeper"),
        (b'{"model": "model"}', 400, "messages: Field required"),
        (b'{"model": "model", "messages": []}', 400, "messages: "),
    ],
)
def test_a_body_that_is_none_is_refused_with_its_reason(house: House, body: bytes, status: int, said: str) -> None:
    got, _, answer = ask(house, CHAT, body)
    assert got == status and said in answer["error"]["message"]


def test_a_body_that_is_too_large_is_refused_before_it_comes(house: House) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"{head}content-length: {MAX_BYTES + 1}\r\n\r\n".encode())
        assert b"413" in sock.recv(100)
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"{head}transfer-encoding: chunked\r\n\r\n{MAX_BYTES + 1:x}\r\n".encode())
        sock.sendall(b" " * (MAX_BYTES + 1))
        assert b"413" in sock.recv(100)


def test_a_page_of_a_stranger_cannot_ask(house: House) -> None:
    status, headers, said = ask(house, CHAT, BODY, {"content-type": "text/plain"})
    assert status == 415 and "application/json" in said["error"]["message"]
    assert ask(house, CHAT, BODY, {"host": "evil.example:80"})[0] == 403
    assert ask(house, "/status", headers={"host": "evil.example"})[0] == 403
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    status, headers, _ = ask(house, CHAT, headers=preflight, method="OPTIONS")
    assert status == 405 and not any(name.startswith("access-control") for name in headers)


def test_an_origin_that_is_named_may_ask(fake_daemon: Start) -> None:
    preflight = {"origin": "http://app.example", "access-control-request-method": "POST"}
    with gateway(fake_daemon(), cors=("http://app.example",)) as house:
        status, headers, _ = ask(house, CHAT, headers=preflight, method="OPTIONS")
        assert status == 200 and headers["access-control-allow-origin"] == "http://app.example"


def test_what_is_not_there_and_other_methods_are_said(house: House) -> None:
    status, _, said = ask(house, "/v1/embeddings", BODY)
    assert status == 404 and "/v1/embeddings is not served here" in said["error"]["message"]
    status, headers, said = ask(house, CHAT)
    assert status == 405 and headers["allow"] == "POST"
    assert said["error"]["message"] == f"GET {CHAT} is not served here; ask with POST"
    assert ask(house, "/props", BODY)[2]["error"]["message"].endswith("; ask with GET or HEAD")
    assert ask(house, "/v1/messages/nothing", BODY)[2]["type"] == "error"


@pytest.fixture
def keyed(tmp_path: Path) -> tuple[str, Path]:
    key, line = make("me")
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\n{line} requests=1 per_minute=2\n")
    return key, path


def test_a_key_opens_what_is_closed_without(fake_daemon: Start, keyed: tuple[str, Path]) -> None:
    key, path = keyed
    assert key not in path.read_text()
    with gateway(fake_daemon(status=document()), keys=Keys(path)) as house:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"authorization": f"Basic {key}"},
        ):
            status, _, said = ask(house, CHAT, BODY, headers)
            assert status == 401 and said["error"]["type"] == "authentication_error"
        assert ask(house, "/metrics")[0] == 401 and ask(house, "/health")[0] == 200
        assert ask(house, CHAT, BODY, {"authorization": f"Bearer {key}"})[0] == 200
        assert ask(house, "/v1/messages", {**BODY, "max_tokens": 5}, {"x-api-key": key})[0] == 200
        status, headers, said = ask(house, CHAT, BODY, {"x-api-key": key})
        assert status == 429 and headers["retry-after"] and "2 requests a minute" in said["error"]["message"]
        assert [hello.client for hello in house.daemon.of(m.Hello) if hello.client != "gateway"] == ["gateway me"]


def test_a_key_allows_so_much_at_a_time() -> None:
    holder, now = Holder("me", requests=1, per_minute=2), [0.0]
    with (
        holder.request(lambda: now[0]),
        pytest.raises(ApiError, match="1 requests are open"),
        holder.request(lambda: now[0]),
    ):
        pass
    with holder.request(lambda: now[0]):
        pass
    now[0] = 12.4
    with pytest.raises(ApiError, match="2 requests a minute") as caught, holder.request(lambda: now[0]):
        pass
    assert caught.value.headers == {"retry-after": "48"}
    now[0] = 60.0
    with holder.request(lambda: now[0]):
        assert holder.open == 1
    assert holder.open == 0


@pytest.mark.parametrize(
    "line", ["me", "me md5:00", f"me sha256:{'0' * 63}", f"me sha256:{'0' * 64} speed=1", "# nobody"]
)
def test_a_file_of_keys_that_is_wrong_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{line}\n")
    with pytest.raises(KeysError, match=str(path)):
        Keys(path)
    path.write_text(f"a sha256:{'0' * 64}\nb sha256:{'0' * 64}\n")
    with pytest.raises(KeysError, match=":2: "):
        Keys(path)


def test_a_client_that_leaves_takes_its_request_along(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True, status=document())
    with gateway(daemon) as house:
        host, port = house.url.removeprefix("http://").split(":")
        for stream in (b"true", b"false"):
            body = b'{"model": "model", "messages": [{"role": "user", "content": "Hi"}], "stream": ' + stream + b"}"
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
                if stream == b"true":
                    assert sock.recv(10)
                daemon.wait_for(m.Generate, 1 if stream == b"true" else 2)
            daemon.wait_for(m.Cancel, 1 if stream == b"true" else 2)
        while "spark_gateway_open_requests 0.0" not in ask(house, "/metrics")[2]:
            pass


def test_the_gateway_finds_the_daemon_that_follows(fake_daemon: Start, tmp_path: Path) -> None:
    from fake_daemon import FakeDaemon

    path = tmp_path / "other.sock"
    with FakeDaemon(path) as first, gateway(first) as house:
        assert ask(house, CHAT, BODY)[0] == 200
        first.__exit__()
        with FakeDaemon(path):
            assert ask(house, CHAT, BODY)[0] in (200, 503)
            assert ask(house, CHAT, BODY)[0] == 200
