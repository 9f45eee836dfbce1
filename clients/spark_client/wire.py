"""How messages are written and read: one msgpack map with `v` (protocol version), `t` (type) and the fields.

`message` declares a type, `encode` writes one, `decode` validates on receipt: size, nesting, type of every field, no
unknown and no missing field. Like `messages`, this file imports nothing of the project: the client package carries an
identical copy of both.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import msgpack

VERSION = 1
#: One message between app and daemon, packed. A prompt of a million tokens fits.
MAX_BYTES = 16 << 20
#: One message between processes of the daemon: more than any message of an app becomes with what is added to it.
INTERNAL_MAX_BYTES = 64 << 20
#: Nesting of maps and lists in free-form fields (msgpack itself refuses more than 1024 levels).
MAX_DEPTH = 24
#: Items of one list. What a chat may hold is the text layer's to bound; these are the wire's bounds.
MAX_ITEMS = 4 << 20
#: Values of all free-form content of one message, and maps and lists in one message: checking takes time for each.
MAX_VALUES = 1 << 18

#: Free-form content, and any declared message.
Json = Any
Message = Any


class MessageError(ValueError):
    """A message breaks the protocol: one line that says how, and the message's own tag where it could be read."""

    tag: int | None = None


_SCALARS = frozenset({int, float, str, bytes, bool, type(None)})
_TYPES: dict[str, type[Any]] = {}
_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def message(name: str) -> typing.Callable[[type[_T]], type[_T]]:
    """Declare a message type under its wire name: a frozen dataclass with slots.

    The methods that `dataclass` would compile for each type are shared, and `__init__` is compiled with the first
    message of a type: a process declares all types when it starts, and most of them it never makes.
    """

    def register(cls: type[_T]) -> type[_T]:
        made = dataclass(init=False, repr=False, eq=False, slots=True)(cls)
        for method, shared in _METHODS.items():
            setattr(made, method, shared)
        _TYPES[name] = made
        made.wire_name = name  # type: ignore[attr-defined]
        return made

    return register


def _init(self: Any, *args: Any, **given: Any) -> None:
    cls: Any = type(self)
    fields: list[Any] = [
        (f.name, f.type, dataclasses.field(default=f.default, default_factory=f.default_factory))
        for f in dataclasses.fields(cls)
    ]
    compiled: Any = dataclasses.make_dataclass(cls.__name__, fields, frozen=True, repr=False, eq=False)
    cls.__init__ = compiled.__init__
    cls.__init__(self, *args, **given)


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, f.name) for f in dataclasses.fields(self))


def _repr(self: Any) -> str:
    members = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
    return f"{type(self).__qualname__}({members})"


def _equal(self: Any, other: object) -> bool:
    return type(self) is type(other) and _values(self) == _values(other)


def _hash(self: Any) -> int:
    return hash(_values(self))


def _frozen(self: Any, name: str, *value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot change {name!r} of a message")


_METHODS = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _equal,
    "__hash__": _hash,
    "__setattr__": _frozen,
    "__delattr__": _frozen,
}


def encode(msg: Message, limit: int = MAX_BYTES) -> bytes:
    """Pack a message. MessageError when it is larger than `limit` or holds what msgpack cannot say."""
    body = {name: _plain(getattr(msg, name)) for name in _fields(type(msg))}
    try:
        data: bytes = msgpack.packb({"v": VERSION, "t": msg.wire_name, **body}, use_bin_type=True)
    except (ValueError, TypeError, OverflowError) as error:
        where = _culprit(body, msg.wire_name)
        raise MessageError(f"{where}: cannot be packed: {error}"[:200]) from None
    if len(data) > limit:
        raise MessageError(f"{msg.wire_name}: message has {len(data)} bytes, the limit is {limit}")
    return data


def decode(data: bytes, limit: int = MAX_BYTES) -> Message:
    """Unpack and validate a message. MessageError says what is wrong with it."""
    if len(data) > limit:
        raise MessageError(f"message has {len(data)} bytes, the limit is {limit}")
    inside = _Room("the message", "maps and lists")
    try:
        body = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=65536,
            max_str_len=limit,
            list_hook=inside.counted,
            object_hook=inside.counted,
        )
    except MessageError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(f"message is not msgpack: {error}") from None
    if not isinstance(body, dict):
        raise MessageError("message is not a map")
    version = body.pop("v", None)
    if version != VERSION:
        raise MessageError(f"this side speaks protocol version {VERSION}, the message has {version!r}"[:200])
    name, tag = body.pop("t", None), body.get("tag")
    try:
        cls = _TYPES.get(name) if isinstance(name, str) else None
        if cls is None:
            raise MessageError(f"unknown message type {name!r}"[:200])
        return _build(cls, body, str(name), _Room(str(name), "values"))
    except MessageError as error:
        error.tag = tag if type(tag) is int else None
        raise


def _culprit(value: Any, where: str) -> str:
    """Name of the member, in maps within maps, that msgpack cannot say."""
    members = value.items() if isinstance(value, dict) else ()
    return next((_culprit(member, f"{where}.{name}") for name, member in members if not _packs(member)), where)


def _packs(value: Any) -> bool:
    try:
        msgpack.packb(value, use_bin_type=True)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def _plain(value: Any) -> Any:
    """Nested records as maps; a list holds either records alone or none."""
    if type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list) and value and type(value[0]) not in _SCALARS and dataclasses.is_dataclass(value[0]):
        return [_plain(item) for item in value]
    return value


class _Room:
    """Counts what may be `MAX_VALUES` in one message."""

    def __init__(self, where: str, what: str) -> None:
        self._left = MAX_VALUES
        self._error = f"{where}: more than {MAX_VALUES} {what}"

    def take(self, count: int) -> None:
        """MessageError when there is no room for so many more."""
        self._left -= count
        if self._left < 0:
            raise MessageError(self._error)

    def counted(self, value: _T) -> _T:
        """`value`, which takes the room of one."""
        self.take(1)
        return value


def _build(cls: type[Any], body: dict[str, Any], where: str, room: _Room) -> Any:
    fields = _fields(cls)
    for key in body:
        if key not in fields:
            raise MessageError(f"{where}: unknown field {key!r}"[:200])
    for name, (hint, required) in fields.items():
        if name in body:
            value = body[name]
            if type(value) is not hint:
                body[name] = _check(hint, value, f"{where}.{name}", room)
        elif required:
            raise MessageError(f"{where}: field {name!r} is missing")
    return cls(**body)


#: For each type the hint of each field, and whether it must be there.
_FIELDS: dict[type[Any], dict[str, tuple[Any, bool]]] = {}


def _fields(cls: type[Any]) -> dict[str, tuple[Any, bool]]:
    if cls not in _FIELDS:
        hints, missing = typing.get_type_hints(cls), dataclasses.MISSING
        _FIELDS[cls] = {
            f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
            for f in dataclasses.fields(cls)
        }
    return _FIELDS[cls]


def _check(hint: Any, value: Any, where: str, room: _Room) -> Any:
    """`value` as `hint` says, or MessageError. float takes int; bool is no int; integers fit in 64 bits."""
    if hint is Any:
        return _bounded(value, where, room)
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        return _check(next(a for a in typing.get_args(hint) if a is not type(None)), value, where, room)
    if origin is list:
        if isinstance(value, list):
            (item,) = typing.get_args(hint)
            if item in (int, str):
                wrong = next((v for v in value if type(v) is not item), None)
                if wrong is None:
                    return value
                raise MessageError(f"{where}: expected {item.__name__}s, found {type(wrong).__name__}")
            return [_check(item, v, where, room) for v in value]
    elif origin is dict:
        if isinstance(value, dict):
            return _bounded(value, where, room)
    elif dataclasses.is_dataclass(hint):
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            return _build(typing.cast("type[Any]", hint), value, where, room)
    elif hint is float:
        if type(value) in (int, float):
            return float(value)
    elif type(value) is hint:
        return value
    raise MessageError(f"{where}: expected {_name(hint)}, found {type(value).__name__}")


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and typing.get_origin(hint) is None else str(hint)


def _bounded(value: Any, where: str, room: _Room, depth: int = MAX_DEPTH) -> Any:
    """Free-form content (chat messages, tools, status): what JSON can say, bounded in nesting and number, text keys."""
    if isinstance(value, dict | list):
        room.take(1 + len(value))
        if depth == 0:
            raise MessageError(f"{where}: nested deeper than {MAX_DEPTH}")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise MessageError(f"{where}: a map has keys that are not text")
        for item in value.values() if isinstance(value, dict) else value:
            _bounded(item, where, room, depth - 1)
    elif not (value is None or isinstance(value, str | int | float)):
        raise MessageError(f"{where}: {type(value).__name__} is not allowed in free-form content")
    return value
