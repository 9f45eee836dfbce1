"""The body of a request: bounded in size, depth and time, JSON and nothing else, every option known by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from spark_gateway.errors import ApiError

#: A prompt of a million tokens fits; the daemon's own bounds are tighter.
MAX_BYTES = 16 << 20
MAX_DEPTH = 32
READ_S = 60.0

_Model = TypeVar("_Model", bound=BaseModel)


class Body(BaseModel):
    """A request. Unknown members are refused by name; null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


async def read(request: Request, model: type[_Model]) -> _Model:
    """The checked body. ApiError says what is wrong with it and where."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page of a stranger may send anything else to a server on this machine without asking first.
        raise ApiError(415, f"content-type is {kind or 'missing'!r}: send application/json")
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise ApiError(415, f"content-encoding is {packed[:40]!r}: send the body as it is")
    value = parse(await _bytes(request))
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    try:
        return model.model_validate({name: item for name, item in value.items() if item is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = _place(first["loc"], value, first["type"] == "missing")
        why = "is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        missing = first["type"] == "missing"
        code = "missing_option" if missing else "unsupported_option" if "supported" in why else "invalid_value"
        raise ApiError(400, f"{place[:200]}: {why[:500]}", place[:200], code) from None


def _place(steps: Sequence[int | str], value: Any, missing: bool) -> str:
    """Where in the body a fault is, without what stands for the branches of a union."""
    place = ""
    for number, step in enumerate(steps, start=1):
        if isinstance(value, list) and isinstance(step, int) and step < len(value):
            place, value = f"{place}[{step}]", value[step]
        elif isinstance(value, dict) and (step in value or (missing and number == len(steps))):
            place, value = f"{place}.{step}", value.get(step)
    return place.removeprefix(".")


async def _bytes(request: Request) -> bytes:
    too_large = ApiError(413, f"the body is larger than {MAX_BYTES} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BYTES:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_S:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body was cut off") from None
    return bytes(data)


def parse(data: bytes) -> Any:
    """JSON as its standard says it: no NaN, no lone surrogates, no deep nesting. ApiError."""
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
    _check(value, MAX_DEPTH)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check(value: Any, depth: int) -> None:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ApiError(400, "the body holds a lone surrogate")
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ApiError(400, "the body holds an integer of more than 64 bits")
    elif isinstance(value, float):
        if value in (float("inf"), float("-inf")):
            raise ApiError(400, "the body holds a number that is too large")
    elif isinstance(value, list | dict):
        if depth == 0:
            raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
        for item in value:
            _check(item, depth - 1)
        if isinstance(value, dict):
            for item in value.values():
                _check(item, depth - 1)
