"""Two hundred HTTP clients that ask, read, dawdle and vanish at random: none hangs, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, daemon, until
from footprint import footprint, growth, is_idle, same_handles

from sparkd.demo.main import MODEL as DEMO

CLIENTS = 200
#: Seconds without a byte after which a client counts as hung: a stream that waits says every five that it lives, and
#: what is answered whole waits no longer than a full queue takes.
HANG_S = 10.0
#: Bytes by which a process may grow: heaps keep what they once needed.
SLACK_BYTES = 24 << 20
LIMITS = {"context": 2048, "sequences": 4, "queue": 16}
ALLOWED = {200, 400, 429, 503}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    given = {"enabled": True, "host": "127.0.0.1", "port": 0, "unix": str(tmp_path / "g.sock")}
    with daemon(DEMO, tmp_path / "run", limits=LIMITS, gateway=given) as one:
        until(lambda: (tmp_path / "g.sock").exists(), one.said)
        yield one


def body(chance: random.Random, path: str) -> dict[str, Any]:
    said = "Who are you? " * chance.choice((1, 1, 5, 60))
    made: dict[str, Any] = {"model": "spark-demo-laguna", "stream": chance.random() < 0.7}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    # What is answered whole is silent while it is made, which must not take as long as patience lasts.
    made[limit] = chance.choice((1, 8, 40) if made["stream"] else (1, 8))
    if path == "/v1/completions":
        return made | {"prompt": said}
    if path == "/v1/responses":
        return made | {"input": said}
    return made | {"messages": [{"role": chance.choice(("user", "user", "user", "king")), "content": said}]}


@dataclass
class Seen:
    """How requests went, and the longest time that anybody waited for the next byte, in seconds, by what came."""

    ends: Counter[str] = field(default_factory=Counter)
    longest_s: dict[str, float] = field(default_factory=dict)

    def waited(self, seconds: float, what: str) -> None:
        self.longest_s[what] = max(seconds, self.longest_s.get(what, 0.0))


async def client(socket: Path, chance: random.Random, until_s: float, seen: Seen) -> None:
    """One after the other: requests that are read to the end, or left at a random moment."""
    clock = asyncio.get_running_loop().time
    while clock() < until_s:
        path = chance.choice(PATHS)
        data = json.dumps(body(chance, path)).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        sent = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        cut = chance.random() < 0.1
        if cut:
            sent = sent[: chance.randrange(len(sent))]
        patience = chance.choice((None, None, 0, 1, 3))
        try:
            seen.ends[await talk(socket, sent, 0 if cut else patience, chance, seen)] += 1
        except TimeoutError:
            seen.ends["hung"] += 1
        except OSError:
            seen.ends["refused"] += 1


async def talk(socket: Path, sent: bytes, patience: int | None, chance: random.Random, seen: Seen) -> str:
    """Send, and read `patience` pieces (None: all); tells how it went."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(sent)
        await writer.drain()
        if patience == 0:
            await asyncio.sleep(chance.random() * 0.2)
            return "left at once"
        answer = bytearray()
        while patience is None or patience > 0:
            asked = time.monotonic()
            piece = await asyncio.wait_for(reader.read(65536), HANG_S)
            seen.waited(time.monotonic() - asked, "more" if answer else piece[9:12].decode())
            if not piece:
                status = int(answer.split(b" ", 2)[1])
                assert status in ALLOWED, answer[:500]
                return str(status)
            answer += piece
            patience = None if patience is None else patience - 1
        return "left"
    finally:
        writer.transport.abort()


async def crowd(socket: Path, seconds: float) -> Seen:
    seen = Seen()
    until_s = asyncio.get_running_loop().time() + seconds
    await asyncio.gather(*(client(socket, random.Random(n), until_s, seen) for n in range(CLIENTS)))
    return seen


@pytest.mark.parametrize("seconds", [60, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_a_crowd_over_http_hangs_nobody_and_leaves_nothing(served: Daemon, tmp_path: Path, seconds: int) -> None:
    socket = tmp_path / "g.sock"
    asyncio.run(crowd(socket, 3))
    with served.client() as watcher:

        def idle() -> bool:
            status = watcher.status()
            status["requests"]["clients"] -= 1  # the gateway itself
            return is_idle(status)

        until(idle, served.said)
        before = footprint(watcher)
        seen = asyncio.run(crowd(socket, seconds))
        until(idle, served.said)
        print(dict(seen.ends), {what: round(longest, 1) for what, longest in seen.longest_s.items()})
        assert not seen.ends["hung"], seen
        assert seen.ends["200"] and seen.ends["left"] and seen.ends["left at once"], seen
        until(
            lambda: same_handles(before, footprint(watcher)), lambda: f"{before} {footprint(watcher)} {served.said()}"
        )
        grown = growth(before, footprint(watcher))
        print(f"bytes grown: {grown}; {before} {footprint(watcher)}")
        assert all(size < SLACK_BYTES for size in grown.values()), grown
    assert "fault of the gateway" not in served.said()
