"""The state of one connection, without socket, thread or clock: calls in, bytes out; bytes in, messages out.

Every call of the app (a request, tokenize, status) has a *tag*. A request has an id of the server's as well:

    sent ──Accepted──► accepted ──Finished, Failed──► over
      │ cancel()           │ cancel(): Cancel goes out
      ▼                    ▼
    unwanted ──Accepted──► cancelled ──Finished, Failed──► over
               (Cancel goes out)
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Any

from spark_client import messages as m

#: Tag of messages that concern the connection as a whole.
CONNECTION = 0
#: What a lost connection means.
LOST = "the daemon closed the connection or ended, what was asked of it is lost"
#: Seconds between two attempts to reach a daemon that is being started again.
RETRY_S = 0.05
#: Chunks the server may send ahead of the consumer.
CREDIT = 64


class _State(enum.Enum):
    SENT = enum.auto()
    ACCEPTED = enum.auto()
    UNWANTED = enum.auto()
    CANCELLED = enum.auto()


@dataclass(slots=True)
class _Request:
    state: _State = _State.SENT
    request: int = -1
    consumed: int = 0


class Protocol:
    """What was asked and not answered yet. `outgoing` holds the packed messages to send, in order."""

    def __init__(self) -> None:
        self.outgoing: deque[bytes] = deque()
        self._last_tag = CONNECTION
        self._requests: dict[int, _Request] = {}
        self._tags: dict[int, int] = {}

    def hello(self, client: str) -> None:
        """Open the conversation; the answer (Welcome or Failed) comes under the tag `CONNECTION`."""
        self._send(m.Hello(versions=[m.VERSION], client=client))

    def generate(self, **fields: Any) -> int:
        """Start a request with the fields of `messages.Generate` (all but tag and credit); returns its tag."""
        tag = self._tag()
        self._send(m.Generate(tag=tag, credit=CREDIT, **fields))
        self._requests[tag] = _Request()
        return tag

    def tokenize(self, **fields: Any) -> int:
        """Ask for token ids with the fields of `messages.Tokenize` (all but tag); returns the tag of the answer."""
        tag = self._tag()
        self._send(m.Tokenize(tag=tag, **fields))
        return tag

    def detokenize(self, tokens: list[int], pieces: bool) -> int:
        """Ask for text; returns the tag of the answer."""
        tag = self._tag()
        self._send(m.Detokenize(tag=tag, tokens=tokens, pieces=pieces))
        return tag

    def status(self) -> int:
        """Ask for the status document; returns the tag of the answer."""
        tag = self._tag()
        self._send(m.StatusRequest(tag=tag))
        return tag

    def ping(self) -> None:
        """Keep the lease alive; Failed under the tag `CONNECTION` comes back when it has lapsed already."""
        self._send(m.Ping(tag=CONNECTION))

    def bye(self) -> None:
        """Close the conversation; open requests end with it."""
        self._send(m.Bye())

    def consumed(self, tag: int) -> None:
        """The app took one chunk of a request; grants credit each time half of it is used."""
        state = self._requests.get(tag)
        if state is None or state.state is not _State.ACCEPTED:
            return
        state.consumed += 1
        if state.consumed >= CREDIT // 2:
            self._send(m.Credit(request=state.request, chunks=state.consumed))
            state.consumed = 0

    def trace(self, after: int) -> int:
        """Ask for routed steps; returns the tag of the answer."""
        tag = self._tag()
        self._send(m.TraceRequest(tag=tag, after=after))
        return tag

    def cancel(self, tag: int) -> None:
        """End a request; one that is over, or unknown, is left alone."""
        state = self._requests.get(tag)
        if state is None:
            return
        if state.state is _State.SENT:
            state.state = _State.UNWANTED
        elif state.state is _State.ACCEPTED:
            state.state = _State.CANCELLED
            self._send(m.Cancel(request=state.request))

    def receive(self, data: bytes) -> tuple[int | None, m.Message]:
        """One message of the server and the tag of the call it belongs to; None: a request that is over already.

        MessageError when it breaks the protocol.
        """
        msg = m.decode(data)
        if isinstance(msg, m.Welcome | m.Pong):
            return CONNECTION, msg
        if isinstance(msg, m.Tokens | m.Text | m.StatusReply | m.TraceReply):
            return msg.tag, msg
        if isinstance(msg, m.Accepted):
            self._accept(msg)
            return msg.tag, msg
        if isinstance(msg, m.Failed):
            tag = msg.tag if msg.request is None else self._tags.get(msg.request, msg.tag)
            if tag is None:
                return (CONNECTION if msg.request is None else None), msg
            self._over(tag)
            return tag, msg
        if isinstance(msg, m.Progress | m.Chunk):
            return self._tags.get(msg.request), msg
        if isinstance(msg, m.Finished):
            tag = self._tags.get(msg.request)
            if tag is not None:
                self._over(tag)
            return tag, msg
        raise m.MessageError(f"a daemon does not send {type(msg).__name__}")

    def _accept(self, msg: m.Accepted) -> None:
        state = self._requests.get(msg.tag)
        if state is None or state.request >= 0:
            raise m.MessageError(f"request {msg.request} was accepted for a call that was not made (tag {msg.tag})")
        state.request = msg.request
        self._tags[msg.request] = msg.tag
        if state.state is _State.UNWANTED:
            state.state = _State.CANCELLED
            self._send(m.Cancel(request=msg.request))
        else:
            state.state = _State.ACCEPTED

    def _over(self, tag: int) -> None:
        state = self._requests.pop(tag, None)
        if state is not None:
            self._tags.pop(state.request, None)

    def _tag(self) -> int:
        self._last_tag += 1
        return self._last_tag

    def _send(self, msg: m.Message) -> None:
        self.outgoing.append(m.encode(msg))
