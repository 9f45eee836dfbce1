"""A gateway in a thread of this process, in front of a scripted daemon."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import uvicorn
from fake_daemon import FakeDaemon

from spark_gateway.app import Config, Gateway

WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
THOUGHT = ["Let me ", "look.\n</th", "ink>\n\n"]
CALLS = [
    *("I will look.\n\n<tool", "_call>\n<function=weather>\n<parameter=city>\nParis", " & <b>\n</parameter>\n"),
    *("<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n", "<function=weather>\n"),
    "</function>\n</tool_call>",
]


@dataclass
class House:
    """Where the gateway listens, and the daemon behind it."""

    url: str
    daemon: FakeDaemon


@contextmanager
def gateway(daemon: FakeDaemon, **config: Any) -> Iterator[House]:
    """Serve at a free port until the block ends."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        made = Gateway(Config(daemon.path, **config)).app()
        server = uvicorn.Server(uvicorn.Config(made, log_config=None, lifespan="on", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            yield House(f"http://127.0.0.1:{sock.getsockname()[1]}", daemon)
        finally:
            server.should_exit = True
            thread.join()


def ask(
    house: House, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body (as JSON if it is) of one request; bytes are sent as they are."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = {} if body is None else {"content-type": "application/json"}
    made = Request(house.url + path, data, {**given, **(headers or {})}, method=method)
    try:
        with urlopen(made) as answer:
            status, got, text = answer.status, dict(answer.headers), answer.read()
    except HTTPError as error:
        with error:
            status, got, text = error.code, dict(error.headers), error.read()
    said = got.get("content-type", "")
    return status, got, json.loads(text) if said == "application/json" else text.decode()
