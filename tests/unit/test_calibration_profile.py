"""The profile file: what was counted comes back, or is set aside and said; nothing but ids and counts is in it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.calibration import profile
from sparkd.calibration.counts import RoutingCounts

MODEL = "c0" * 32
LAYERS, EXPERTS = 3, 8


def counted(seed: int = 1) -> RoutingCounts:
    chance = np.random.default_rng(seed)
    counts = RoutingCounts(LAYERS, EXPERTS)
    counts.decode = chance.integers(0, 1 << 40, (LAYERS, EXPERTS), np.uint64)
    counts.prefill = chance.integers(0, 1 << 40, (LAYERS, EXPERTS), np.uint64)
    counts.decode_rows, counts.prefill_rows = 1234, 5678
    for tag in ("", "coding"):
        traffic = counts.traffic(tag)
        traffic.recent = float(chance.integers(0, 1000))
        for decayed in (traffic.decode, traffic.prefill):
            decayed.put(chance.integers(0, 20_000, (LAYERS, EXPERTS)).astype(float), float(chance.integers(1, 9999)))
    return counts


def same(one: RoutingCounts, other: RoutingCounts) -> bool:
    tables = (one.decode == other.decode).all() and (one.prefill == other.prefill).all()
    if one.tags.keys() != other.tags.keys():
        return False
    for tag, traffic in one.tags.items():
        for mine, its in ((traffic.decode, other.tags[tag].decode), (traffic.prefill, other.tags[tag].prefill)):
            tables &= (mine.table == its.table).all() and mine.rows == its.rows
        tables &= traffic.recent == other.tags[tag].recent
    return bool(tables) and (one.decode_rows, one.prefill_rows) == (other.decode_rows, other.prefill_rows)


def load(folder: Path, model: str = MODEL, layers: int = LAYERS) -> tuple[RoutingCounts, str]:
    return profile.load(folder, model, layers, EXPERTS)


def test_what_was_counted_comes_back_and_nothing_else_lies_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "sparkd"
    for seed in range(3):
        profile.save(folder, MODEL, counted(seed))
    loaded, note = load(folder)
    assert same(loaded, counted(2)) and note == ""
    assert [path.name for path in folder.iterdir()] == [f"{MODEL}.profile"]
    assert stat.S_IMODE((folder / f"{MODEL}.profile").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_profile_holds_its_model_s_fingerprint_and_counts_alone(tmp_path: Path) -> None:
    profile.save(tmp_path, MODEL, counted())
    head, body = (tmp_path / f"{MODEL}.profile").read_text().split("\n")
    assert re.fullmatch(r"sparkd-profile 2 [0-9a-f]{64}", head)
    words = set(re.findall(r"[^\W\d]\w*", body)) - {MODEL}
    assert words == {"fingerprint", "decode", "prefill", "rows", "counts", "tags", "recent", "coding"}


def test_each_model_has_a_profile_of_its_own_and_one_without_begins_empty(tmp_path: Path) -> None:
    profile.save(tmp_path, MODEL, counted())
    other, note = load(tmp_path, "d1" * 32)
    assert note == "" and not other.decode.any() and other.decode_rows == 0
    assert same(load(tmp_path)[0], counted())


def sealed(body: bytes, version: int = 2) -> bytes:
    return f"sparkd-profile {version} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def content(**changes: object) -> bytes:
    table = {"rows": 1, "counts": [[1] * EXPERTS] * LAYERS}
    told = {"fingerprint": MODEL, "decode": table, "prefill": table, "tags": {}}
    return json.dumps(told | changes).encode()


TAGGED = {
    "recent": 1,
    "decode": {"rows": 1, "counts": [[1] * EXPERTS] * LAYERS},
    "prefill": {"rows": 1, "counts": [[1] * EXPERTS] * LAYERS},
}
DAMAGES = {
    "empty": (b"", "no profile"),
    "something else": (b"\x00\xff" * 100, "no profile"),
    "later version": (sealed(content(), version=3), "up to version 2, this one has '3'"),
    "other model": (sealed(content(fingerprint="00" * 32)), "another model"),
    "no table": (sealed(content(decode=None)), "lacks"),
    "no json": (sealed(b"{"), "lacks"),
    "deep": (sealed(b"[" * 100_000), "lacks"),
    "other shape": (sealed(content(decode={"rows": 1, "counts": [[1] * EXPERTS] * 2})), "3 layers of 8 experts"),
    "negative": (sealed(content(decode={"rows": 1, "counts": [[-1] * EXPERTS] * LAYERS})), "no count"),
    "huge": (sealed(content(decode={"rows": 1 << 63, "counts": [[1] * EXPERTS] * LAYERS})), "no count"),
    "text": (sealed(content(decode={"rows": 1, "counts": [["1"] * EXPERTS] * LAYERS})), "no count"),
    "odd tag": (sealed(content(tags={"Two Words": TAGGED})), "no tag"),
    "too many tags": (sealed(content(tags={f"t{n}": TAGGED for n in range(17)})), "17 tags"),
    "half a tag": (sealed(content(tags={"a": {"recent": 1}})), "lacks"),
    "tags in a list": (sealed(content(tags=["a"])), "lacks"),
    "fraction": (sealed(content(tags={"a": TAGGED | {"recent": 0.5}})), "no count"),
    "truth": (sealed(content(decode={"rows": True, "counts": [[1] * EXPERTS] * LAYERS})), "no count"),
}


def test_a_profile_of_the_first_version_is_read_and_its_totals_are_what_was_learned(tmp_path: Path) -> None:
    table = {"rows": 100_000, "counts": [[40_000] * EXPERTS] * LAYERS}
    old = {"fingerprint": MODEL, "decode": table, "prefill": {"rows": 3, "counts": [[1] * EXPERTS] * LAYERS}}
    (tmp_path / f"{MODEL}.profile").write_bytes(sealed(json.dumps(old).encode(), version=1))
    loaded, note = load(tmp_path)
    assert note == "" and loaded.decode_rows == 100_000 and loaded.decode[2, 7] == 40_000
    learned = loaded.tags[""]
    assert learned.decode.rows < 25_000, "no more than decayed counts can come to"
    assert learned.decode.table[2, 7] == pytest.approx(0.4 * learned.decode.rows)
    assert (learned.prefill.rows, learned.prefill.table[0, 0]) == (3, 1)
    assert loaded.blended().any()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_profile_is_set_aside_and_said_and_counting_begins_anew(tmp_path: Path, damage: str) -> None:
    data, said = DAMAGES[damage]
    path = tmp_path / f"{MODEL}.profile"
    path.write_bytes(data)
    loaded, note = load(tmp_path)
    assert not loaded.decode.any() and said in note and str(path) in note and f"{MODEL}.damaged" in note
    assert not path.exists() and (tmp_path / f"{MODEL}.damaged").read_bytes() == data
    profile.save(tmp_path, MODEL, counted())
    assert same(load(tmp_path)[0], counted())
    assert (tmp_path / f"{MODEL}.damaged").read_bytes() == data


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0), change=st.integers(1, 255), cut=st.integers(0, 40))
def test_a_changed_or_cut_profile_is_never_believed(tmp_path_factory, place: int, change: int, cut: int) -> None:
    folder = tmp_path_factory.mktemp("profile")
    profile.save(folder, MODEL, counted())
    path = folder / f"{MODEL}.profile"
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= change
    path.write_bytes(data[: len(data) - cut])
    loaded, note = load(folder)
    assert note and not loaded.decode.any() and not loaded.prefill.any()


def test_a_writer_that_fails_leaves_the_old_profile_and_no_trace(tmp_path: Path, monkeypatch) -> None:
    profile.save(tmp_path, MODEL, counted(1))

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        profile.save(tmp_path, MODEL, counted(2))
    monkeypatch.undo()
    assert same(load(tmp_path)[0], counted(1))
    assert [path.name for path in tmp_path.iterdir()] == [f"{MODEL}.profile"]


def test_a_writer_that_is_killed_a_hundred_times_leaves_the_old_profile_or_the_new_one(tmp_path: Path) -> None:
    profiles = [counted(seed) for seed in range(2)]
    profile.save(tmp_path, MODEL, profiles[0])
    chance = random.Random(7)
    seen = set()
    for _ in range(100):
        writer = os.fork()
        if writer == 0:
            with contextlib.suppress(BaseException):
                while True:
                    for counts in profiles:
                        profile.save(tmp_path, MODEL, counts)
            os._exit(1)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        loaded, note = load(tmp_path)
        assert note == ""
        seen.add([same(loaded, counts) for counts in profiles].index(True))
        assert {path.name for path in tmp_path.iterdir()} <= {f"{MODEL}.profile", f"{MODEL}.new"}
    assert seen == {0, 1}, "no writer got anywhere"
    profile.save(tmp_path, MODEL, profiles[1])
    assert [path.name for path in tmp_path.iterdir()] == [f"{MODEL}.profile"]


def test_what_a_killed_writer_began_is_overwritten_by_the_next(tmp_path: Path) -> None:
    (tmp_path / f"{MODEL}.new").write_bytes(b"half a profi")
    profile.save(tmp_path, MODEL, counted())
    assert [path.name for path in tmp_path.iterdir()] == [f"{MODEL}.profile"]


def test_daemons_that_share_a_folder_never_write_at_the_same_time(tmp_path: Path) -> None:
    profile.save(tmp_path, MODEL, counted(1))
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        profile.save(tmp_path, MODEL, counted(2))
    os.close(other)
    profile.save(tmp_path, MODEL, counted(2))
    assert same(load(tmp_path)[0], counted(2))


def test_the_folder_is_the_service_manager_s_else_the_user_s() -> None:
    home = {"HOME": "/home/u"}
    assert profile.state_folder({}) is None
    assert profile.state_folder(home) == Path("/home/u/.local/state/sparkd")
    assert profile.state_folder(home | {"XDG_STATE_HOME": "/s"}) == Path("/s/sparkd")
    system = {"XDG_STATE_HOME": "/s", "STATE_DIRECTORY": "/var/lib/sparkd:/var/lib/x"}
    assert profile.state_folder(system) == Path("/var/lib/sparkd")
