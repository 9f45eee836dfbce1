"""Connections to the daemon: one for each API key, so that those who hold different keys take turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from spark_client import AsyncClient, SparkClientError

#: Seconds for which a status document is shown again.
_STATUS_S = 0.5
#: Bytes of tokens that are remembered; a vocabulary is not larger.
_MOST_TOKENS = 1 << 20


class Daemon:
    """The daemon behind a socket, whichever process that is at the moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clients: dict[str, AsyncClient] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._status: tuple[float, dict[str, Any]] | None = None
        self._tokens: dict[int, bytes] = {}

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
            await client.connect()
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
