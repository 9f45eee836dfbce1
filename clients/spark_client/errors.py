"""What the client raises: every message is one line for people."""

from __future__ import annotations


class SparkClientError(Exception):
    """Anything that keeps the client from doing what was asked."""


class ConnectionFailed(SparkClientError):
    """No daemon answers at the socket, or it stopped answering."""


class RequestFailed(SparkClientError):
    """The daemon refused or ended a request: `code` for programs, `retry` when the same may work later."""

    def __init__(self, code: str, message: str, retry: bool = False) -> None:
        self.code = code
        self.message = message
        self.retry = retry
        super().__init__(message)
