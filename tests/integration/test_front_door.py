"""Apps at a whole daemon: who cancels, leaves, is slow, late or asks too much costs nobody else anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from daemon import PATIENCE_S, Daemon, daemon, until

from spark_client import Client, Progress, RequestFailed, messages
from sparkd.demo.main import MODEL as DEMO

LONG = 50_000
LIMITS = {"context": LONG + 200, "sequences": 2, "queue": 8}
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def served(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    run_dir = tmp_path_factory.mktemp("daemon") / "run"
    with daemon(model_path("laguna-tiny-s1-q4_k_m"), run_dir, limits=LIMITS) as one:
        yield one


def ask(client: Client, prompt: list[int] = PROMPT, count: int = 200, **options: Any):
    return client.generate(tokens=prompt, max_tokens=count, ignore_eos=True, **options)


def alone(one: Daemon, **options: Any) -> list[int]:
    with one.client() as client, ask(client, **options) as stream:
        stream.read(PATIENCE_S)
        return stream.tokens


def prompt_rows(client: Client) -> int:
    """Prompt tokens that were computed since the daemon began."""
    rows = client.status()["calibration"]["prefill"]["rows"]
    assert isinstance(rows, int)
    return rows


def until_idle(client: Client) -> None:
    until(lambda: client.status()["requests"]["running"] == client.status()["requests"]["queued"] == 0)
    assert client.status()["memory"]["state_used_bytes"] == 0


@pytest.mark.parametrize("where", ["queue", "prompt", "output"])
@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_what_is_cancelled_or_left_stops_and_the_others_never_notice(served: Daemon, where: str, how: str) -> None:
    expected = alone(served)
    prompt = PROMPT if where == "output" else [5] * LONG
    with served.client() as client:
        before = prompt_rows(client)
        others = [ask(client) for _ in range(3 if where == "queue" else 1)]
        if how == "cancel":
            with served.client() as victim:
                stream = ask(victim, prompt, 150)
                if where != "queue":
                    next(stream.events(PATIENCE_S))
                stream.cancel()
                stream.read(PATIENCE_S)
                assert stream.finish_reason == "cancelled"
        else:
            wait = "" if where == "queue" else "next(s.events());"
            script = (
                "import sys; from spark_client import Client; c = Client(sys.argv[1]);"
                f"s = c.generate(tokens={prompt[:1]} * {len(prompt)}, max_tokens=150, ignore_eos=True);"
                f"{wait} print('there', flush=True); sys.stdin.read()"
            )
            app = subprocess.Popen(
                [sys.executable, "-c", script, str(served.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert app.stdout is not None and app.stdout.readline() == b"there\n"
            app.kill()
            app.communicate()
        for stream in others:
            stream.read(PATIENCE_S)
            assert stream.tokens == expected
        until_idle(client)
        if where == "prompt":
            until(lambda: prompt_rows(client) > before)
            assert prompt_rows(client) - before < LONG


def test_one_slow_reader_beside_fast_ones_gets_every_token_and_slows_nobody(served: Daemon) -> None:
    expected = alone(served)
    with zmq.Context() as context, context.socket(zmq.DEALER) as slow, served.client() as client:
        slow.linger = 0
        slow.connect(f"ipc://{served.socket}")

        def send(msg: messages.Message) -> None:
            slow.send(messages.encode(msg))

        def heard() -> Any:
            assert slow.poll(PATIENCE_S * 1000), "nothing came"
            return messages.decode(slow.recv())

        send(messages.Hello([messages.VERSION], "slow"))
        assert isinstance(heard(), messages.Welcome)
        send(messages.Generate(1, tokens=PROMPT, max_tokens=200, ignore_eos=True, credit=1))
        accepted = heard()
        got: list[int] = []
        finished = None
        fast = 0
        while finished is None:
            msg = heard()
            if isinstance(msg, messages.Chunk):
                assert msg.index == len(got)
                got += msg.tokens
                with ask(client) as stream:
                    stream.read(PATIENCE_S)
                    assert stream.tokens == expected
                fast += 1
                send(messages.Credit(accepted.request, 1))
            elif isinstance(msg, messages.Finished):
                finished = msg
            else:
                assert isinstance(msg, messages.Progress | messages.Pong)
        assert got == expected and fast >= 2


def test_a_late_request_ends_with_its_deadline_wherever_it_is(served: Daemon) -> None:
    expected = alone(served)
    with served.client() as client:
        running = ask(client, [1], LONG, timeout_s=3.0)
        reading = ask(client, [5] * LONG, 150, timeout_s=3.0)
        waiting = ask(client, timeout_s=1.0)
        patient = ask(client)
        for stream, doing in ((waiting, "queued"), (running, "[0-9]+ output tokens"), (reading, "read")):
            with pytest.raises(RequestFailed, match=rf"within its timeout_s = [13] s; .*{doing}") as failed:
                stream.read(PATIENCE_S)
            assert failed.value.code == "timeout"
        patient.read(PATIENCE_S)
        assert patient.tokens == expected
        until_idle(client)


def test_a_request_hears_where_it_waits_and_how_far_its_prompt_is_read(served: Daemon) -> None:
    with served.client() as client:
        busy = [ask(client, [1], LONG) for _ in range(2)]
        first, second = ask(client, [5] * 1500, 2), ask(client, [5] * 1500, 2)
        assert (first.position, second.position) == (0, 1)
        for stream in busy:
            next(stream.events(PATIENCE_S))
            stream.cancel()
        told = [event for event in second.events(PATIENCE_S) if isinstance(event, Progress)]
        reading = [event for event in told if event.stage == "prefill"]
        assert reading and all(0 < event.done <= event.total == 1500 for event in reading)
        assert all(event.position == 0 for event in told)
        first.read(PATIENCE_S)


def test_the_end_tells_where_the_time_went_and_that_every_expert_was_there(served: Daemon) -> None:
    with served.client() as client, ask(client, count=20) as stream:
        *_, end = stream.events(PATIENCE_S)
    assert isinstance(end, messages.Finished)
    assert (end.prompt_tokens, end.output_tokens, end.hit_rate, end.resumed) == (len(PROMPT), 20, 1.0, 0)
    assert min(end.timings.queued_s, end.timings.prefill_s, end.timings.decode_s) >= 0
    # What the supervisor hears in one go came at one time.
    assert end.timings.prefill_s + end.timings.decode_s > 0


def test_log_probabilities_come_with_every_token_and_change_none(served: Daemon) -> None:
    expected = alone(served, count=30)
    with served.client() as client, ask(client, count=30, logprobs=3) as stream:
        stream.read(PATIENCE_S)
    assert stream.tokens == expected and len(stream.choices) == 30
    for token, choice in zip(stream.tokens, stream.choices, strict=True):
        assert (choice.best[0].token, choice.best[0].logprob) == (token, choice.logprob)
        values = [entry.logprob for entry in choice.best]
        assert values == sorted(values, reverse=True) and len(values) == 3 and values[0] <= 0


def test_penalties_and_biases_reach_the_sampler(served: Daemon) -> None:
    plain = alone(served, count=60)
    assert len(set(alone(served, count=60, presence_penalty=10.0, frequency_penalty=10.0))) == 60
    assert alone(served, count=10, logit_bias={77: 100.0}) == [77] * 10
    banned = alone(served, count=60, logit_bias=dict.fromkeys(plain, -100.0))
    assert not set(banned) & set(plain)


def test_an_option_that_is_not_supported_is_refused_by_name_under_the_tag_of_its_message(served: Daemon) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as app:
        app.linger = 0
        app.connect(f"ipc://{served.socket}")
        plain = {"v": messages.VERSION, "t": "generate", "tag": 7, "tokens": [1]}
        for fields, named in (
            ({"best_of": 3}, "best_of"),
            ({"sampling": {"mirostat": 2}}, "mirostat"),
            ({"logprobs": 21}, "logprobs is 21"),
            ({"sampling": {"min_p": 1.5}}, "min_p is 1.5"),
            ({"timeout_s": -1.0}, "timeout_s is -1"),
            ({"tools": [{"name": "x"}]}, "tools belong to chat"),
        ):
            app.send(messages.encode(messages.Hello([messages.VERSION], "test")))
            app.send(msgpack.packb(plain | fields))
            while not isinstance(answer := messages.decode(app.recv()), messages.Failed):
                assert isinstance(answer, messages.Welcome)
            assert answer.tag == 7 and named in answer.message and not answer.retry


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a model that has a chat template, for requests of 200 positions."""
    with daemon(DEMO, tmp_path_factory.mktemp("daemon") / "run", limits={"context": 200}) as one:
        yield one


def _text(client: Client, tokens: int) -> str:
    text = "a" + " a" * (tokens - 1)
    assert len(client.tokenize(text)) == tokens
    return text


@pytest.mark.parametrize("kind", ["text", "chat", "tokens"])
def test_a_prompt_at_the_limit_is_read_whole_and_one_beyond_is_refused_with_both_numbers(
    speaking: Daemon, kind: str
) -> None:
    with speaking.client() as client:

        def send(tokens: int) -> Any:
            if kind == "tokens":
                return client.generate(tokens=[5] * tokens, max_tokens=4)
            if kind == "text":
                return client.generate(_text(client, tokens - begun), max_tokens=4)
            return client.chat([{"role": "user", "content": _text(client, tokens - begun)}], max_tokens=4)

        begun = 0
        first = send(10)
        first.read(PATIENCE_S)
        begun = first.usage.prompt_tokens - 10
        whole = send(196)
        whole.read(PATIENCE_S)
        assert whole.usage.prompt_tokens == 196
        for tokens in (197, 5 * 196):
            both = rf"{tokens} tokens .* {tokens + 4} positions .* 200 "
            with pytest.raises(RequestFailed, match=both) as refused:
                send(tokens).read(PATIENCE_S)
            assert not refused.value.retry
