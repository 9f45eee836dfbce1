"""The client for asyncio: the calls of `Client`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from spark_client import messages as m
from spark_client.address import find_socket
from spark_client.async_link import AsyncLink, Mail
from spark_client.errors import ConnectionFailed, RequestFailed, SparkClientError
from spark_client.output import Output, checked, text_of
from spark_client.protocol import CONNECTION, RETRY_S, Protocol
from spark_client.requests import Parameters, answering, continuing, prompting

_T = TypeVar("_T")


class AsyncClient:
    """A connection to a running daemon, for the tasks of one event loop.

        async with AsyncClient() as client:
            async with await client.chat([{"role": "user", "content": "Hello!"}]) as stream:
                async for text in stream:
                    print(text, end="")

    It carries several streams at once. Arguments and errors are those of `Client`; the connection is made on entering
    (or by `connect`). A task that is cancelled while it waits for a request takes the request along.
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
        self._connecting = asyncio.Lock()
        self._link = AsyncLink(self.path)
        self._server: m.Welcome | None = None

    @property
    def server(self) -> m.Welcome:
        """What the daemon said of itself."""
        if self._server is None:
            raise SparkClientError("the client is not connected")
        return self._server

    @property
    def lost(self) -> bool:
        """Whether the connection has ended, by whichever side: a new client is needed."""
        return self._link.lost

    async def connect(self) -> Self:
        """Connect and agree on a version; ConnectionFailed. `close` must follow."""
        await self._open(self._link)
        return self

    async def _open(self, link: AsyncLink) -> None:
        await link.open()
        try:
            self._server = await self._welcome(link.hello(self._name))
            link.forget(CONNECTION)
        except BaseException:
            await link.close()
            raise

    async def _connected(self) -> AsyncLink:
        """The link, a new one if that is lost and may be replaced."""
        if self._server is None:
            raise SparkClientError("the client is not connected: use it in 'async with', or await connect() first")
        if not self._reconnect:
            return self._link
        async with self._connecting:
            clock = asyncio.get_running_loop().time
            deadline = clock() + self._timeout
            while self._link.lost:
                link = AsyncLink(self.path)
                try:
                    await self._open(link)
                except ConnectionFailed:
                    if clock() >= deadline:
                        raise
                    await asyncio.sleep(RETRY_S)
                else:
                    lost, self._link = self._link, link
                    await lost.close()
            return self._link

    async def generate(
        self, prompt: str | None = None, *, tokens: Sequence[int] | None = None, **parameters: Unpack[Parameters]
    ) -> AsyncStream:
        """Continue a text, or token ids; see `Client.generate`."""
        return await self._start(continuing(prompt, tokens, parameters))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        **parameters: Unpack[Parameters],
    ) -> AsyncStream:
        """Answer a conversation; see `Client.chat`."""
        return await self._start(answering(messages, tools, options, parameters))

    async def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; `special`: control tokens spelled in it become their ids."""
        answer = await self._ask(lambda protocol: protocol.tokenize(text=text, special=special), m.Tokens)
        return answer.tokens

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the prompt that `chat` makes of the same arguments."""
        fields = prompting(messages, tools, options)
        answer = await self._ask(lambda protocol: protocol.tokenize(**fields), m.Tokens)
        return answer.tokens

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids; bytes that are no text become U+FFFD."""
        answer = await self._ask(lambda protocol: protocol.detokenize(list(tokens), False), m.Text)
        return answer.text

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""
        answer = await self._ask(lambda protocol: protocol.detokenize(list(tokens), True), m.Text)
        return [bytes(piece) for piece in answer.pieces or []]

    async def status(self) -> dict[str, Any]:
        """The daemon's status document, also while it loads a model."""
        return (await self._ask(Protocol.status, m.StatusReply)).status

    async def trace(self, after: int = 0) -> m.TraceReply:
        """The experts that steps after number `after` (`last` of the answer before) were routed to; 0 begins."""
        return await self._ask(lambda protocol: protocol.trace(after), m.TraceReply)

    async def close(self) -> None:
        """Leave; the daemon ends what still runs. Streams that are read afterwards raise SparkClientError."""
        self._reconnect = False
        await self._link.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _welcome(self, mail: Mail) -> m.Welcome:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await mail.get()
        except TimeoutError:
            raise ConnectionFailed(
                f"{self.path}: a program listens but has not answered for {self._timeout:g} s; "
                "if 'sparkd serve' runs there, it hangs: restart it"
            ) from None
        return checked(answer, m.Welcome, self.path)

    async def _start(self, fields: Mapping[str, Any]) -> AsyncStream:
        link, tag, mail = await self._call(lambda protocol: protocol.generate(**fields))
        try:
            accepted = await self._answer(mail, m.Accepted)
        except RequestFailed:
            link.forget(tag)
            raise
        except BaseException:
            link.cancel(tag, forget=True)
            raise
        return AsyncStream(link, tag, mail, accepted)

    async def _ask(self, start: Callable[[Protocol], int], kind: type[_T]) -> _T:
        link, tag, mail = await self._call(start)
        try:
            return await self._answer(mail, kind)
        finally:
            link.forget(tag)

    async def _call(self, start: Callable[[Protocol], int]) -> tuple[AsyncLink, int, Mail]:
        link = await self._connected()
        try:
            return link, *link.call(start)
        except m.MessageError as error:
            raise SparkClientError(str(error)) from None

    async def _answer(self, mail: Mail, kind: type[_T]) -> _T:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await mail.get()
        except TimeoutError:
            raise ConnectionFailed(f"{self.path}: the daemon has not answered for {self._timeout:g} s") from None
        return checked(answer, kind, self.path)


class AsyncStream(Output):
    """The output of one request (see `Output`): `async for` gives text as it comes, `events()` every message.

    Leaving the `async with` block, dropping the stream, or cancelling the task that reads it, cancels the request.
    """

    def __init__(self, link: AsyncLink, tag: int, mail: Mail, accepted: m.Accepted) -> None:
        super().__init__(accepted)
        self._link = link
        self._tag = tag
        self._mail = mail

    async def events(self, timeout: float | None = None) -> AsyncGenerator[m.Progress | m.Chunk | m.Finished, None]:
        """Every message of the request, Finished last. RequestFailed when the daemon ends it, ConnectionFailed when
        the daemon is gone, TimeoutError when no message comes for `timeout` seconds (the request goes on).
        """
        while self.finish_reason is None:
            event = await self._next(timeout)
            if event is not None:
                yield event

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.events():
            if isinstance(event, m.Chunk) and (text := text_of(event)):
                yield text

    async def read(self, timeout: float | None = None) -> str:
        """Wait for the end and return the whole text; TimeoutError after `timeout` seconds (the request goes on)."""
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        while self.finish_reason is None:
            await self._next(None if deadline is None else max(deadline - clock(), 0.0))
        return self.text

    def cancel(self) -> None:
        """Ask the daemon to end the request; what was on its way may still be read, `finish_reason` is cancelled."""
        self._link.cancel(self._tag, forget=False)

    def close(self) -> None:
        """Cancel the request unless it is over, and read no more of it."""
        if self._open:
            self._error = SparkClientError("the stream is closed")
            self._link.cancel(self._tag, forget=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:
            self._link.abandon(self._tag)

    async def _next(self, timeout: float | None) -> m.Progress | m.Chunk | m.Finished | None:
        if self._error is not None:
            raise self._error
        try:
            event = self._take(await self._mail_within(timeout))
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(event, m.Chunk):
            self._link.consumed(self._tag)
        if not self._open:
            self._link.forget(self._tag)
        return event

    async def _mail_within(self, timeout: float | None) -> m.Message | SparkClientError:
        if not self._mail.empty():
            return self._mail.get_nowait()
        try:
            async with asyncio.timeout(timeout):
                return await self._mail.get()
        except TimeoutError:
            raise TimeoutError(f"no output for {timeout:g} s") from None
