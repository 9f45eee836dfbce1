"""What a request can be refused with, once; each dialect writes it its own way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spark_client import ConnectionFailed, RequestFailed, SparkClientError

#: Seconds after which a client may try again.
RETRY_S = 2
#: Status, OpenAI's type and Anthropic's type.
_KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("overloaded_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}
#: What the daemon's codes mean in HTTP; all others are the daemon's own fault.
_STATUS = {"request": 400, "unsupported": 400, "protocol": 400, "busy": 429, "unavailable": 503, "timeout": 504}
#: The daemon's codes under which clients know them better.
_CODES = {"request": "invalid_value", "unsupported": "unsupported_option", "protocol": "invalid_value"}
#: How the daemon's words begin where they are about an option: its name, the place within it.
_OPTION = re.compile(
    r"(?P<option>temperature|top_[kp]|min_p|(?:repetition|presence|frequency)_penalty|seed|logit_bias|logprobs|stop"
    r"|messages|tools|tokens|options)(?P<place>(?:\[\d+\]|\.[\w-]+)*)(?=[: ])"
)
#: How it words that a prompt is too long.
_TOO_LONG = "a request may have"


@dataclass
class ApiError(Exception):
    """A request that cannot be served: HTTP status, a line for people, the option that is to blame, a stable code.

    `retry_s`: seconds after which it may work, where the status says that it may.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_s: int = RETRY_S

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        return {"retry-after": str(self.retry_s)} if self.status in (429, 503) else {}

    def openai(self) -> dict[str, object]:
        """The body in OpenAI's dialect."""
        kind = _KINDS.get(self.status, ("server_error", ""))[0]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self, request: str | None = None) -> dict[str, object]:
        """The body in Anthropic's dialect, for the request of this id."""
        kind = _KINDS.get(self.status, ("", "api_error"))[1]
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request}


def refused(option: str, why: str, code: str = "unsupported_option") -> ApiError:
    """An option that is not supported, or wrong."""
    return ApiError(400, f"{option}: {why}", option, code)


def of_client(error: SparkClientError | TimeoutError, names: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """What went wrong at the daemon, or on the way to it.

    `names`: the dialect's names of the daemon's options where they differ; of messages that it counts differently, only
    the member is named.
    """
    if isinstance(error, ConnectionFailed):
        return ApiError(503, str(error), code="daemon_unreachable")
    if isinstance(error, RequestFailed):
        return _of_daemon(error, names)
    if isinstance(error, TimeoutError):
        return ApiError(504, str(error))
    return ApiError(400, str(error))


def _of_daemon(error: RequestFailed, names: Mapping[str, str]) -> ApiError:
    status, message, param = _STATUS.get(error.code, 500), error.message, None
    code = _CODES.get(error.code, error.code)
    if status == 400 and _TOO_LONG in message:
        return ApiError(status, message, names.get("messages", "messages"), "context_length_exceeded")
    if status == 400 and (found := _OPTION.match(message)):
        option, place, rest = found["option"], found["place"], message[found.end() :]
        if found[0] in names:
            param = names[found[0]]
            message = param + rest
        elif option == "messages" and option in names:
            param = names[option]
            message = f"{param}: {place.rpartition('.')[2]}{rest}" if "." in place else param + rest
        else:
            param = names.get(option, option) + place
            message = param + rest
    return ApiError(status, message, param, code)
