"""Two clients that others have made do a task with tools: `llm` and `pydantic-ai`, in front of a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_house import House, gateway

from spark_client import messages as m

Start = Callable[..., Any]
WHY = "the clients are not installed: make test installs them"
CALL = ["<tool_call>\n<function=weather>\n<parameter=city>\nPar", "is\n</parameter>\n</function>\n"]


def script(ask: m.Generate) -> list[str]:
    """The tool is asked first; what it said is the answer."""
    last = (ask.chat or [])[-1]
    return ["In Paris ", f"it is {last['content']}."] if last["role"] == "tool" else [*CALL, "</tool_call>"]


def weather(city: str) -> str:
    """The weather in a city."""
    return {"Paris": "sunny"}[city]


@pytest.fixture
def house(fake_daemon: Start) -> Iterator[House]:
    with gateway(fake_daemon(plan=script)) as made:
        yield made


def check_asked(house: House) -> None:
    """The worker was asked twice, the second time with its own call and what came of it."""
    first, second = house.daemon.of(m.Generate)
    assert [tool["function"]["name"] for tool in first.tools] == ["weather"]
    _, asked, told = second.chat[-3:]
    assert asked["tool_calls"][0]["function"]["name"] == "weather"
    assert (told["role"], told["content"]) == ("tool", "sunny")
    assert told["tool_call_id"] == asked["tool_calls"][0]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_llm_does_a_task_with_a_tool(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    pytest.importorskip("llm", reason=WHY)
    from llm.default_plugins.openai_models import Chat

    model = Chat("spark", model_name="model", api_base=f"{house.url}/v1", supports_tools=True)
    answer = model.chain("The weather in Paris?", tools=[weather], key="none", stream=stream).text()
    assert "In Paris it is sunny." in answer
    check_asked(house)


@pytest.mark.parametrize("stream", [False, True])
def test_pydantic_ai_does_a_task_with_a_tool(house: House, stream: bool) -> None:
    pytest.importorskip("pydantic_ai", reason=WHY)
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{house.url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel("model", provider=provider), tools=[weather], instructions="Be brief.")

    async def asked() -> str:
        if not stream:
            return (await agent.run("The weather in Paris?")).output
        async with agent.run_stream("The weather in Paris?") as running:
            return await running.get_output()

    assert asyncio.run(asked()) == "In Paris it is sunny."
    check_asked(house)
