"""A daemon that only speaks the client protocol: answers come from a script, everything heard is kept.

It is as strict as the real one: chunks are sent against credit alone, ids are scoped to the connection.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from spark_client import messages as m
from sparkd.ipc.messages import Part
from sparkd.text.answer import AnswerParser
from sparkd.text.markup import QWEN


@dataclass
class Job:
    """A request: chunks that wait for credit, and how it ends after them."""

    peer: bytes
    ask: m.Generate
    chunks: list[m.Chunk]
    end: m.Message | None
    credit: int


@dataclass
class FakeDaemon:
    """`plan(generate)` gives the pieces of text of an answer, or a Failed message; `status` is the document.

    A failure that names a request comes after Accepted.
    """

    path: Path
    plan: Callable[[m.Generate], list[str] | m.Failed] = lambda ask: ["Hello", ", ", "world"]
    status: dict[str, Any] = field(default_factory=dict)
    refuse: m.Failed | None = None
    silent: bool = False
    endless: bool = False
    end: str = "stop"
    #: How answers end instead.
    fail: m.Failed | None = None
    lapsed: bool = False
    #: Longer than any test takes, unless the test is about what happens when it is over.
    lease_s: float = 600.0
    heard: list[m.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._started.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def of(self, kind: type) -> list[Any]:
        """What was heard of one type."""
        return [msg for msg in list(self.heard) if isinstance(msg, kind)]

    def wait_for(self, kind: type, count: int = 1) -> list[Any]:
        """Wait until `count` messages of a type were heard; pytest's timeout bounds the wait."""
        while len(self.of(kind)) < count:
            threading.Event().wait(0.005)
        return self.of(kind)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
            sock.linger = 0
            sock.bind(f"ipc://{self.path}")
            self._started.set()
            while not self._stop.is_set():
                if sock.poll(10):
                    peer, data = sock.recv_multipart()
                    msg = m.decode(data)
                    self.heard.append(msg)
                    if not self.silent:
                        for answer in self._answers(peer, msg):
                            sock.send_multipart([peer, m.encode(answer)])
                for job in list(self._jobs.values()):
                    while job.chunks and job.credit > 0:
                        job.credit -= 1
                        sock.send_multipart([job.peer, m.encode(job.chunks.pop(0))])
                    if not job.chunks and job.end is not None:
                        sock.send_multipart([job.peer, m.encode(job.end)])
                        job.end = None

    def _answers(self, peer: bytes, msg: m.Message) -> list[m.Message]:
        match msg:
            case m.Hello():
                return [self.refuse or m.Welcome(m.VERSION, "fake", 1, "model", self.lease_s)]
            case m.Ping() if self.lapsed:
                return [m.Failed(msg.tag, None, "protocol", "say hello first (the lease may have lapsed)")]
            case m.Ping():
                return [m.Pong(msg.tag)]
            case m.Tokenize():
                chat = "".join(str(message.get("content")) for message in msg.chat or [])
                text = chat if msg.text is None else msg.text
                return [m.Tokens(msg.tag, list(text.encode()))]
            case m.Detokenize() if any(not 0 <= token < 256 for token in msg.tokens):
                return [m.Failed(msg.tag, None, "request", "a token is not in the vocabulary")]
            case m.Detokenize():
                pieces = [[token] for token in msg.tokens] if msg.pieces else None
                return [m.Text(msg.tag, bytes(msg.tokens).decode(errors="replace"), pieces)]
            case m.StatusRequest():
                return [m.StatusReply(msg.tag, self.status)]
            case m.Generate():
                return self._generate(peer, msg)
            case m.Credit():
                self._jobs[msg.request].credit += msg.chunks
            case m.Cancel():
                job = self._jobs[msg.request]
                assert job.peer == peer
                job.chunks.clear()
                job.end = finished(msg.request, "cancelled", 0)
        return []

    def _generate(self, peer: bytes, ask: m.Generate) -> list[m.Message]:
        answer = self.plan(ask)
        request = 1000 + len(self._jobs)
        if isinstance(answer, m.Failed) and answer.request is not None:
            return [m.Accepted(ask.tag, request, 0), dataclasses.replace(answer, tag=ask.tag, request=request)]
        if isinstance(answer, m.Failed):
            return [dataclasses.replace(answer, tag=ask.tag)]
        chunks = [m.Chunk(request, n, [n], text) for n, text in enumerate(answer)]
        if ask.logprobs is not None:
            best = [m.Logprob(token, -0.5) for token in range(97, 97 + ask.logprobs)]
            chunks = [dataclasses.replace(chunk, choices=[m.Choice(-0.25, best)]) for chunk in chunks]
        thought = 0
        if ask.parts:
            chunks, thought = _in_parts(ask, chunks)
        reason = self.end if ask.max_tokens >= len(chunks) else "length"
        end: m.Message | None = None if self.endless else finished(request, reason, len(chunks), thought)
        if self.fail is not None:
            end = dataclasses.replace(self.fail, tag=ask.tag, request=request)
        self._jobs[request] = Job(peer, ask, chunks, end, ask.credit)
        return [m.Accepted(ask.tag, request, 0), m.Progress(request, "prefill", 3, 3)]


def finished(request: int, reason: str, output: int, thought: int = 0) -> m.Finished:
    """The end of a request."""
    timings = m.Timings(0.5, 0.25, 2.0)
    return m.Finished(request, reason, None, 3, output, 42, timings, reasoning_tokens=thought)


def _in_parts(ask: m.Generate, chunks: list[m.Chunk]) -> tuple[list[m.Chunk], int]:
    """The same as a worker reads it, which has a thought where the template's option says so, and its tokens."""
    thinking = bool(ask.options.get("enable_thinking")) and ask.call is None
    begun = "" if ask.call is None else "".join(QWEN.opener(ask.call))
    parser = AnswerParser(QWEN, ask.tools or [], thinking=thinking, begun=begun)

    def ours(parts: list[Part]) -> list[m.Part]:
        return [m.Part(part.kind, part.text, part.call, part.name) for part in parts]

    made, thought = [], 0
    for chunk in chunks:
        thought += parser.thinking
        made.append(dataclasses.replace(chunk, text="", parts=ours(parser.push(chunk.text))))
    rest = ours(parser.finish(cut=ask.max_tokens < len(chunks)))
    if rest:
        made.append(m.Chunk(chunks[0].request, len(chunks), [], "", None, rest))
    return made, thought
