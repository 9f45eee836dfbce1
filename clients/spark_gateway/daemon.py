"""Connections to the daemon: one for each API key, so that those who hold different keys take turns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from spark_client import AsyncClient, ConnectionFailed, SparkClientError
from spark_gateway.errors import ApiError

#: Seconds for which a status document is shown again.
_STATUS_S = 0.5
#: Bytes of tokens that are remembered; a vocabulary is not larger.
_MOST_TOKENS = 1 << 20
#: Seconds for which a full queue counts as full: far less than what waits in it takes.
_FULL_S = 0.1
#: What the daemon names when its queue is full (it is busy for other reasons, too).
_QUEUE = "limits.queue"
_log = logging.getLogger(__name__)


class Daemon:
    """The daemon behind a socket, whichever process that is at the moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clients: dict[str, AsyncClient] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._status: tuple[float, dict[str, Any]] | None = None
        self._tokens: dict[int, bytes] = {}
        #: Whether the last connection could not be made, which is said once.
        self._missed = False
        #: Until when the queue counts as full, and with which words, for each holder.
        self._full: dict[str, tuple[float, ApiError]] = {}

    async def greet(self) -> None:
        """Connect before anybody asks, so that the log says early if there is no daemon."""
        with contextlib.suppress(SparkClientError, TimeoutError):
            await self.client()

    def check_queue(self, name: str) -> None:
        """ApiError (429) where the daemon's queue was full a moment ago: it is not asked again for each request."""
        until, error = self._full.get(name, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise error

    def note_queue(self, name: str, error: ApiError) -> None:
        """Remember that the queue is full, if that is what `error` says."""
        if error.code == "busy" and _QUEUE in error.message:
            self._full[name] = (time.monotonic() + _FULL_S, error)

    async def client(self, name: str = "") -> AsyncClient:
        """The connection of a key's holder, made anew when it was lost. ConnectionFailed when there is no daemon."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            client = self._clients.get(name)
            if client is not None and not client.lost:
                return client
            if client is not None:
                del self._clients[name]
                await client.close()
            client = AsyncClient(self.path, timeout=30.0, name=f"gateway {name}".strip())
            try:
                await client.connect()
            except ConnectionFailed as error:
                if not self._missed:
                    _log.warning("no requests are served until the daemon answers: %s", error)
                self._missed = True
                raise
            if self._missed:
                _log.info("the daemon answers")
            self._missed = False
            self._clients[name] = client
            # Another daemon may serve another model.
            self._tokens.clear()
            return client

    async def status(self) -> dict[str, Any]:
        """The status document, at most half a second old."""
        now = time.monotonic()
        if self._status is None or now - self._status[0] > _STATUS_S:
            self._status = (now, await (await self.client()).status())
        return self._status[1]

    async def token_bytes(self, client: AsyncClient, tokens: set[int]) -> dict[int, bytes]:
        """The bytes of tokens, asked for once."""
        missing = sorted(tokens - self._tokens.keys())
        if missing:
            if len(self._tokens) > _MOST_TOKENS:
                self._tokens.clear()
            self._tokens.update(zip(missing, await client.token_bytes(missing), strict=True))
        return {token: self._tokens[token] for token in tokens}

    async def close(self) -> None:
        """Leave; what runs for the gateway ends."""
        for client in self._clients.values():
            with contextlib.suppress(SparkClientError):
                await client.close()
        self._clients.clear()
