"""What was counted, kept over restarts: one file for each model, ids of experts and counts only.

    sparkd-profile 2 SHA-256 of what follows
    {"fingerprint": ..., "decode": {"rows": ..., "counts": [[...], ...]}, "prefill": {...},
     "tags": {TAG: {"recent": ..., "decode": {"rows": ..., "counts": ...}, "prefill": {...}}, ...}}

The tables of the tags are decayed and rounded. Version 1 had none: there the totals stand in for those of the tag "".
A profile is replaced at once or not at all. One that cannot be read is set aside (its name gains `.damaged`), never
used and never overwritten by the next; whoever loads is told why.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkd.calibration.counts import HALF_LIFE, MAX_TAGS, Decayed, RoutingCounts, Traffic
from sparkd.tags import TRAFFIC_TAG

VERSION = 2
_MAGIC = "sparkd-profile"
#: Longest file that is read: more than twice what the largest table of counts takes.
_MAX_BYTES = 256 << 20
#: Counts beyond this cannot have been counted.
_MAX_COUNT = 1 << 62


class DamagedError(ValueError):
    """A profile is not what a daemon wrote: one line that says how."""


def state_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """$STATE_DIRECTORY (systemd), else $XDG_STATE_HOME/sparkd, else ~/.local/state/sparkd; None without a home."""
    given = environment.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "sparkd"
    home = environment.get("HOME")
    return Path(home) / ".local" / "state" / "sparkd" if home else None


def profile_path(folder: Path, fingerprint: str) -> Path:
    """Where the profile of a model lies."""
    return folder / f"{fingerprint}.profile"


def save(folder: Path, fingerprint: str, counts: RoutingCounts) -> None:
    """Write the profile of a model. OSError, and the old one is still there, when that is not possible.

    Daemons that share a folder take turns; BlockingIOError when another one is at it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = json.dumps({"fingerprint": fingerprint, **_tables(counts)}, separators=(",", ":")).encode()
    head = f"{_MAGIC} {VERSION} {hashlib.sha256(body).hexdigest()}\n".encode()
    path = profile_path(folder, fingerprint)
    new = path.with_suffix(".new")
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _created(new) as file:
            file.write(head + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        os.fsync(directory)
    finally:
        os.close(directory)


def load(folder: Path, fingerprint: str, layers: int, experts: int) -> tuple[RoutingCounts, str]:
    """The counts of a model, empty ones when there is no usable profile, and a note when there is a damaged one.

    The damaged file is set aside. OSError when the folder cannot be used.
    """
    path = profile_path(folder, fingerprint)
    try:
        return read(folder, fingerprint, layers, experts), ""
    except FileNotFoundError:
        return RoutingCounts(layers, experts), ""
    except DamagedError as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        return RoutingCounts(layers, experts), f"{path}: {error}; set aside as {aside.name}, counting begins anew"


def read(folder: Path, fingerprint: str, layers: int, experts: int) -> RoutingCounts:
    """The counts of a model's profile, which stays as it is. FileNotFoundError, OSError or DamagedError."""
    with profile_path(folder, fingerprint).open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    return _counts(data, fingerprint, layers, experts)


@contextlib.contextmanager
def _created(path: Path) -> Any:
    """A new file that its owner alone can read; gone again when writing it fails."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _tables(counts: RoutingCounts) -> dict[str, Any]:
    return {
        "decode": {"rows": counts.decode_rows, "counts": counts.decode.tolist()},
        "prefill": {"rows": counts.prefill_rows, "counts": counts.prefill.tolist()},
        "tags": {
            tag: {
                "recent": round(traffic.recent),
                "decode": _rounded(traffic.decode),
                "prefill": _rounded(traffic.prefill),
            }
            for tag, traffic in counts.tags.items()
        },
    }


def _rounded(decayed: Decayed) -> dict[str, Any]:
    return {"rows": round(decayed.rows), "counts": np.rint(decayed.table).astype(np.int64).tolist()}


def _counts(data: bytes, fingerprint: str, layers: int, experts: int) -> RoutingCounts:
    head, _, body = data.partition(b"\n")
    words = head[:200].decode(errors="replace").split(" ")
    if len(data) > _MAX_BYTES or len(words) != 3 or words[0] != _MAGIC:
        raise DamagedError("this is no profile")
    if words[1] not in ("1", str(VERSION)):
        raise DamagedError(f"this daemon reads profiles up to version {VERSION}, this one has {words[1][:20]!r}")
    if words[2] != hashlib.sha256(body).hexdigest():
        raise DamagedError("the checksum does not fit")
    try:
        content = json.loads(body)
        if content["fingerprint"] != fingerprint:
            raise DamagedError("it is the profile of another model")
        counts = RoutingCounts(layers, experts)
        counts.decode, counts.decode_rows = _table(content["decode"], layers, experts)
        counts.prefill, counts.prefill_rows = _table(content["prefill"], layers, experts)
        if words[1] == "1":
            _scale_down(counts)
            return counts
        if len(content["tags"]) > MAX_TAGS:
            raise DamagedError(f"it has {len(content['tags'])} tags")
        for tag, told in content["tags"].items():
            if TRAFFIC_TAG.fullmatch(tag) is None:
                raise DamagedError("it holds what is no tag")
            counts.tags[tag] = Traffic(
                _decayed(told["decode"], layers, experts),
                _decayed(told["prefill"], layers, experts),
                float(_count(told["recent"])),
            )
        return counts
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise error if isinstance(error, DamagedError) else DamagedError("it lacks what a profile has") from None


def _scale_down(counts: RoutingCounts) -> None:
    """Let totals stand in for decayed counts: no more rows than such counts can have."""
    most = HALF_LIFE / np.log(2)
    traffic = counts.traffic("")
    for decayed, table, rows in (
        (traffic.decode, counts.decode, counts.decode_rows),
        (traffic.prefill, counts.prefill, counts.prefill_rows),
    ):
        scale = min(1.0, most / max(rows, 1))
        decayed.put(table * scale, rows * scale)
    traffic.recent = traffic.decode.rows


def _decayed(content: Any, layers: int, experts: int) -> Decayed:
    decayed = Decayed(layers, experts)
    table, rows = _table(content, layers, experts)
    decayed.put(table.astype(np.float64), rows)
    return decayed


def _table(content: Any, layers: int, experts: int) -> tuple[NDArray[np.uint64], int]:
    table, rows = content["counts"], content["rows"]
    if len(table) != layers or any(len(row) != experts for row in table):
        raise DamagedError(f"its counts are not those of {layers} layers of {experts} experts")
    for row in table:
        for number in row:
            _count(number)
    return np.array(table, np.uint64), _count(rows)


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < _MAX_COUNT:
        raise DamagedError("it holds what is no count")
    return number
