"""sparkctl trace: whole steps into a new file that the laboratory reads; nothing is left behind when none came."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_client.messages import TraceReply
from sparkctl import trace
from sparkctl.main import main

LAYERS, EXPERTS, TOP_K = 3, 16, 2


def step(number: int, kinds: list[int], top_k: int = TOP_K) -> bytes:
    ids = np.arange(LAYERS * len(kinds) * top_k, dtype="<i2") % EXPERTS
    return struct.pack("<IIQ", len(kinds), top_k, number) + bytes(kinds) + ids.tobytes()


class Daemon:
    """A client whose daemon answers with these bytes, then with nothing, then is interrupted."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers: Iterator[bytes] = iter([b"", *answers, b""])
        self.last = 0

    def __call__(self, *_: Any, **__: Any) -> Daemon:
        return self

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def trace(self, after: int = 0) -> TraceReply:
        assert after == self.last
        data = next(self.answers, None)
        if data is None:
            raise KeyboardInterrupt
        self.last += 1
        return TraceReply(1, self.last, 2 if self.last == 2 else 0, LAYERS, EXPERTS, ["", "coding"], data)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_PAUSE_S", 0.0)


def serve(monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> None:
    monkeypatch.setattr(trace, "Client", Daemon(list(answers)))


def test_steps_are_written_as_they_were_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, step(7, [0, 0, 2]) + step(8, [3]), step(9, [1]))
    assert main(["trace", str(tmp_path / "a.npz")]) == 0
    with np.load(tmp_path / "a.npz") as data:
        assert data["experts"].shape == (5, LAYERS, TOP_K) and data["experts"].dtype == np.uint16
        assert data["experts"][0].tolist() == [[0, 1], [6, 7], [12, 13]], "by token, then layer"
        assert data["decode"].tolist() == [0, 0, 0, 1, 1]
        assert data["tag"].tolist() == [0, 0, 1, 1, 0] and data["tags"].tolist() == ["", "coding"]
        assert data["step"].tolist() == [7, 7, 7, 8, 9]
        assert (int(data["n_expert"]), int(data["missed"])) == (EXPERTS, 2)
        assert set(data) == {"experts", "decode", "tag", "tags", "step", "n_expert", "missed"}, "ids of experts alone"


def test_no_more_tokens_are_kept_than_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, step(1, [0] * 8), step(2, [1]))
    assert main(["trace", str(tmp_path / "a.npz"), "--tokens", "5"]) == 0
    with np.load(tmp_path / "a.npz") as data:
        assert len(data["experts"]) == len(data["decode"]) == len(data["step"]) == 5


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.npz").write_text("mine")
    assert main(["trace", str(tmp_path / "a.npz")]) == 1
    assert "exists already" in capsys.readouterr().err and (tmp_path / "a.npz").read_text() == "mine"
    assert main(["trace", str(tmp_path / "none" / "a.npz")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((), "no token was routed meanwhile"),
        ((step(1, [1])[:-1],), "holds no whole steps"),
        ((step(1, []),), "holds no whole steps"),
        ((b"\xff" * 40,), "holds no whole steps"),
        ((step(1, [1]), step(1, [1], top_k=4)), "another model"),
    ],
)
def test_what_cannot_be_written_leaves_no_file(
    answers: tuple[bytes, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve(monkeypatch, *answers)
    assert main(["trace", str(tmp_path / "a.npz")]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_daemon_no_file_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "a.npz"), "--socket", str(tmp_path / "no.sock")]) == 1
    assert "no.sock" in capsys.readouterr().err and not list(tmp_path.iterdir())
