"""Whatever arrives at the client socket, the daemon refuses it with a reason, goes on, and keeps nothing of it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from daemon import PATIENCE_S, Daemon, daemon, until
from footprint import footprint, growth, is_idle, same_handles
from malformed import impossible, malformed, noise

from spark_client import Client, messages

#: Bytes by which a process may grow: heaps keep what they once needed.
SLACK_BYTES = 8 << 20
BATCH = 100
PROMPT = list(range(100, 140))


@pytest.fixture
def served(model_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Daemon]:
    with daemon(model_path("laguna-tiny-s1-q4_k_m"), tmp_path / "run", limits={"context": 512}) as one:
        yield one


def answer(client: Client) -> list[int]:
    with client.generate(tokens=PROMPT, max_tokens=100, ignore_eos=True, temperature=1.0, seed=7) as stream:
        stream.read(PATIENCE_S)
        return stream.tokens


class Rogue:
    """An app that sends nothing but nonsense, and counts how it is refused."""

    def __init__(self, path: Path, seed: int) -> None:
        self.codes: Counter[str] = Counter()
        self.closed = 0
        self._chance = random.Random(seed)
        self._path = path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{path}")
        self._socket.send(messages.encode(messages.Hello([messages.VERSION], "rogue")))
        assert isinstance(self._hear(), messages.Welcome)

    def rave(self, count: int) -> None:
        """Send so many messages, a batch at a time; each must be refused with a reason before a ping is answered."""
        for number in range(0, count, BATCH):
            for tag in range(number, number + BATCH):
                absurd = self._chance.randrange(5) == 0
                self._socket.send_multipart([impossible(self._chance, tag)] if absurd else malformed(self._chance))
            self._socket.send(messages.encode(messages.Ping(number)))
            for _ in range(BATCH):
                refusal = self._hear()
                assert isinstance(refusal, messages.Failed) and refusal.message, refusal
                assert len(refusal.message) < 1000 and "\n" not in refusal.message
                self.codes[refusal.code] += 1
            assert self._hear() == messages.Pong(number)

    def babble(self, count: int) -> None:
        """Make so many connections that carry no message; the daemon must close each, nobody can be told."""
        for _ in range(count):
            with socket.socket(socket.AF_UNIX) as bare:
                bare.settimeout(PATIENCE_S)
                bare.connect(str(self._path))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    bare.sendall(noise(self._chance))
                    bare.shutdown(socket.SHUT_WR)
                    while bare.recv(65536):
                        pass
                self.closed += 1

    def leave(self) -> None:
        self._socket.send(messages.encode(messages.Bye()))
        self._socket.close(linger=1000)
        self._context.term()

    def _hear(self) -> messages.Message:
        assert self._socket.poll(int(PATIENCE_S * 1000)), "no answer"
        return messages.decode(self._socket.recv())


class Neighbour(threading.Thread):
    """A well-behaved app that asks for the same again and again."""

    def __init__(self, one: Daemon) -> None:
        super().__init__()
        self._daemon = one
        self._enough = threading.Event()
        self.answers: list[list[int]] = []

    def run(self) -> None:
        with self._daemon.client() as client:
            while not self._enough.is_set():
                self.answers.append(answer(client))

    def end(self) -> list[list[int]]:
        self._enough.set()
        self.join()
        return self.answers


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2_000, id="short"),
        pytest.param(100_000, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_nonsense_is_refused_with_a_reason_and_neither_hurts_nor_stays(served: Daemon, count: int) -> None:
    served.prepare()
    with served.client() as client:
        alone = answer(client)
        before = {}
        for seed, messages_sent in enumerate([2_000, count]):
            neighbour, rogue = Neighbour(served), Rogue(served.socket, seed)
            neighbour.start()
            try:
                rogue.rave(messages_sent)
                rogue.babble(messages_sent // 20)
            finally:
                rogue.leave()
                answers = neighbour.end()
            assert answers and all(tokens == alone for tokens in answers)
            until(lambda: is_idle(client.status()), served.said)
            if not before:
                before = footprint(client)
        until(lambda: same_handles(before, footprint(client)), lambda: f"{before}\n{footprint(client)}")
        grown = growth(before, footprint(client))
        print(
            f"{count} messages refused {dict(rogue.codes)}, {rogue.closed} connections closed, "
            f"{len(answers)} answers beside them; growth in bytes {grown}"
        )
        assert rogue.codes.keys() == {"protocol", "request", "unsupported"}
        assert max(grown.values()) < SLACK_BYTES, grown


def test_what_is_sent_before_hello_is_refused_too(served: Daemon) -> None:
    chance = random.Random(5)
    with zmq.Context() as context, context.socket(zmq.DEALER) as app:
        app.linger = 0
        app.connect(f"ipc://{served.socket}")
        for number in range(200):
            app.send_multipart(malformed(chance) if number % 2 else [messages.encode(messages.Ping(number))])
            assert app.poll(int(PATIENCE_S * 1000)), "no answer"
            refusal = messages.decode(app.recv())
            assert isinstance(refusal, messages.Failed) and refusal.code == "protocol" and refusal.message
    with served.client() as client:
        assert len(answer(client)) == 100


def test_one_connection_can_neither_cancel_nor_feed_what_belongs_to_another(served: Daemon) -> None:
    with served.client() as client, zmq.Context() as context, context.socket(zmq.DEALER) as other:
        alone = answer(client)
        other.linger = 0
        other.connect(f"ipc://{served.socket}")
        other.send(messages.encode(messages.Hello([messages.VERSION], "other")))
        assert isinstance(messages.decode(other.recv()), messages.Welcome)
        with client.generate(tokens=PROMPT, max_tokens=100, ignore_eos=True, temperature=1.0, seed=7) as stream:
            next(stream.events(PATIENCE_S))
            for meddling in (messages.Cancel(stream.request), messages.Credit(stream.request, 5)):
                other.send(messages.encode(meddling))
            other.send(messages.encode(messages.Ping(9)))
            refusal = messages.decode(other.recv())
            assert isinstance(refusal, messages.Failed)
            assert (refusal.request, refusal.code) == (stream.request, "request")
            assert f"has no request {stream.request}" in refusal.message
            assert messages.decode(other.recv()) == messages.Pong(9)
            stream.read(PATIENCE_S)
            assert (stream.tokens, stream.finish_reason) == (alone, "length")
