"""The synchronous client."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from spark_client import messages as m
from spark_client.address import find_socket
from spark_client.errors import ConnectionFailed, RequestFailed, SparkClientError
from spark_client.link import Link, Mail
from spark_client.output import Output, checked, text_of
from spark_client.protocol import CONNECTION, RETRY_S, Protocol
from spark_client.requests import Parameters, answering, continuing, prompting

_T = TypeVar("_T")


class Client:
    """A connection to a running daemon; use it as a context manager.

        with Client() as client, client.chat([{"role": "user", "content": "Hello!"}]) as stream:
            for text in stream:
                print(text, end="")

    It may be shared between threads and carry several streams at once. Without `path` the socket is looked up
    (`address.find_socket`). `timeout` (seconds) bounds every wait for an answer of the daemon, not the generating;
    that ends when the daemon stops answering pings. Raises ConnectionFailed.

    When the daemon ends, what was asked of it is lost: streams and calls that wait raise ConnectionFailed. The
    connection stays lost; but with `reconnect` the next call makes a new one, for which it gives a daemon that is being
    started again `timeout` seconds. Nothing is ever asked twice: what was lost the app asks again, if it wants to.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        timeout: float = 10.0,
        name: str = "spark_client",
        reconnect: bool = False,
    ) -> None:
        self.path = Path(path) if path is not None else find_socket()
        self._timeout = timeout
        self._name = name
        self._reconnect = reconnect
        self._connecting = threading.Lock()
        self._link, self.server = self._connect()

    def _connect(self) -> tuple[Link, m.Welcome]:
        link = Link(self.path)
        try:
            server = self._welcome(link.hello(self._name))
            link.forget(CONNECTION)
        except BaseException:
            link.close()
            raise
        return link, server

    def _connected(self) -> Link:
        """The link, a new one if that is lost and may be replaced."""
        if not self._reconnect:
            return self._link
        with self._connecting:
            deadline = time.monotonic() + self._timeout
            while self._link.lost:
                try:
                    link, self.server = self._connect()
                except ConnectionFailed:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(RETRY_S)
                else:
                    self._link.close()
                    self._link = link
            return self._link

    def _welcome(self, mail: Mail) -> m.Welcome:
        try:
            answer = mail.get(timeout=self._timeout)
        except queue.Empty:
            raise ConnectionFailed(
                f"{self.path}: a program listens but has not answered for {self._timeout:g} s; "
                "if 'sparkd serve' runs there, it hangs: restart it"
            ) from None
        return checked(answer, m.Welcome, self.path)

    def generate(
        self, prompt: str | None = None, *, tokens: Sequence[int] | None = None, **parameters: Unpack[Parameters]
    ) -> Stream:
        """Continue a text, or token ids. Returns when the daemon has accepted; raises RequestFailed if it has not.

        Output ends at the model's end token, before a stop string, or after `max_tokens`: see `Parameters`.
        """
        return self._start(continuing(prompt, tokens, parameters))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        **parameters: Unpack[Parameters],
    ) -> Stream:
        """Answer a conversation: `messages` are maps with role and content, rendered by the model's chat template.

        `options` are the template's own (`{"enable_thinking": True}`). The rest is as for `generate`.
        """
        return self._start(answering(messages, tools, options, parameters))

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; `special`: control tokens spelled in it become their ids."""
        answer = self._ask(lambda protocol: protocol.tokenize(text=text, special=special), m.Tokens)
        return answer.tokens

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the prompt that `chat` makes of the same arguments."""
        fields = prompting(messages, tools, options)
        answer = self._ask(lambda protocol: protocol.tokenize(**fields), m.Tokens)
        return answer.tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids; bytes that are no text become U+FFFD."""
        answer = self._ask(lambda protocol: protocol.detokenize(list(tokens), False), m.Text)
        return answer.text

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        answer = self._ask(lambda protocol: protocol.detokenize(list(tokens), True), m.Text)
        return [bytes(piece) for piece in answer.pieces or []]

    def status(self) -> dict[str, Any]:
        """The daemon's status document, also while it loads a model."""
        return self._ask(Protocol.status, m.StatusReply).status

    def trace(self, after: int = 0) -> m.TraceReply:
        """The experts that steps after number `after` (`last` of the answer before) were routed to; 0 begins."""
        return self._ask(lambda protocol: protocol.trace(after), m.TraceReply)

    def close(self) -> None:
        """Leave; the daemon ends what still runs. Streams that are read afterwards raise SparkClientError."""
        self._reconnect = False
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, fields: Mapping[str, Any]) -> Stream:
        link, tag, mail = self._call(lambda protocol: protocol.generate(**fields))
        try:
            accepted = self._answer(mail, m.Accepted)
        except RequestFailed:
            link.forget(tag)
            raise
        except BaseException:
            link.cancel(tag, forget=True)
            raise
        return Stream(link, tag, mail, accepted)

    def _ask(self, start: Callable[[Protocol], int], kind: type[_T]) -> _T:
        link, tag, mail = self._call(start)
        try:
            return self._answer(mail, kind)
        finally:
            link.forget(tag)

    def _call(self, start: Callable[[Protocol], int]) -> tuple[Link, int, Mail]:
        link = self._connected()
        try:
            return link, *link.call(start)
        except m.MessageError as error:
            raise SparkClientError(str(error)) from None

    def _answer(self, mail: Mail, kind: type[_T]) -> _T:
        try:
            answer = mail.get(timeout=self._timeout)
        except queue.Empty:
            raise ConnectionFailed(f"{self.path}: the daemon has not answered for {self._timeout:g} s") from None
        return checked(answer, kind, self.path)


class Stream(Output):
    """The output of one request (see `Output`): iterate over it for text as it comes, or over `events()`.

    Leaving the `with` block, or dropping the stream, cancels what is not finished.
    """

    def __init__(self, link: Link, tag: int, mail: Mail, accepted: m.Accepted) -> None:
        super().__init__(accepted)
        self._link = link
        self._tag = tag
        self._mail = mail

    def events(self, timeout: float | None = None) -> Iterator[m.Progress | m.Chunk | m.Finished]:
        """Every message of the request, Finished last. RequestFailed when the daemon ends it, ConnectionFailed when
        the daemon is gone, TimeoutError when no message comes for `timeout` seconds (the request goes on).
        """
        while self.finish_reason is None:
            if self._error is not None:
                raise self._error
            try:
                msg = self._mail.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"no output for {timeout:g} s") from None
            event = self._take(msg)
            if isinstance(event, m.Chunk):
                self._link.consumed(self._tag)
            if not self._open:
                self._link.forget(self._tag)
            if event is not None:
                yield event

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if isinstance(event, m.Chunk) and (text := text_of(event)):
                yield text

    def read(self, timeout: float | None = None) -> str:
        """Wait for the end and return the whole text; TimeoutError after `timeout` seconds (the request goes on)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.finish_reason is None:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            next(self.events(left), None)
        return self.text

    def cancel(self) -> None:
        """Ask the daemon to end the request; what was on its way may still be read, `finish_reason` is cancelled."""
        self._link.cancel(self._tag, forget=False)

    def close(self) -> None:
        """Cancel the request unless it is over, and read no more of it."""
        if self._open:
            self._error = SparkClientError("the stream is closed")
            self._link.cancel(self._tag, forget=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:
            self._link.abandon(self._tag)
