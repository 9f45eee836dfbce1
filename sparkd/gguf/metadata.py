"""Metadata of a model file: typed access to its keys, with errors that name file and key.

Arrays stay what they are in the file, bytes, until somebody asks for their elements.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import ModelFileError


class ValueType(IntEnum):
    """Types of metadata values, with the ids of the container."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


#: Encodings of the types of fixed size, in the notation that `struct` and numpy share.
ENCODINGS: Mapping[ValueType, str] = {
    ValueType.U8: "<B",
    ValueType.I8: "<b",
    ValueType.U16: "<H",
    ValueType.I16: "<h",
    ValueType.U32: "<I",
    ValueType.I32: "<i",
    ValueType.F32: "<f",
    ValueType.BOOL: "<B",
    ValueType.U64: "<Q",
    ValueType.I64: "<q",
    ValueType.F64: "<d",
}

_LENGTH = struct.Struct("<Q")


class Array(Sequence[Any]):
    """A metadata array: elements of type `element` from byte `offset` on, in a header that has been checked.

    Strings are decoded all at once when the first is wanted (and kept); numbers are a view.
    """

    def __init__(self, header: bytes, key: str, element: ValueType, offset: int, count: int, where: str) -> None:
        self._header = header
        self._where = where
        self.key = key
        self.element = element
        self.offset = offset
        self._count = count

    def numpy(self) -> NDArray[Any]:
        """The numbers (or booleans) as a read-only array; TypeError for strings."""
        if self.element is ValueType.STRING:
            raise TypeError(f"{self.key} is an array of strings")
        numbers: NDArray[Any] = np.frombuffer(self._header, ENCODINGS[self.element], self._count, self.offset)
        return numbers != 0 if self.element is ValueType.BOOL else numbers

    @cached_property
    def _items(self) -> list[Any]:
        if self.element is not ValueType.STRING:
            return list(self.numpy().tolist())
        header, position, strings = self._header, self.offset, []
        for index in range(self._count):
            start = position + 8
            position = start + _LENGTH.unpack_from(header, position)[0]
            try:
                strings.append(header[start:position].decode())
            except UnicodeDecodeError as error:
                what = f"key {self.key!r}: string {index} at byte {start} is not UTF-8"
                raise ModelFileError(what, where=self._where) from error
        return strings

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._items[index]

    def __repr__(self) -> str:
        return f"<{self._count} x {self.element.name.lower()}>"


Value = int | float | bool | str | Array


class Metadata(Mapping[str, Value]):
    """The keys of a model file. Typed readers raise ModelFileError when a key is missing (and no default is given) or
    has another type."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        self._values = dict(values)
        self.where = where

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def is_array(self, key: str) -> bool:
        """Whether `key` is present and holds an array."""
        return isinstance(self._values.get(key), Array)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of any width; without a default the key is required."""
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, integer or floating point; without a default the key is required."""
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without a default the key is required."""
        value = self._find(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """A boolean; without a default the key is required."""
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "a boolean")
        return value

    def integers(self, key: str, n: int, default: int | None = None) -> tuple[int, ...]:
        """`n` integers, one per layer: an array of that length, or one integer that holds for all."""
        value = self._find(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,) * n
        if not isinstance(value, Array) or value.element not in _INTEGERS:
            raise self._wrong(key, value, f"an integer or {n} integers")
        if len(value) != n:
            raise self._wrong(key, value, f"{n} integers")
        return tuple(value)

    def booleans(self, key: str, n: int) -> tuple[bool, ...]:
        """`n` booleans, one per layer (some writers store them as integers); the key is required."""
        value = self._find(key, None)
        if not isinstance(value, Array) or value.element not in (*_INTEGERS, ValueType.BOOL) or len(value) != n:
            raise self._wrong(key, value, f"{n} booleans")
        return tuple(bool(item) for item in value)

    def numbers(self, key: str) -> NDArray[Any]:
        """All numbers of an array, in the type they are stored in; the key is required."""
        value = self._find(key, None)
        if not isinstance(value, Array) or value.element in (ValueType.STRING, ValueType.BOOL):
            raise self._wrong(key, value, "an array of numbers")
        return value.numpy()

    def strings(self, key: str) -> Sequence[str]:
        """An array of strings, decoded when the first of them is wanted; the key is required."""
        value = self._find(key, None)
        if not isinstance(value, Array) or value.element is not ValueType.STRING:
            raise self._wrong(key, value, "an array of strings")
        return value

    def _find(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise ModelFileError(f"key {key!r} is missing", where=self.where)
        return value

    def _wrong(self, key: str, value: Value, wanted: str) -> ModelFileError:
        shown = repr(value) if len(repr(value)) < 60 else repr(value)[:60] + "..."
        return ModelFileError(f"key {key!r} is {shown}, not {wanted}", where=self.where)


_INTEGERS = (
    ValueType.U8,
    ValueType.I8,
    ValueType.U16,
    ValueType.I16,
    ValueType.U32,
    ValueType.I32,
    ValueType.U64,
    ValueType.I64,
)
