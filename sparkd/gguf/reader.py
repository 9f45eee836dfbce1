"""Bounded reader of the header of one GGUF file (versions 2 and 3, little endian).

A header is untrusted: every count is checked against the bytes that are left in the file before anything is read or
allocated by it, sizes are exact integers, and the file is read (not mapped: a file that is cut under a map kills the
process) in pieces, only as far as the header goes. Container, in order:

    "GGUF", u32 version, u64 tensors, u64 keys
    keys     string name, u32 type, value          string: u64 bytes, UTF-8; array: u32 type, u64 count, elements
    tensors  string name, u32 dimensions, u64 each (first is contiguous), u32 type, u64 offset into the data section
    padding  to `general.alignment` (32); the data section follows
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparkd.errors import ModelFileError, UnsupportedError
from sparkd.gguf.formats import FORMATS, Format
from sparkd.gguf.metadata import ENCODINGS, Array, Metadata, Value, ValueType

__all__ = ["Array", "Header", "Metadata", "Tensor", "Value", "ValueType", "parse_header", "read_header", "unsupported"]

#: Limits far beyond any real file (the largest headers are some 20 MiB, the largest vocabularies 300,000 tokens).
MAX_HEADER_BYTES = 64 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_LENGTH = 1 << 22
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 21

DEFAULT_ALIGNMENT = 32
_PIECE = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {type: struct.Struct(encoding) for type, encoding in ENCODINGS.items()}
_DOWNLOAD = "the file is damaged or incomplete: copy or download it again"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies. `shape` in ne order (first dimension contiguous), `offset` from the shard's start."""

    name: str
    shape: tuple[int, ...]
    format: Format
    shard: int
    offset: int
    nbytes: int

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Rows of one slice (1 for a vector)."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def slices(self) -> int:
        """Matrices in a stack: experts of an expert tensor, 1 for a matrix or a vector."""
        return _product(self.shape[2:])

    @property
    def elements(self) -> int:
        """Number of weights."""
        return _product(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.format.row_bytes(self.columns)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one matrix of a stack."""
        return self.rows * self.row_bytes

    def slice_offset(self, index: int) -> int:
        """Where matrix `index` of a stack begins in the shard's file; IndexError outside the stack."""
        if not 0 <= index < self.slices:
            raise IndexError(f"{self.name} has {self.slices} slices, not {index}")
        return self.offset + index * self.slice_bytes


def unsupported(tensor: Tensor, where: str = "") -> UnsupportedError:
    """The refusal to compute with a tensor whose type has no arithmetic here, naming tensor and type."""
    what = f"tensor {tensor.name!r} has type {tensor.format.name}, which sparkd cannot compute with yet"
    return UnsupportedError(what, where=where, fix="use a file with another quantisation")


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `raw` are the file's bytes from 0 to `data_offset`, where the data section begins; `data_end` is
    where the last tensor ends."""

    version: int
    alignment: int
    metadata: Metadata
    tensors: Mapping[str, Tensor]
    raw: bytes
    data_offset: int
    data_end: int


def read_header(fd: int, file_size: int, where: str, shard: int = 0) -> Header:
    """Read and check the header of an open file; ModelFileError naming key or tensor, and byte offset."""
    return _Parser(_Source(bytearray(), fd, file_size, where), shard).header()


def parse_header(raw: bytes, file_size: int, where: str, shard: int = 0) -> Header:
    """The same from the header's bytes alone, without touching the file they came from."""
    return _Parser(_Source(raw, None, file_size, where), shard).header()


class _Source:
    """The file's first bytes, as far as they have been wanted."""

    def __init__(self, data: bytes | bytearray, fd: int | None, file_size: int, where: str) -> None:
        self.data = data
        self.fd = fd
        self.file_size = file_size
        self.where = where

    def error(self, what: str, fix: str = "") -> ModelFileError:
        return ModelFileError(what, where=self.where, fix=fix)

    def need(self, start: int, end: int, what: str) -> None:
        """Have the bytes start..end, which hold `what`; otherwise say how many are missing."""
        if end <= len(self.data):
            return
        if end > self.file_size:
            needed = f"{what} at byte {start} needs {end - start} bytes"
            left = max(self.file_size - start, 0)
            raise self.error(f"{needed}, the file has {left} more: {end - self.file_size} bytes are missing", _DOWNLOAD)
        if end > MAX_HEADER_BYTES:
            raise self.error(f"{what} at byte {start} is beyond the limit of {MAX_HEADER_BYTES >> 20} MiB for a header")
        while len(self.data) < end:
            have = len(self.data)
            piece = b"" if self.fd is None else os.pread(self.fd, min(_PIECE, self.file_size - have), have)
            if not piece:
                raise self.error(f"the header ends at byte {have}, inside {what}: the file was cut while it was read")
            self.data += piece


class _Parser:
    def __init__(self, source: _Source, shard: int) -> None:
        self.source = source
        self.shard = shard
        self.position = 0

    def header(self) -> Header:
        source = self.source
        version, tensor_count, key_count = self._preamble()
        values: dict[str, Value | tuple[ValueType, int, int]] = {}
        for index in range(key_count):
            start = self.position
            key = self._string(f"name of key {index}", MAX_NAME_BYTES)
            if key in values:
                raise source.error(f"key {key!r} at byte {start} occurs twice")
            values[key] = self._value(key)
        alignment = self._alignment(values)
        infos = [self._tensor(index) for index in range(tensor_count)]
        data_offset = _align(self.position, alignment)
        if not infos:
            data_offset = min(data_offset, source.file_size)
        source.need(self.position, data_offset, "padding after the header")
        tensors = self._place(infos, data_offset, alignment)
        raw = bytes(memoryview(source.data)[:data_offset])
        metadata = {
            key: Array(raw, key, *value, where=source.where) if isinstance(value, tuple) else value
            for key, value in values.items()
        }
        return Header(
            version=version,
            alignment=alignment,
            metadata=Metadata(metadata, source.where),
            tensors=MappingProxyType(tensors),
            raw=raw,
            data_offset=data_offset,
            data_end=max((t.offset + t.nbytes for t in tensors.values()), default=data_offset),
        )

    def _preamble(self) -> tuple[int, int, int]:
        source = self.source
        if source.file_size == 0:
            raise source.error("the file is empty", _DOWNLOAD)
        source.need(0, min(4, source.file_size), "magic")
        if source.data[:4] != b"GGUF"[: source.file_size]:
            raise source.error(f"not a GGUF file: it begins with {bytes(source.data[:4])!r}")
        self.position = 4
        version = self._u32("version")
        if version in (2 << 24, 3 << 24):
            raise source.error("a big-endian GGUF file; sparkd reads little-endian ones", "convert it")
        if version not in (2, 3):
            raise source.error(f"version {version} at byte 4; sparkd reads GGUF versions 2 and 3")
        tensor_count = self._count("tensor count", MAX_TENSORS, smallest=32)
        key_count = self._count("key count", MAX_KEYS, smallest=13)
        return version, tensor_count, key_count

    def _u32(self, what: str) -> int:
        self.source.need(self.position, self.position + 4, what)
        (value,) = _U32.unpack_from(self.source.data, self.position)
        self.position += 4
        return int(value)

    def _u64(self, what: str) -> int:
        self.source.need(self.position, self.position + 8, what)
        (value,) = _U64.unpack_from(self.source.data, self.position)
        self.position += 8
        return int(value)

    def _count(self, what: str, limit: int, smallest: int) -> int:
        """A count of things that take at least `smallest` bytes each; refused when they cannot fit."""
        start = self.position
        count = self._u64(what)
        if count > limit:
            raise self.source.error(f"{what} {count} at byte {start} is beyond the limit of {limit}")
        left = self.source.file_size - self.position
        if count * smallest > left:
            raise self.source.error(f"{what} {count} at byte {start} cannot fit into the {left} bytes left", _DOWNLOAD)
        return count

    def _string(self, what: str, limit: int) -> str:
        start = self.position
        length = self._u64(f"length of {what}")
        end = self.position + length
        if length > limit:
            raise self.source.error(f"{what} at byte {start} has length {length}, beyond the limit of {limit}")
        self.source.need(self.position, end, what)
        raw = self.source.data[self.position : end]
        self.position = end
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.source.error(f"{what} at byte {start} is not UTF-8") from error

    def _type(self, what: str) -> ValueType:
        start = self.position
        id = self._u32(what)
        try:
            return ValueType(id)
        except ValueError:
            raise self.source.error(f"{what} at byte {start} is {id}, which is unknown") from None

    def _value(self, key: str) -> Value | tuple[ValueType, int, int]:
        """A value; an array as (element type, offset, count)."""
        what = f"value of key {key!r}"
        type = self._type(f"type of key {key!r}")
        if type is ValueType.STRING:
            return self._string(what, MAX_STRING_BYTES)
        if type is ValueType.ARRAY:
            return self._array(key)
        start, scalar = self.position, _SCALARS[type]
        self.source.need(start, start + scalar.size, what)
        (value,) = scalar.unpack_from(self.source.data, start)
        self.position += scalar.size
        if type is ValueType.BOOL:
            if value > 1:
                raise self.source.error(f"{what} at byte {start} is {value}, not a boolean")
            return bool(value)
        return value  # type: ignore[no-any-return]

    def _array(self, key: str) -> tuple[ValueType, int, int]:
        what = f"array of key {key!r}"
        start = self.position
        element = self._type(f"element type of key {key!r}")
        if element is ValueType.ARRAY:
            raise self.source.error(f"{what} at byte {start} holds arrays, which sparkd does not read")
        size = 8 if element is ValueType.STRING else _SCALARS[element].size
        count = self._count(f"length of {what}", MAX_ARRAY_LENGTH, smallest=size)
        first = self.position
        if element is ValueType.STRING:
            self._skip_strings(count, what)
        else:
            self.source.need(first, first + count * size, what)
            self.position = first + count * size
        return element, first, count

    def _skip_strings(self, count: int, what: str) -> None:
        """Pass over `count` strings. The only loop whose length counts: vocabularies have 250,000 tokens."""
        source, position, unpack = self.source, self.position, _U64.unpack_from
        have = len(source.data)
        for index in range(count):
            start = position + 8
            if start > have:
                source.need(position, start, f"length of string {index} in {what}")
                have = len(source.data)
            position = start + unpack(source.data, position)[0]
            if position > have:
                if position - start > MAX_STRING_BYTES:
                    length = f"string {index} at byte {start - 8} has length {position - start}"
                    raise source.error(f"{what}: {length}, beyond the limit of {MAX_STRING_BYTES}")
                source.need(start, position, f"string {index} in {what}")
                have = len(source.data)
        self.position = position

    def _alignment(self, values: Mapping[str, object]) -> int:
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        good = isinstance(alignment, int) and 1 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        if not isinstance(alignment, int) or not good or isinstance(alignment, bool):
            raise self.source.error(f"key 'general.alignment' is {alignment!r}, not a power of two to {MAX_ALIGNMENT}")
        return alignment

    def _tensor(self, index: int) -> tuple[Tensor, int]:
        """A tensor whose offset still counts from the data section, and the byte where its description begins."""
        source, start = self.source, self.position
        name = self._string(f"name of tensor {index}", MAX_NAME_BYTES)
        here = f"tensor {name!r} at byte {start}"
        dimensions = self._u32(f"number of dimensions of {here}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise source.error(f"{here} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._u64(f"dimensions of {here}") for _ in range(dimensions))
        if not 0 < _product(shape) < 1 << 63:
            raise source.error(f"{here} has the impossible shape {list(shape)}")
        id = self._u32(f"type of {here}")
        if id not in FORMATS:
            raise source.error(f"{here} has type {id}, which is unknown", "update sparkd or use another file")
        format = FORMATS[id]
        if shape[0] % format.block:
            row = f"rows of {shape[0]} elements, not a multiple of {format.block}"
            raise source.error(f"{here} has type {format.name} and {row}")
        nbytes = format.row_bytes(shape[0]) * _product(shape[1:])
        offset = self._u64(f"offset of {here}")
        return Tensor(name, shape, format, self.shard, offset, nbytes), start

    def _place(self, infos: list[tuple[Tensor, int]], data_offset: int, alignment: int) -> dict[str, Tensor]:
        """Tensors by name in the file's order, with absolute offsets, all inside the file and apart from each other."""
        source = self.source
        tensors: dict[str, Tensor] = {}
        last_end, last = 0, ""
        missing = 0
        for tensor, start in infos:
            here = f"tensor {tensor.name!r} at byte {start}"
            if tensor.name in tensors:
                raise source.error(f"{here} occurs twice")
            if tensor.offset % alignment:
                raise source.error(f"{here} has offset {tensor.offset}, not a multiple of the alignment {alignment}")
            offset = data_offset + tensor.offset
            tensors[tensor.name] = Tensor(tensor.name, tensor.shape, tensor.format, tensor.shard, offset, tensor.nbytes)
            over = offset + tensor.nbytes - source.file_size
            if over > missing:
                missing, last = over, f"{here} ends at byte {offset + tensor.nbytes}"
        if missing:
            raise source.error(f"{last}, the file at {source.file_size}: {missing} bytes are missing", _DOWNLOAD)
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < last_end:
                raise source.error(f"tensors {last!r} and {tensor.name!r} overlap at byte {tensor.offset}")
            last_end, last = tensor.offset + tensor.nbytes, tensor.name
        return tensors


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
