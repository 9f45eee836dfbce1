"""Texts that apps want tokenized: one at a time goes to the worker, apps take turns.

So a text that takes seconds delays nobody's request by more than itself, and an app that asks a lot delays itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparkd.errors import UnavailableError
from sparkd.ipc.internal import Encode, Encoded
from sparkd.ipc.messages import Failed, Message, Tokenize, Tokens
from sparkd.supervisor.fair_queue import FairQueue

#: Questions of all apps that wait for an answer, and characters of their texts.
MAX_QUESTIONS = 256
MAX_CHARACTERS = 16 << 20

Answer = tuple[bytes, Message]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Who asked (None: nobody who is still there), under which tag, and the worker's order."""

    peer: bytes | None
    tag: int
    order: Encode


class Questions:
    """Those that wait, and the one that is at the worker."""

    def __init__(self, send: Callable[[Encode], None]) -> None:
        """`send` takes what is for the worker."""
        self._send = send
        self._queue: FairQueue[Question] = FairQueue()
        self._asked: Question | None = None

    def ask(self, peer: bytes, msg: Tokenize, job: int) -> None:
        """Take a question on under the number `job`. UnavailableError when too many wait."""
        if len(self._queue) >= MAX_QUESTIONS:
            raise UnavailableError(f"{MAX_QUESTIONS} questions wait already", fix="try again later")
        held = sum(len(question.order.text) for question in self._queue)
        if held and held + len(msg.text) > MAX_CHARACTERS:
            what = f"{len(self._queue)} questions with {held} characters wait already"
            raise UnavailableError(what, fix="try again later")
        self._queue.push(peer, Question(peer, msg.tag, Encode(job, msg.text, msg.special)))
        self._next()

    def answered(self, msg: Encoded) -> Answer | None:
        """The worker's answer as the app gets it; None when nobody waits for it any more."""
        asked = self._asked
        if asked is None or asked.order.job != msg.job:
            return None
        self._asked = None
        self._next()
        if asked.peer is None:
            return None
        if msg.tokens is None:
            return asked.peer, Failed(asked.tag, None, "request", msg.error or "cannot be tokenized")
        return asked.peer, Tokens(asked.tag, msg.tokens)

    def fail(self, reason: str) -> Iterator[Answer]:
        """Nothing can be answered: what the apps that wait hear."""
        waiting = [*self._queue] if self._asked is None else [self._asked, *self._queue]
        self._queue, self._asked = FairQueue(), None
        for question in waiting:
            if question.peer is not None:
                yield question.peer, Failed(question.tag, None, UnavailableError.code, reason, retry=True)

    def gone(self, peer: bytes) -> None:
        """An app has left: nothing of it waits any more, the answer to what is at the worker is for nobody."""
        for question in [question for question in self._queue if question.peer == peer]:
            self._queue.remove(peer, question)
        if self._asked is not None and self._asked.peer == peer:
            self._asked = Question(None, self._asked.tag, self._asked.order)

    def _next(self) -> None:
        if self._asked is None and len(self._queue):
            self._asked = self._queue.pop()
            self._send(self._asked.order)
