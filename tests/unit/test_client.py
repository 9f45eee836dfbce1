"""The Python client against a daemon that only speaks the protocol."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_client import Client, ConnectionFailed, Parameters, RequestFailed, SparkClientError
from spark_client import messages as m
from spark_client.address import find_socket

ROOT = Path(__file__).parent.parent.parent
Start = Callable[..., Any]


def echo(ask: m.Generate) -> list[str]:
    return [f"{ask.prompt}.{n} " for n in range(3)]


def test_the_client_carries_an_identical_copy_of_the_protocol() -> None:
    own = (ROOT / "clients" / "spark_client" / "messages.py").read_bytes()
    assert own == (ROOT / "sparkd" / "ipc" / "messages.py").read_bytes()


def test_the_client_imports_nothing_of_the_daemon_or_its_dependencies() -> None:
    program = "import sys, spark_client; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"zmq", "msgpack"} <= set(loaded)
    assert not {"sparkd", "numpy", "torch", "rich", "gguf", "tokenizers"} & set(loaded)


def test_text_tokens_and_figures_of_a_request_reach_the_app(fake_daemon: Start) -> None:
    daemon = fake_daemon()
    with Client(daemon.path) as client:
        stream = client.generate("Once", temperature=0.5, top_k=3, top_p=0.9, seed=7, stop=["\n"], max_tokens=9)
        assert list(stream) == ["Hello", ", ", "world"]
    assert (stream.text, stream.tokens, stream.finish_reason) == ("Hello, world", [0, 1, 2], "stop")
    assert stream.usage is not None and (stream.usage.prompt_tokens, stream.usage.output_tokens) == (3, 3)
    assert stream.timings is not None and stream.timings.decode_s == 2.0
    assert (stream.seed, stream.request, stream.position) == (42, 1000, 0)
    (ask,) = daemon.of(m.Generate)
    assert (ask.prompt, ask.tokens, ask.chat, ask.stop, ask.max_tokens) == ("Once", None, None, ["\n"], 9)
    assert ask.sampling == m.Sampling(0.5, 3, 0.9, 7)


def test_every_field_of_a_request_can_be_given_by_its_name(fake_daemon: Start) -> None:
    given: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(m.Sampling)}
    given |= {"min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    given |= {"logit_bias": {5: -1.0}, "stop": (), "model": "", "max_tokens": 3, "ignore_eos": True}
    given |= {"logprobs": 2, "timeout_s": 60.0, "parts": True, "call": "f", "shorten": True, "traffic_tag": "x"}
    assert given.keys() == Parameters.__annotations__.keys()
    daemon = fake_daemon()
    with Client(daemon.path) as client:
        client.generate("x", **given).read()
    (ask,) = daemon.of(m.Generate)
    assert ask.sampling == m.Sampling(0.0, 0, 1.0, None, 0.1, 1.5, 0.5, 0.25, [m.Bias(5, -1.0)])
    assert (ask.max_tokens, ask.ignore_eos, ask.logprobs, ask.timeout_s) == (3, True, 2, 60.0)
    assert ask.parts and ask.call == "f" and ask.shorten and ask.traffic_tag == "x"
    fields = {field.name for field in dataclasses.fields(m.Generate)} - {"tag", "credit", "sampling"}
    assert fields - Parameters.__annotations__.keys() == {"prompt", "tokens", "chat", "tools", "options"}


def test_a_chat_is_sent_with_its_tools_and_template_options(fake_daemon: Start) -> None:
    daemon = fake_daemon()
    talk = [{"role": "user", "content": "Hi"}]
    with Client(daemon.path) as client:
        assert client.chat(talk, tools=[{"name": "f"}], options={"enable_thinking": True}).read() == "Hello, world"
    (ask,) = daemon.of(m.Generate)
    assert (ask.chat, ask.tools, ask.options, ask.prompt) == (talk, [{"name": "f"}], {"enable_thinking": True}, None)


def test_events_include_the_progress_before_the_first_text(fake_daemon: Start) -> None:
    with Client(fake_daemon().path) as client:
        kinds = [type(event).__name__ for event in client.generate(tokens=[1, 2, 3]).events()]
    assert kinds == ["Progress", "Chunk", "Chunk", "Chunk", "Finished"]


def test_a_prompt_or_tokens_must_be_given_but_not_both(fake_daemon: Start) -> None:
    with Client(fake_daemon().path) as client:
        with pytest.raises(ValueError, match="either"):
            client.generate()
        with pytest.raises(ValueError, match="either"):
            client.generate("a", tokens=[1])


def test_credit_is_granted_as_the_app_reads_and_not_before(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: [f"{n} " for n in range(1000)])
    with Client(daemon.path) as client:
        stream = client.generate("many")
        client.status()
        assert daemon.of(m.Credit) == []
        assert stream.read() == "".join(f"{n} " for n in range(1000))
    assert 1000 - 64 <= sum(grant.chunks for grant in daemon.of(m.Credit)) <= 1000


def test_streams_of_one_connection_do_not_mix(fake_daemon: Start) -> None:
    with Client(fake_daemon(plan=echo).path) as client:
        streams = [client.generate(f"p{n}") for n in range(8)]
        interleaved = list(zip(*streams, strict=True))
    assert interleaved == [tuple(f"p{n}.{k} " for n in range(8)) for k in range(3)]


def test_streams_may_be_read_by_several_threads(fake_daemon: Start) -> None:
    texts: dict[int, str] = {}
    with Client(fake_daemon(plan=echo).path) as client:

        def ask(number: int) -> None:
            texts[number] = client.generate(f"t{number}").read()

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {n: f"t{n}.0 t{n}.1 t{n}.2 " for n in range(8)}


def test_a_cancelled_stream_ends_with_that_reason(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    with Client(daemon.path) as client:
        stream = client.generate("x")
        assert next(iter(stream)) == "Hello"
        stream.cancel()
        stream.read()
        assert stream.finish_reason == "cancelled"
    assert daemon.of(m.Cancel) == [m.Cancel(stream.request)]


def test_leaving_the_with_block_cancels(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    with Client(daemon.path) as client:
        with client.generate("x") as stream:
            assert next(iter(stream)) == "Hello"
        assert daemon.wait_for(m.Cancel) == [m.Cancel(stream.request)]
        with pytest.raises(SparkClientError, match="closed"):
            stream.read()


def test_dropping_the_stream_cancels(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    with Client(daemon.path) as client:
        for text in client.generate("x"):
            assert text == "Hello"
            break
        gc.collect()
        assert daemon.wait_for(m.Cancel) == [m.Cancel(1000)]


def test_closing_the_client_says_goodbye_which_ends_what_still_runs(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    with Client(daemon.path) as client:
        streams = [client.generate("x") for _ in range(2)]
    assert daemon.wait_for(m.Bye) == [m.Bye()]
    with pytest.raises(SparkClientError, match="the client is closed"):
        for _ in streams[0]:
            pass


def test_a_finished_stream_is_not_cancelled(fake_daemon: Start) -> None:
    daemon = fake_daemon()
    with Client(daemon.path) as client:
        with client.generate("x") as stream:
            stream.read()
        stream.cancel()
        client.status()
    assert daemon.of(m.Cancel) == []


def test_a_refused_request_raises_code_message_and_whether_to_retry(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: m.Failed(None, None, "unavailable", "the queue is full", True))
    with Client(daemon.path) as client:
        with pytest.raises(RequestFailed) as caught:
            client.generate("x")
        assert (caught.value.code, str(caught.value), caught.value.retry) == ("unavailable", "the queue is full", True)
        assert client.tokenize("ok") == [111, 107]
        assert client.tokenize_chat([{"role": "user", "content": "ok"}], options={"a": 1}) == [111, 107]
        assert client.detokenize([111, 107]) == "ok" and client.token_bytes([111, 107]) == [b"o", b"k"]


def test_tokens_and_status_are_answered_beside_a_stream(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True, status={"state": "ready"})
    with Client(daemon.path) as client, client.generate("x"):
        assert client.tokenize("ab", special=True) == [97, 98]
        assert client.status() == {"state": "ready"}
    assert daemon.of(m.Tokenize)[0].special


def test_an_idle_app_keeps_its_lease(fake_daemon: Start) -> None:
    daemon = fake_daemon(lease_s=2.0)
    with Client(daemon.path):
        assert len(daemon.wait_for(m.Ping, 3)) >= 3


def test_a_wait_for_output_can_be_bounded_without_ending_the_request(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    with Client(daemon.path) as client, client.generate("x") as stream:
        with pytest.raises(TimeoutError):
            stream.read(timeout=0.05)
        assert (stream.text, stream.finish_reason) == ("Hello, world", None)
        assert daemon.of(m.Cancel) == []


def test_nothing_at_the_path_is_said_at_once_with_the_command_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed) as caught:
        Client(tmp_path / "none.sock")
    message = str(caught.value)
    assert str(tmp_path / "none.sock") in message and "sparkd serve" in message and "\n" not in message


def test_a_socket_left_by_a_dead_daemon_is_recognised(fake_daemon: Start, tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "stale.sock"))
    with pytest.raises(ConnectionFailed, match=r"stale\.sock .*ended and left its socket"):
        Client(tmp_path / "stale.sock")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match="at most 107 bytes"):
        Client(tmp_path / ("x" * 108))


def test_a_daemon_that_does_not_answer_is_named(fake_daemon: Start) -> None:
    daemon = fake_daemon(silent=True)
    with pytest.raises(ConnectionFailed, match=r"has not answered for 0\.1 s"):
        Client(daemon.path, timeout=0.1)


def test_a_refused_hello_is_raised(fake_daemon: Start) -> None:
    daemon = fake_daemon(refuse=m.Failed(None, None, "version", "this daemon speaks version 2"))
    with pytest.raises(RequestFailed, match="speaks version 2"):
        Client(daemon.path)


def test_a_daemon_that_ends_fails_every_stream_at_once(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    with Client(daemon.path) as client:
        stream = client.generate("x")
        daemon.__exit__()
        with pytest.raises(ConnectionFailed, match="closed the connection or ended"):
            stream.read()
        with pytest.raises(ConnectionFailed, match="closed the connection or ended"):
            client.status()


def test_a_client_that_may_reconnects_with_its_next_call_and_asks_nothing_twice(fake_daemon: Start) -> None:
    first = fake_daemon(endless=True)
    threads = threading.active_count() - 1
    with Client(first.path, reconnect=True, timeout=60.0) as client:
        stream = client.generate("x")
        first.__exit__()
        with pytest.raises(ConnectionFailed, match="what was asked of it is lost"):
            stream.read()
        starting = threading.Timer(0.3, lambda: started.append(fake_daemon(status={"state": "ready"})))
        started: list[Any] = []
        starting.start()
        assert client.status() == {"state": "ready"}  # waits until it is there
        starting.join()
        assert client.generate("y").read() == "Hello, world"
        assert [ask.prompt for ask in started[0].of(m.Generate)] == ["y"]
        stream.close()
    assert threading.active_count() <= threads + 1
    with pytest.raises(SparkClientError, match="the client is closed"):
        client.status()


def test_reconnecting_is_given_up_when_no_daemon_comes(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)
    with Client(daemon.path, reconnect=True, timeout=0.3) as client:
        stream = client.generate("x")
        daemon.__exit__()
        with pytest.raises(ConnectionFailed, match="is lost"):
            stream.read()
        with pytest.raises(ConnectionFailed, match="no daemon listens at"):
            client.status()
    with pytest.raises(ConnectionFailed):
        client.status()


def test_a_daemon_that_hangs_is_noticed_when_its_lease_has_passed(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True, lease_s=2.0)
    with Client(daemon.path) as client:
        stream = client.generate("x")
        daemon.silent = True
        with pytest.raises(ConnectionFailed, match="has not answered"):
            stream.read()


def test_a_lapsed_lease_fails_the_streams_it_ended(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True, lease_s=2.0)
    with Client(daemon.path) as client:
        stream = client.generate("x")
        daemon.lapsed = True
        with pytest.raises(ConnectionFailed, match="lease may have lapsed"):
            stream.read()


def test_a_message_too_large_for_the_protocol_is_refused_here(fake_daemon: Start) -> None:
    with Client(fake_daemon().path) as client:
        with pytest.raises(SparkClientError, match="the limit is"):
            client.tokenize("x" * (m.MAX_BYTES + 1))
        assert client.tokenize("a") == [97]


def test_closing_twice_does_no_harm_and_leaves_no_thread(fake_daemon: Start) -> None:
    daemon = fake_daemon()
    before = threading.active_count()
    client = Client(daemon.path)
    client.close()
    client.close()
    assert threading.active_count() == before
    with pytest.raises(SparkClientError, match="the client is closed"):
        client.status()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPARKD_SOCKET_PATH": "/a/s", "SPARKD_RUN_DIR": "/b"}, "/a/s"),
        ({"SPARKD_RUN_DIR": "/b", "RUNTIME_DIRECTORY": "/c"}, "/b/client.sock"),
        ({"RUNTIME_DIRECTORY": "/c:/d", "XDG_RUNTIME_DIR": "/e"}, "/c/client.sock"),
        ({"XDG_RUNTIME_DIR": "/e"}, "/e/sparkd/client.sock"),
        ({}, "/run/sparkd/client.sock"),
    ],
)
def test_the_socket_is_found_where_the_daemon_puts_it(environment: dict[str, str], expected: str) -> None:
    assert find_socket(environment) == Path(expected)
