"""Kills one process of a daemon again and again while it streams, and notes what that costs: a row of the table.

`make test` does it a few times, `make soak` by the dozen; both print the table at the end.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from daemon import Daemon, alive, until
from holdings import Holdings, arena_holders, arena_inode
from service_manager import Managed

from spark_client import Client, ConnectionFailed

#: Tokens of each stream, and seconds in which one must come to its end whatever is killed.
TOKENS = (700, 500)
STREAM_S = 120.0


@dataclass
class Row:
    """What `kills` of one process cost; `pauses` are the longest waits for a token, one for each kill, in seconds."""

    role: str
    before: Holdings
    kills: int = 0
    streams: int = 0
    lost: int = 0
    pauses: list[float] = field(default_factory=list)
    read_bytes: int = 0
    after: Holdings | None = None

    @staticmethod
    def heading() -> str:
        """Names of the columns."""
        columns = "killed      kills  streams  lost  pause p50      max  bytes read"
        return f"{columns}        {Holdings.heading()}"

    def lines(self) -> list[str]:
        """The row, and below it what the daemon held afterwards."""
        pauses = sorted(self.pauses)
        first = (
            f"{self.role:<11} {self.kills:>5} {self.streams:>8} {self.lost:>5} {pauses[len(pauses) // 2]:>8.2f} s "
            f"{pauses[-1]:>6.2f} s {self.read_bytes:>11} before {self.before}"
        )
        return [first, f"{'':<64} after  {self.after}"]


class Streams:
    """Streams of two apps at once, always the same; what they give undisturbed is the measure of all others."""

    def __init__(self, daemon: Daemon) -> None:
        daemon.prepare()
        with daemon.client() as client:
            self.expected = [_read(self.start(client, n)).tokens for n in range(len(TOKENS))]

    def start(self, client: Client, number: int) -> Any:
        prompt = list(range(100, 140 + 30 * number))
        count = TOKENS[number]
        return client.generate(tokens=prompt, max_tokens=count, ignore_eos=True, temperature=1.0, seed=7 + number)


@dataclass
class Reader:
    """Reads one stream in a thread; notes the longest wait between two tokens."""

    stream: Any
    failure: Exception | None = None
    pause: float = 0.0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        last = time.monotonic()
        try:
            for _ in self.stream.events():
                self.pause = max(self.pause, time.monotonic() - last)
                last = time.monotonic()
        except Exception as failure:
            self.failure = failure

    def end(self) -> Any:
        self.thread.join(STREAM_S)
        assert not self.thread.is_alive(), "a stream hangs"
        return self.stream


def kill_child(daemon: Daemon, role: str, kills: int) -> Row:
    """Kill a child `kills` times while two apps stream; every stream gives the undisturbed tokens."""
    moments = random.Random(f"{role} {kills}")
    streams = Streams(daemon)
    row = Row(role, _settled(daemon))
    with daemon.client() as watcher:
        for _ in range(kills):
            loaded = watcher.status()["loading"]
            with daemon.client() as one, daemon.client() as other:
                readers = [Reader(streams.start(client, n)) for n, client in enumerate((one, other))]
                _wait_for_a_moment(readers, moments)
                daemon.kill(role)
                for reader, expected in zip(readers, streams.expected, strict=True):
                    assert reader.end().tokens == expected, (reader.failure, daemon.said())
                    row.streams += 1
            until(lambda: watcher.status()["state"] == "ready", daemon.said)
            row.kills += 1
            row.pauses.append(max(reader.pause for reader in readers))
            row.read_bytes += _read_since(loaded, watcher.status()["loading"], role == "store")
        status = watcher.status()
        assert next(p for p in status["processes"] if p["role"] == role)["restarts"] == kills
        assert status["memory"]["state_used_bytes"] == 0 and status["requests"]["failed"] == 0
    row.after = _settled(daemon, row.before)
    return row


def kill_supervisor(daemon: Managed, kills: int) -> Row:
    """Kill the supervisor `kills` times: apps are told, the next one adopts the arena and gives the same tokens."""
    moments = random.Random(f"supervisor {kills}")
    streams = Streams(daemon)
    with Client(daemon.socket, timeout=STREAM_S, reconnect=True) as watcher:
        row = Row("supervisor", _settled(daemon))
        for _ in range(kills):
            _kill_supervisor_once(daemon, streams, moments, watcher, row)
        row.after = _settled(daemon, row.before)
    return row


def _kill_supervisor_once(daemon: Managed, streams: Streams, moments: random.Random, watcher: Client, row: Row) -> None:
    pids, arena = daemon.pids(), arena_inode(daemon.process.pid)
    with daemon.client() as one, daemon.client() as other:
        readers = [Reader(streams.start(client, n)) for n, client in enumerate((one, other))]
        _wait_for_a_moment(readers, moments)
        began = time.monotonic()
        daemon.ready_again()
        for reader, expected in zip(readers, streams.expected, strict=True):
            tokens = reader.end().tokens
            assert tokens == expected[: len(tokens)]
            if len(tokens) < len(expected):
                assert isinstance(reader.failure, ConnectionFailed), reader.failure
                row.lost += 1
    for n, expected in enumerate(streams.expected):  # an app that was there before goes on with the next daemon
        assert _read(streams.start(watcher, n)).tokens == expected
        row.streams += 1
    row.pauses.append(time.monotonic() - began)
    row.read_bytes += watcher.status()["loading"]["read_bytes"]
    row.kills += 1
    assert not any(alive(pid) for pid in pids)
    assert arena_holders(arena) == {daemon.process.pid, daemon.pid("store"), daemon.pid("worker")}


def _read(stream: Any) -> Any:
    stream.read(STREAM_S)
    return stream


def _wait_for_a_moment(readers: list[Reader], moments: random.Random) -> None:
    """Until the first stream has some number of tokens, before its end; then a little longer."""
    wanted = moments.randrange(TOKENS[0] * 3 // 4)
    until(lambda: len(readers[0].stream.tokens) >= wanted or readers[0].failure is not None)
    time.sleep(moments.random() * 0.02)


def _read_since(before: dict[str, Any], after: dict[str, Any], other_store: bool) -> int:
    """Tensor bytes that were read from files; a new store counts from zero."""
    return after["read_bytes"] - (0 if other_store else before["read_bytes"])


def _settled(daemon: Daemon, expected: Holdings | None = None) -> Holdings:
    """What the daemon holds once nothing changes any more, or once it is what is expected."""
    seen = [Holdings.of(daemon)]

    def stays() -> bool:
        time.sleep(0.3)
        seen.append(Holdings.of(daemon))
        return seen[-1] == (seen[-2] if expected is None else expected)

    until(stays, lambda: f"held {expected or seen[-2]}, holds {seen[-1]}")
    return seen[-1]
