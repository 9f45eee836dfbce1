"""The asyncio client and the chat with a real daemon."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from daemon import PATIENCE_S, Daemon, daemon

from spark_client import AsyncClient, RequestFailed
from sparkd.demo.main import MODEL as DEMO

LIMITS = {"context": 2048, "sequences": 3, "queue": 16}
QUESTIONS = ("Who are you?", "Define lantern.", "What is 2 + 3?", "Where do you live?")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(DEMO, tmp_path_factory.mktemp("clients") / "run", limits=LIMITS) as one:
        yield one


def asking(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_streams_of_many_tasks_have_the_tokens_they_have_alone(served: Daemon) -> None:
    with served.client() as client:
        alone = {}
        for question in QUESTIONS:
            stream = client.chat(asking(question), max_tokens=40)
            stream.read()
            alone[question] = stream.tokens

    async def ask(client: AsyncClient, question: str) -> list[int]:
        async with await client.chat(asking(question), max_tokens=40) as stream:
            text = "".join([piece async for piece in stream])
            assert text == stream.text and stream.usage is not None
            assert stream.usage.output_tokens == len(stream.tokens)
            return stream.tokens

    async def main() -> list[list[int]]:
        async with AsyncClient(served.socket, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(ask(client, question) for question in QUESTIONS * 2))

    assert asyncio.run(main()) == [alone[question] for question in QUESTIONS * 2]


def test_a_cancelled_task_frees_the_worker_and_disturbs_no_other(served: Daemon) -> None:
    async def main() -> str:
        async with AsyncClient(served.socket, timeout=PATIENCE_S) as client:

            async def endless() -> None:
                await (await client.generate(tokens=[1], max_tokens=1500, ignore_eos=True)).read()

            tasks = [asyncio.create_task(endless()) for _ in range(3)]
            while (await client.status())["requests"]["running"] < 3:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(client.chat(asking(QUESTIONS[0]), max_tokens=8))
            await waiting
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True)
            )
            text = await waiting.result().read(timeout=PATIENCE_S)
            while (await client.status())["requests"]["running"]:
                await asyncio.sleep(0.01)
            assert (await client.status())["memory"]["state_used_bytes"] == 0
            return text

    assert asyncio.run(main()) == "I am Spark, a tiny mix"


def test_a_refusal_reaches_the_task_that_asked(served: Daemon) -> None:
    async def main() -> None:
        async with AsyncClient(served.socket, timeout=PATIENCE_S) as client:
            assert len(await client.tokenize("Hello world")) == 3
            with pytest.raises(RequestFailed, match="2048"):
                await client.generate(tokens=[1] * 2000, max_tokens=100)

    asyncio.run(main())


def test_the_chat_answers_what_is_piped_into_it(served: Daemon) -> None:
    command = [sys.executable, "-m", "spark_chat", "--socket", str(served.socket), "--temperature", "0"]
    text = "Who are you?\n/clear\nWho are you?\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "forgot 1 turn\n")
    first, second = done.stdout.splitlines()
    assert first == second and first.startswith("I am Spark, a tiny mixture-of-experts language model.")


def test_the_chat_says_when_the_conversation_has_become_too_long(served: Daemon) -> None:
    command = [sys.executable, "-m", "spark_chat", "--socket", str(served.socket), "--max-tokens", "2000"]
    done = subprocess.run(command, input="word " * 500 + "\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "2048" in done.stderr and done.stderr.count("\n") == 1
