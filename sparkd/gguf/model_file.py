"""A model on disk: one GGUF file, or a set of shards that belong together.

Shards are named `<prefix>-00001-of-0000N.gguf`; each has its own tensors and data, the first alone has the metadata
(and may have nothing else). Nothing here reads a tensor's bytes.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from sparkd.errors import ModelFileError
from sparkd.gguf.oddities import oddities
from sparkd.gguf.reader import Header, Metadata, Tensor, parse_header, read_header, unsupported

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells whether a file is still the one that was opened; `size` in bytes."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """The identity in the answer of `os.stat` or `os.fstat`."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model. `header` are its raw bytes from 0 to `data_offset`."""

    path: Path
    size: int
    identity: Identity
    header: bytes
    data_offset: int


class ModelFile:
    """Metadata and tensors of a model, and the files they lie in."""

    def __init__(self, shards: Sequence[Shard], headers: Sequence[Header]) -> None:
        """From checked headers, one per shard in order; ModelFileError when they are not one whole set."""
        self.shards = tuple(shards)
        self.metadata: Metadata = headers[0].metadata
        self.version = headers[0].version
        self.tensors: Mapping[str, Tensor] = MappingProxyType(_join(self.shards, headers))
        self.architecture = self.metadata.text("general.architecture")
        self.notes: tuple[str, ...] = oddities(
            self.metadata, self.tensors, [(s.path.name, s.data_offset, s.size) for s in self.shards]
        )

    @classmethod
    def open(cls, path: Path) -> ModelFile:
        """Open a file, any shard of a set, or the folder that holds one model; ModelFileError says what is wrong."""
        path = Path(path)
        shard, header = given = _read(_in_folder(path) if _is_folder(path) else path)
        number, count = _split_keys(header.metadata)
        paths = _set_of(shard.path, number, count)
        missing = [p.name for p in paths if not p.exists()]
        if missing:
            names = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
            what = f"{len(missing)} of the {count} parts of this model missing: {names}"
            raise ModelFileError(what, where=str(path), fix="put all parts into one folder")
        parts = [given if index == number == 0 else _read(p, index) for index, p in enumerate(paths)]
        return cls([shard for shard, _ in parts], [header for _, header in parts])

    @classmethod
    def from_headers(cls, headers: Sequence[bytes], files: Sequence[tuple[Path, Identity]]) -> ModelFile:
        """The same model from kept raw headers, without touching the files (their identity is not checked here)."""
        parsed = [
            parse_header(raw, identity.size, str(path), shard)
            for shard, (raw, (path, identity)) in enumerate(zip(headers, files, strict=True))
        ]
        shards = [
            Shard(path, identity.size, identity, header.raw, header.data_offset)
            for (path, identity), header in zip(files, parsed, strict=True)
        ]
        return cls(shards, parsed)

    @property
    def where(self) -> str:
        """The first file's path, for messages."""
        return str(self.shards[0].path)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.size for shard in self.shards)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the headers of all shards, in hexadecimal."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(shard.header)
        return digest.hexdigest()

    def tensor(self, name: str) -> Tensor:
        """A tensor that must be there; ModelFileError otherwise."""
        if name not in self.tensors:
            raise ModelFileError(f"tensor {name!r} is missing", where=self.where)
        return self.tensors[name]

    def computable(self, name: str) -> Tensor:
        """A tensor that must be there with a type that has an arithmetic; UnsupportedError names tensor and type."""
        tensor = self.tensor(name)
        if tensor.format.arithmetic is None:
            raise unsupported(tensor, str(self.shards[tensor.shard].path))
        return tensor


def _read(path: Path, shard: int = 0) -> tuple[Shard, Header]:
    """Open one file and read its header."""
    with _said(path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError("neither a file nor a folder", where=str(path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            identity = Identity.of(os.fstat(fd))
            header = read_header(fd, identity.size, str(path), shard)
        finally:
            os.close(fd)
    return Shard(path, identity.size, identity, header.raw, header.data_offset), header


def _is_folder(path: Path) -> bool:
    with _said(path):
        return stat.S_ISDIR(path.stat().st_mode)


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise ModelFileError("no such file or folder", where=str(path)) from error
    except PermissionError as error:
        raise _forbidden(path) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot be read: {error}", where=str(path)) from error


def _forbidden(path: Path) -> ModelFileError:
    """Name the component of the path (or of what it links to) that the user may not pass, and what to do."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"uid {uid}"
    absolute = path.absolute()
    target = Path(os.path.realpath(absolute))
    for folder in (*reversed(absolute.parents), *reversed(target.parents)):
        if not os.access(folder, os.X_OK, effective_ids=True):
            fix = f"allow it (setfacl -m u:{user}:x {shlex.quote(str(folder))}) or move the model"
            return ModelFileError(f"user {user} may not pass through the folder {folder}", where=str(path), fix=fix)
    kind, bits = ("list the folder", "rx") if target.is_dir() else ("read the file", "r")
    fix = f"allow it (setfacl -m u:{user}:{bits} {shlex.quote(str(target))})"
    return ModelFileError(f"user {user} may not {kind} {target}", where=str(path), fix=fix)


def _in_folder(folder: Path) -> Path:
    """The one file, or the first present part of the one set, in a folder."""
    with _said(folder):
        files = sorted(p for p in folder.iterdir() if p.name.endswith(".gguf") and not p.is_dir())
    models: dict[str, Path] = {}
    for file in files:
        match = _SHARD_NAME.fullmatch(file.name)
        models.setdefault(f"{match['prefix']}-*-of-{match['count']}.gguf" if match else file.name, file)
    if not models:
        raise ModelFileError("the folder holds no .gguf file", where=str(folder))
    if len(models) > 1:
        names = ", ".join(list(models)[:5]) + (" ..." if len(models) > 5 else "")
        what = f"the folder holds {len(models)} models: {names}"
        raise ModelFileError(what, where=str(folder), fix="name the file to open")
    return next(iter(models.values()))


def _split_keys(metadata: Metadata) -> tuple[int, int]:
    """(number of the shard from 0, number of shards) as its keys say; (0, 1) for a file that is not split."""
    count = metadata.integer("split.count", 1)
    number = metadata.integer("split.no", 0)
    if count == 0 and number == 0:
        count = 1
    if not 0 <= number < count:
        what = f"keys 'split.no' = {number} and 'split.count' = {count} contradict each other"
        raise ModelFileError(what, where=metadata.where)
    return number, count


def _set_of(path: Path, number: int, count: int) -> list[Path]:
    """The paths of all shards, from the name of shard `number`."""
    match = _SHARD_NAME.fullmatch(path.name)
    named = (int(match["number"]) - 1, int(match["count"])) if match else (0, 1)
    if match is None and count == 1:
        return [path]
    if match is None or named != (number, count):
        what = f"the keys say part {number + 1} of {count}, the name does not"
        expected = f"{match['prefix'] if match else path.stem}-{number + 1:05d}-of-{count:05d}.gguf"
        raise ModelFileError(what, where=str(path), fix=f"its name should be like {expected}")
    return [path.with_name(f"{match['prefix']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]


def _join(shards: Sequence[Shard], headers: Sequence[Header]) -> dict[str, Tensor]:
    """The tensors of all shards, which must be one whole set."""
    tensors: dict[str, Tensor] = {}
    first = headers[0].metadata
    for index, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        where, metadata = str(shard.path), header.metadata
        if _split_keys(metadata) != (index, len(shards)):
            number, count = _split_keys(metadata)
            what = f"its keys say part {number + 1} of {count}, it stands for part {index + 1} of {len(shards)}"
            raise ModelFileError(what, where=where, fix="the parts belong to different sets")
        for key in ("split.tensors.count", "general.architecture"):
            if key in metadata and metadata[key] != first.get(key):
                what = f"key {key!r} is {metadata[key]!r}, in the first part {first.get(key)!r}"
                raise ModelFileError(what, where=where, fix="the parts belong to different sets")
        twice = next((name for name in header.tensors if name in tensors), None)
        if twice is not None:
            what = f"tensor {twice!r} occurs in this part and in {shards[tensors[twice].shard].path.name}"
            raise ModelFileError(what, where=where, fix="the parts belong to different sets")
        tensors.update(header.tensors)
    expected = first.integer("split.tensors.count", len(tensors))
    if len(shards) > 1 and expected != len(tensors):
        what = f"the parts hold {len(tensors)} tensors, key 'split.tensors.count' says {expected}"
        raise ModelFileError(what, where=str(shards[0].path), fix="the parts belong to different sets")
    return tensors
