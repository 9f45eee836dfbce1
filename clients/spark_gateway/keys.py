"""API keys: who may ask, and how much. A file holds hashes, one key a line:

    NAME sha256:HEX [requests=N] [per_minute=N]

`requests` bounds what is open at the same time, `per_minute` what begins. A key is made of 256 random bits, so that one
round of SHA-256 hides it. Without a file everybody who reaches the socket may ask.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from spark_gateway.errors import ApiError

_NAME = r"[\w.-]{1,64}"
_LINE = re.compile(rf"(?P<name>{_NAME})\s+sha256:(?P<hash>[0-9a-f]{{64}})(?P<limits>(?:\s+\w+=\d{{1,9}})*)\s*")
_LIMITS = ("requests", "per_minute")
_MINUTE_S = 60.0


class KeysError(Exception):
    """The file of keys cannot be used: one line for people."""


@dataclass
class Holder:
    """Who holds a key, what is open, and when the requests of the last minute began. 0: no limit."""

    name: str = ""
    requests: int = 0
    per_minute: int = 0
    open: int = 0
    begun: deque[float] = field(default_factory=deque)

    @contextmanager
    def request(self, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
        """One request; ApiError (429) when the holder has as many as the key allows."""
        self.check(clock)
        if self.per_minute:
            self.begun.append(clock())
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def check(self, clock: Callable[[], float] = time.monotonic) -> None:
        """ApiError (429) when the holder has as many requests as the key allows."""
        now = clock()
        while self.begun and now - self.begun[0] >= _MINUTE_S:
            self.begun.popleft()
        if self.requests and self.open >= self.requests:
            raise ApiError(429, f"{self.open} requests are open with this key, it allows {self.requests}", code="key")
        if self.per_minute and len(self.begun) >= self.per_minute:
            wait = math.ceil(self.begun[0] + _MINUTE_S - now)
            raise ApiError(429, f"this key allows {self.per_minute} requests a minute", code="key", retry_s=wait)


class Keys:
    """All keys, by hash."""

    def __init__(self, path: Path | None = None) -> None:
        """KeysError when the file is missing, wrong, or readable by others."""
        self._everybody = Holder()
        self._holders: dict[str, Holder] | None = None
        if path is not None:
            self._holders = _read(path)

    @property
    def needed(self) -> bool:
        """Whether a key must be shown."""
        return self._holders is not None

    def holder(self, headers: Mapping[str, str]) -> Holder:
        """Who asks. ApiError (401) without a key that is known."""
        if self._holders is None:
            return self._everybody
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not key:
            raise ApiError(401, "no API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'", code="no_api_key")
        holder = self._holders.get(hash_of(key))
        if holder is None:
            raise ApiError(401, "this API key is not known", code="invalid_api_key")
        return holder


def hash_of(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def make(name: str) -> tuple[str, str]:
    """A new key, and the line for the file. KeysError for a name that the file could not have."""
    if re.fullmatch(_NAME, name) is None:
        raise KeysError(f"a name has up to 64 letters, digits, '_', '.' and '-', not {name[:100]!r}")
    key = f"spark-{secrets.token_urlsafe(32)}"
    return key, f"{name} sha256:{hash_of(key)}"


def _read(path: Path) -> dict[str, Holder]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"{path}: API keys cannot be read: {error}") from None
    holders: dict[str, Holder] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        limits = dict(pair.split("=") for pair in found["limits"].split()) if found else {}
        if found is None or limits.keys() - set(_LIMITS):
            raise KeysError(f"{path}:{number}: a line is: NAME sha256:HEX [requests=N] [per_minute=N]")
        if found["hash"] in holders or any(holder.name == found["name"] for holder in holders.values()):
            raise KeysError(f"{path}:{number}: name or key {found['name']!r} is there already")
        most = {name: int(limits.get(name, 0)) for name in _LIMITS}
        holders[found["hash"]] = Holder(found["name"], most["requests"], most["per_minute"])
    if not holders:
        raise KeysError(f"{path}: holds no API key; make one: sparkd-gateway key NAME")
    return holders
