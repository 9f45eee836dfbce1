"""Texts that apps want as ids, and ids as texts: one at a time goes to the worker, apps take turns.

So a text that takes seconds delays nobody's request by more than itself, and an app that asks a lot delays itself. One
that a worker left behind when it ended is asked again, before all others, as `probation` allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkd.errors import BusyError, UnavailableError
from sparkd.ipc.internal import Decode, Decoded, Encode, Encoded
from sparkd.ipc.messages import Detokenize, Failed, Message, Text, Tokenize, Tokens
from sparkd.supervisor.fair_queue import FairQueue
from sparkd.supervisor.journal import Standing, held_bytes_of

#: Questions of all apps that wait for an answer, and characters of their texts.
MAX_QUESTIONS = 256
MAX_CHARACTERS = 16 << 20

Answer = tuple[bytes, Message]


@dataclass(slots=True, eq=False)
class Question:
    """Who asked (None: nobody who is still there), under which tag, the worker's order, and how it stands in trial.

    `size`: how much waits with it, in characters (of a chat in bytes).
    """

    peer: bytes | None
    tag: int
    order: Encode | Decode
    size: int = 0
    crashes: int = 0
    standing: Standing = Standing.CLEAR
    proof_at: int = 0

    @property
    def produced(self) -> tuple[()]:
        """Nothing: it is done at once or not at all."""
        return ()

    def failed(self, code: str, reason: str, retry: bool = False) -> Iterator[Answer]:
        """What its app hears if it cannot be answered."""
        if self.peer is not None:
            yield self.peer, Failed(self.tag, None, code, reason, retry)


class Questions:
    """Those that wait, and the one that is at the worker (`asked`)."""

    def __init__(self) -> None:
        self.asked: Question | None = None
        self._again: Question | None = None
        self._queue: FairQueue[Question] = FairQueue()

    def ask(self, peer: bytes, msg: Tokenize | Detokenize, job: int) -> None:
        """Take a question on under the number `job`. BusyError when too many wait."""
        if len(self._queue) >= MAX_QUESTIONS:
            raise BusyError(f"{MAX_QUESTIONS} questions wait already", fix="try again later")
        held = sum(question.size for question in self._queue)
        order, size = _order(msg, job)
        if held and held + size > MAX_CHARACTERS:
            what = f"{len(self._queue)} questions with {held} characters wait already"
            raise BusyError(what, fix="try again later")
        self._queue.push(peer, Question(peer, msg.tag, order, size))

    @property
    def first(self) -> Question | None:
        """What `start` would begin; None when nothing waits, or while one is at the worker."""
        return None if self.asked is not None else self._again or self._queue.first()

    def start(self) -> Encode | Decode:
        """The next one goes to the worker: the order for it. IndexError when nothing waits."""
        self.asked, self._again = self._again or self._queue.pop(), None
        return self.asked.order

    def answered(self, msg: Encoded | Decoded) -> Answer | None:
        """The worker's answer as the app gets it; None when nobody waits for it any more."""
        asked = self.asked
        if asked is None or asked.order.job != msg.job:
            return None
        self.asked = None
        if asked.peer is None:
            return None
        if msg.error is not None:
            return asked.peer, Failed(asked.tag, None, "request", msg.error)
        if isinstance(msg, Decoded):
            return asked.peer, Text(asked.tag, msg.text, msg.pieces)
        return asked.peer, Tokens(asked.tag, msg.tokens or [])

    def lost(self, reason: str, *, guilty: bool) -> Iterator[Answer]:
        """The worker is gone: what it had is asked again, or fails with `reason` if it is the cause."""
        asked, self.asked = self.asked, None
        if asked is not None and guilty:
            what = f"{asked.crashes} workers ended while they tokenized this text; last: {reason}"
            yield from asked.failed("crashed", what)
        elif asked is not None and asked.peer is not None:
            self._again = asked

    def fail(self, reason: str) -> Iterator[Answer]:
        """Nothing can be answered: what the apps that wait hear."""
        waiting = [question for question in (self.asked, self._again, *self._queue) if question is not None]
        self.asked, self._again, self._queue = None, None, FairQueue()
        for question in waiting:
            yield from question.failed(UnavailableError.code, reason, retry=True)

    def gone(self, peer: bytes) -> None:
        """An app has left: nothing of it waits any more, the answer to what is at the worker is for nobody."""
        for question in [question for question in self._queue if question.peer == peer]:
            self._queue.remove(peer, question)
        if self._again is not None and self._again.peer == peer:
            self._again = None
        if self.asked is not None and self.asked.peer == peer:
            self.asked.peer = None


def _order(msg: Tokenize | Detokenize, job: int) -> tuple[Encode | Decode, int]:
    """What the worker gets, and how much waits with it."""
    if isinstance(msg, Detokenize):
        return Decode(job, msg.tokens, msg.pieces), len(msg.tokens)
    order = Encode(job, msg.text, msg.special, msg.chat, msg.tools, msg.options)
    return order, held_bytes_of([msg.chat, msg.tools, msg.options]) if msg.text is None else len(msg.text)
