"""The asyncio client against a daemon that only speaks the protocol."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from spark_client import AsyncClient, Client, ConnectionFailed, RequestFailed, SparkClientError
from spark_client import messages as m

Start = Callable[..., Any]


def echo(ask: m.Generate) -> list[str]:
    return [f"{ask.prompt}.{n} " for n in range(3)]


def using(path: Path, body: Callable[[AsyncClient], Awaitable[None]], **options: Any) -> None:
    """Run `body` with a connected client; the loop must end without a task or thread left over."""

    async def main() -> None:
        async with AsyncClient(path, **options) as client:
            await body(client)
        await asyncio.get_running_loop().shutdown_default_executor()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = threading.active_count()
    asyncio.run(main(), debug=True)
    assert threading.active_count() <= before


async def heard(daemon: Any, kind: type) -> list[Any]:
    """Wait until the daemon has heard a message of this type; pytest's timeout bounds the wait."""
    while not daemon.of(kind):
        await asyncio.sleep(0.005)
    return daemon.of(kind)


def test_text_tokens_and_figures_of_a_request_reach_the_app(fake_daemon: Start) -> None:
    daemon = fake_daemon()

    async def body(client: AsyncClient) -> None:
        stream = await client.generate("Once", temperature=0.5, top_k=3, top_p=0.9, seed=7, stop=["\n"], max_tokens=9)
        assert [text async for text in stream] == ["Hello", ", ", "world"]
        assert (stream.text, stream.tokens, stream.finish_reason) == ("Hello, world", [0, 1, 2], "stop")
        assert stream.usage is not None and (stream.usage.prompt_tokens, stream.usage.output_tokens) == (3, 3)
        assert stream.timings is not None and stream.timings.decode_s == 2.0
        assert (stream.seed, stream.request, stream.position) == (42, 1000, 0)
        assert client.server.model == "model"

    using(daemon.path, body)
    (ask,) = daemon.of(m.Generate)
    assert (ask.prompt, ask.stop, ask.max_tokens, ask.sampling) == ("Once", ["\n"], 9, m.Sampling(0.5, 3, 0.9, 7))
    assert daemon.wait_for(m.Bye) == [m.Bye()]


def test_chat_tokenize_and_status_are_those_of_the_other_client(fake_daemon: Start) -> None:
    daemon = fake_daemon(status={"state": "ready"})
    talk = [{"role": "user", "content": "Hi"}]

    async def body(client: AsyncClient) -> None:
        stream = await client.chat(talk, tools=[{"name": "f"}], options={"enable_thinking": True}, max_tokens=5)
        assert await stream.read() == "Hello, world"
        assert await client.tokenize("ab", special=True) == [97, 98]
        assert await client.tokenize_chat([{"role": "user", "content": "a"}]) == [97]
        assert (await client.detokenize([97]), await client.token_bytes([97])) == ("a", [b"a"])
        assert await client.status() == {"state": "ready"}

    using(daemon.path, body)
    with Client(daemon.path) as client:
        client.chat(talk, tools=[{"name": "f"}], options={"enable_thinking": True}, max_tokens=5).read()
        client.tokenize("ab", special=True)
        client.tokenize_chat([{"role": "user", "content": "a"}])
    for kind in (m.Generate, m.Tokenize):
        heard = daemon.of(kind)
        assert heard[: len(heard) // 2] == heard[len(heard) // 2 :]


def test_events_include_the_progress_before_the_first_text(fake_daemon: Start) -> None:
    async def body(client: AsyncClient) -> None:
        stream = await client.generate(tokens=[1, 2, 3])
        kinds = [type(event).__name__ async for event in stream.events()]
        assert kinds == ["Progress", "Chunk", "Chunk", "Chunk", "Finished"]

    using(fake_daemon().path, body)


def test_streams_of_many_tasks_do_not_mix(fake_daemon: Start) -> None:
    async def body(client: AsyncClient) -> None:
        async def ask(number: int) -> str:
            return await (await client.generate(f"t{number}")).read()

        texts = await asyncio.gather(*(ask(n) for n in range(16)))
        assert texts == [f"t{n}.0 t{n}.1 t{n}.2 " for n in range(16)]

    using(fake_daemon(plan=echo).path, body)


def test_credit_is_granted_as_the_app_reads_and_not_before(fake_daemon: Start) -> None:
    daemon = fake_daemon(plan=lambda ask: [f"{n} " for n in range(1000)])

    async def body(client: AsyncClient) -> None:
        stream = await client.generate("many")
        await client.status()
        assert daemon.of(m.Credit) == []
        assert await stream.read() == "".join(f"{n} " for n in range(1000))

    using(daemon.path, body)
    assert 1000 - 64 <= sum(grant.chunks for grant in daemon.of(m.Credit)) <= 1000


def test_cancelling_the_task_that_reads_cancels_the_request(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)

    async def body(client: AsyncClient) -> None:
        reading = asyncio.Event()
        streams = []

        async def ask() -> None:
            stream = await client.generate("x")
            streams.append(stream)
            async for _ in stream:
                reading.set()

        task = asyncio.create_task(ask())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await heard(daemon, m.Cancel) == [m.Cancel(streams[0].request)]
        assert await client.tokenize("a") == [97]
        with pytest.raises(SparkClientError, match="closed"):
            await streams[0].read()

    using(daemon.path, body)


def test_a_task_cancelled_before_its_request_was_accepted_cancels_it_once_it_is(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)

    async def body(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("x"))
        # One turn of the loop sends the request; its answer needs the other thread and a second turn.
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await heard(daemon, m.Cancel) == [m.Cancel(1000)]

    using(daemon.path, body)


def test_a_cancelled_stream_ends_with_that_reason(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)

    async def body(client: AsyncClient) -> None:
        stream = await client.generate("x")
        stream.cancel()
        await stream.read()
        assert stream.finish_reason == "cancelled"

    using(daemon.path, body)


def test_leaving_the_with_block_cancels(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)

    async def body(client: AsyncClient) -> None:
        async with await client.generate("x") as stream:
            assert await anext(aiter(stream)) == "Hello"
        assert await heard(daemon, m.Cancel) == [m.Cancel(stream.request)]

    using(daemon.path, body)


def test_dropping_the_stream_cancels(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)

    async def body(client: AsyncClient) -> None:
        async for text in await client.generate("x"):
            assert text == "Hello"
            break
        gc.collect()
        assert await heard(daemon, m.Cancel) == [m.Cancel(1000)]

    using(daemon.path, body)


def test_a_wait_for_output_can_be_bounded_without_ending_the_request(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)

    async def body(client: AsyncClient) -> None:
        async with await client.generate("x") as stream:
            while stream.text != "Hello, world":
                with pytest.raises(TimeoutError, match="no output for"):
                    await stream.read(timeout=0.05)
            assert (stream.finish_reason, daemon.of(m.Cancel)) == (None, [])

    using(daemon.path, body)


def test_a_refused_request_raises_code_message_and_whether_to_retry(fake_daemon: Start) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(RequestFailed, match="the queue is full") as caught:
            await client.generate("x")
        assert (caught.value.code, caught.value.retry) == ("unavailable", True)

    using(fake_daemon(plan=lambda ask: m.Failed(None, None, "unavailable", "the queue is full", True)).path, body)


def test_a_parameter_that_does_not_exist_is_an_error_before_anything_is_sent(fake_daemon: Start) -> None:
    daemon = fake_daemon()
    with Client(daemon.path) as client, pytest.raises(TypeError, match=r"unknown parameter 'topk'; there are: model, "):
        client.generate("x", topk=3)  # type: ignore[call-arg]
    assert daemon.of(m.Generate) == []


def test_nothing_at_the_path_is_said_at_once(tmp_path: Path) -> None:
    async def enter() -> None:
        async with AsyncClient(tmp_path / "none.sock"):
            raise AssertionError

    with pytest.raises(ConnectionFailed, match=r"no daemon at .*none\.sock: .*sparkd serve"):
        asyncio.run(enter())


def test_an_unconnected_client_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SparkClientError, match="not connected: use it in 'async with'"):
        asyncio.run(AsyncClient(tmp_path / "none.sock").status())


def test_a_daemon_that_does_not_answer_is_named(fake_daemon: Start) -> None:
    async def enter(path: Path) -> None:
        async with AsyncClient(path, timeout=0.1):
            raise AssertionError

    with pytest.raises(ConnectionFailed, match=r"has not answered for 0\.1 s"):
        asyncio.run(enter(fake_daemon(silent=True).path))


def test_a_daemon_that_ends_fails_every_stream_at_once(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True)

    async def body(client: AsyncClient) -> None:
        stream = await client.generate("x")
        daemon.__exit__()
        with pytest.raises(ConnectionFailed, match="closed the connection or ended"):
            await stream.read()
        with pytest.raises(ConnectionFailed, match="closed the connection or ended"):
            await client.status()

    using(daemon.path, body)


def test_a_client_that_may_reconnects_with_its_next_call_and_asks_nothing_twice(fake_daemon: Start) -> None:
    first = fake_daemon(endless=True)
    started: list[Any] = []

    async def body(client: AsyncClient) -> None:
        stream = await client.generate("x")
        first.__exit__()
        with pytest.raises(ConnectionFailed, match="what was asked of it is lost"):
            await stream.read()
        waiting = [asyncio.create_task(client.tokenize(text)) for text in "ab"]
        await asyncio.sleep(0.1)
        started.append(fake_daemon())
        assert await asyncio.gather(*waiting) == [[97], [98]]
        assert await (await client.generate("y")).read() == "Hello, world"

    using(first.path, body, reconnect=True, timeout=60.0)
    assert [ask.prompt for ask in started[0].of(m.Generate)] == ["y"]
    assert len(started[0].of(m.Hello)) == 1


def test_a_daemon_that_hangs_is_noticed_when_its_lease_has_passed(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True, lease_s=2.0)

    async def body(client: AsyncClient) -> None:
        stream = await client.generate("x")
        daemon.silent = True
        with pytest.raises(ConnectionFailed, match="has not answered"):
            await stream.read()

    using(daemon.path, body)


def test_a_lapsed_lease_fails_the_streams_it_ended(fake_daemon: Start) -> None:
    daemon = fake_daemon(endless=True, lease_s=2.0)

    async def body(client: AsyncClient) -> None:
        stream = await client.generate("x")
        daemon.lapsed = True
        with pytest.raises(ConnectionFailed, match="lease may have lapsed"):
            await stream.read()

    using(daemon.path, body)


def test_a_message_too_large_for_the_protocol_is_refused_here(fake_daemon: Start) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(SparkClientError, match="the limit is"):
            await client.tokenize("x" * (m.MAX_BYTES + 1))
        assert await client.tokenize("a") == [97]

    using(fake_daemon().path, body)


def test_closing_twice_does_no_harm_and_ends_streams(fake_daemon: Start) -> None:
    async def main(path: Path) -> None:
        client = await AsyncClient(path).connect()
        stream = await client.generate("x")
        await client.close()
        await client.close()
        with pytest.raises(SparkClientError, match="the client is closed"):
            await stream.read()
        with pytest.raises(SparkClientError, match="the client is closed"):
            await client.status()

    asyncio.run(main(fake_daemon(endless=True).path))
