"""What the gateway, and the supervisor before it, add to each token, at 1 and at 16 streams.

    python bench/gateway.py [MODEL.gguf] [--tokens N] [--streams N ...]

The same streams are read twice: at the client socket, and over HTTP (`/v1/chat/completions`, a Unix socket). Told are
the times between two tokens of a stream, as readers see them, and the processor time that each process of the daemon
takes for a token; of those two the second is worth something on a busy machine. MODEL: the built-in one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from serving import serving

from spark_client import AsyncClient, Chunk
from sparkd.demo.main import MODEL

_TALK = [{"role": "user", "content": "Who are you?"}]
_ROLES = ("supervisor", "worker", "gateway")


async def at_the_socket(path: Path, streams: int, tokens: int) -> list[float]:
    """Seconds between tokens, of all streams."""
    async with AsyncClient(path, timeout=60) as client:

        async def one() -> list[float]:
            times = []
            stream = await client.chat(_TALK, max_tokens=tokens, ignore_eos=True, parts=True)
            async for event in stream.events(120):
                if isinstance(event, Chunk):
                    times += [time.perf_counter()] * len(event.tokens)
            return np.diff(times).tolist()

        return [gap for gaps in await asyncio.gather(*(one() for _ in range(streams))) for gap in gaps]


async def over_http(path: Path, streams: int, tokens: int) -> list[float]:
    """The same; an event of a stream is a token, but for a few whose text waits for the next."""
    body = {"model": "", "messages": _TALK, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def one() -> list[float]:
        times = []
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        while b"[DONE]" not in (line := await reader.readline()):
            if line.startswith(b"data: {") and b'"content":"' in line:
                times.append(time.perf_counter())
        writer.close()
        return np.diff(times).tolist()

    return [gap for gaps in await asyncio.gather(*(one() for _ in range(streams))) for gap in gaps]


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of one stream (400)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], help="streams at the same time (1 16)")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    flags = ("--gateway-enabled", "true", "--gateway-port", "0", "--gateway-unix", str(folder / "g.sock"))
    seats = ("--limits-sequences", str(max(given.streams)), "--limits-context", "1024")
    print("| streams | way | p50, ms | p99, ms | " + " | ".join(f"{role}, µs" for role in _ROLES) + " |")
    print("| --- " * (4 + len(_ROLES)) + "|")
    with serving(given.model, *flags, *seats) as (client, _):
        while not (folder / "g.sock").exists():
            time.sleep(0.1)
        pids = {process["role"]: process["pid"] for process in client.status()["processes"]}
        ways = {"client socket": (at_the_socket, client.path), "HTTP": (over_http, folder / "g.sock")}
        for streams in given.streams:
            for name, (read, path) in ways.items():
                asyncio.run(read(path, streams, 16))
                before = {role: processor_seconds(pids[role]) for role in _ROLES}
                gaps = 1e3 * np.array(asyncio.run(read(path, streams, given.tokens)))
                spent = [processor_seconds(pids[role]) - before[role] for role in _ROLES]
                each = " | ".join(f"{1e6 * seconds / (streams * given.tokens):.0f}" for seconds in spent)
                p50, p99 = np.percentile(gaps, [50, 99])
                print(f"| {streams} | {name} | {p50:.2f} | {p99:.2f} | {each} |")


if __name__ == "__main__":
    main()
