"""sparkctl profile: what was learned, from the daemon or from the file; counts out and in, line by line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkctl.main import main
from sparkd.calibration import profile
from sparkd.calibration.counts import RoutingCounts
from sparkd.calibration.csv_counts import CountsFileError, read_counts, write_counts
from sparkd.calibration.worth import describe
from sparkd.demo.main import MODEL
from sparkd.gguf.model_file import ModelFile

Start = Callable[..., Any]
FINGERPRINT = ModelFile.open(MODEL).fingerprint
LAYERS, EXPERTS, TOP_K = 8, 64, 4


def learned(rows: int = 600) -> RoutingCounts:
    """Two tags: one uses the first experts most, the other the last."""
    rng = np.random.default_rng(1)
    keys = rng.gumbel(size=(LAYERS, rows, EXPERTS)) - np.log(np.arange(1, EXPERTS + 1))
    ids = np.argsort(-keys, axis=2)[..., :TOP_K].astype(np.int16)
    ids[:, ::3] = EXPERTS - 1 - ids[:, ::3]
    counts = RoutingCounts(LAYERS, EXPERTS)
    counts.add(ids, np.ones(rows, bool), ["" if row % 3 else "coding" for row in range(rows)])
    return counts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def nobody(tmp_path: Path) -> list[str]:
    return ["--socket", str(tmp_path / "no.sock")]


def test_the_file_tells_hits_speeds_tags_and_its_age(
    folder: Path, nobody: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    counts = learned()
    profile.save(folder, FINGERPRINT, counts)
    os.utime(
        profile.profile_path(folder, FINGERPRINT), (0, profile.profile_path(folder, FINGERPRINT).stat().st_mtime - 3600)
    )
    assert main(["profile", str(MODEL), "--json", *nobody]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["live"] is False and told["age_s"] == pytest.approx(3600, abs=120)
    assert told["decode_rows"] == 600 and told["worth_having"] is True
    assert told["drift"].startswith("too little") and told["drifted"] is False
    assert [row["share"] for row in told["shares"]] == [0.25, 0.4, 0.6]
    hits = [row["hits"] for row in told["shares"]]
    assert hits == sorted(hits) and hits[0] > 0.4
    for row in told["shares"]:
        assert row["tokens_s"] > row["tokens_s_by_chance"] > 0
    assert set(told["tags"]) == {"", "coding"}
    assert told["tags"]["coding"]["hottest"][0] > hits[0], "one kind of traffic needs fewer experts than both"
    assert main(["profile", str(MODEL), *nobody]) == 0
    shown = capsys.readouterr().out
    assert "saved 1 h" in shown and "coding" in shown and "(none)" in shown and "600 tokens of output" in shown


def test_a_daemon_tells_what_it_knows_now(fake_daemon: Start, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibration = {
        "decode": {"rows": 4242, "counts": []},
        "profile": {"path": "/state/x.profile", "note": "", "saved": None},
        "worth": describe(learned(300)) | {"recent_rows": 900.0, "drift": "traffic has drifted away", "drifted": True},
        "tier": {"name": "host", "slots": 100, "records": 512, "placement": 3, "rule": "decay 64",
                 "hit_rates": {"decay 64": 0.8, "lru\x1b[1m": 0.7}},
    }  # fmt: skip
    status = {"pid": 5, "model": {"path": str(MODEL), "fingerprint": FINGERPRINT}, "calibration": calibration}
    socket = str(fake_daemon(status=status).path)
    assert main(["profile", "--socket", socket]) == 0
    shown = capsys.readouterr().out
    assert "4242 tokens" in shown and "traffic has drifted away" in shown and "not saved yet" in shown
    assert "100 slots for 512 experts: decay 64" in shown and "80.0%" in shown and "\x1b" not in shown
    assert main(["profile", "--json", "--socket", socket]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["live"] and told["drifted"] and told["tier"]["placement"] == 3


def test_without_a_profile_or_a_daemon_the_reason_is_said(
    folder: Path, nobody: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(MODEL), *nobody]) == 1
    assert "there is no profile" in capsys.readouterr().err
    assert main(["profile", *nobody]) == 1
    assert "no.sock" in capsys.readouterr().err
    folder.mkdir()
    (folder / f"{FINGERPRINT}.profile").write_text("junk")
    assert main(["profile", str(MODEL), *nobody]) == 1
    assert "this is no profile" in capsys.readouterr().err
    assert (folder / f"{FINGERPRINT}.profile").read_text() == "junk", "looking changes nothing"


def test_counts_go_out_and_come_in_again(
    folder: Path, nobody: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = learned()
    profile.save(folder, FINGERPRINT, counts)
    out = tmp_path / "counts.csv"
    ask = ["profile", str(MODEL), *nobody]
    assert main([*ask, "--export", str(out), "--tag", "coding"]) == 0
    lines = out.read_text().splitlines()
    assert lines[0] == "layer,expert,count" and len(lines) == 1 + LAYERS * EXPERTS
    assert main([*ask, "--export", str(out)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main([*ask, "--export", str(tmp_path / "b.csv"), "--tag", "legal"]) == 1
    assert "there are: (none), coding" in capsys.readouterr().err
    assert main([*ask, "--import", str(out), "--tag", "legal"]) == 0
    back = profile.read(folder, FINGERPRINT, LAYERS, EXPERTS)
    assert set(back.tags) == {"", "coding", "legal"}
    assert (back.tags["legal"].decode.table == back.tags["coding"].decode.table).all()
    assert back.tags["legal"].decode.rows == pytest.approx(back.tags["coding"].decode.rows, rel=0.05)
    assert back.decode_rows == counts.decode_rows


def test_counts_are_not_taken_under_a_daemon_that_would_write_over_them(
    fake_daemon: Start, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("layer,expert,count\n0,0,9\n")
    status = {"pid": 77, "model": {"path": str(MODEL), "fingerprint": FINGERPRINT}, "calibration": {"steps": 1}}
    socket = str(fake_daemon(status=status).path)
    assert main(["profile", "--import", str(tmp_path / "a.csv"), "--socket", socket]) == 1
    assert "process 77 serves this model" in capsys.readouterr().err
    assert not folder.exists()


BAD = {
    "": "line 1: the file is empty",
    "a,b\n": "line 1: it begins with 'a,b'; begin with 'layer,expert,count'",
    "layer,expert,count\n0,1,2\n0,1\n": "line 3: '0,1' is not three whole numbers",
    "layer,expert,count\n0,1,-2\n": "line 2: '0,1,-2' is not",
    "layer,expert,count\n0,1,²\n": "line 2: '0,1,²' is not",
    "layer,expert,count\n0,1,2.5\n": "line 2",
    "layer,expert,count\n\n": "line 2: '' is not",
    "layer,expert,count\n2,0,1\n": "line 2: there is no expert layer 2; layers are 0 to 1",
    "layer,expert,count\n1,3,1\n": "line 2: expert layer 1 has no expert 3; experts are 0 to 2",
    "layer,expert,count\n0,0,1\n0,0,1\n": "line 3: expert 0 of expert layer 0 is there twice",
    "layer,expert,count\n0,0,99999999999999999999\n": "line 2: 99999999999999999999 is no count",
    "layer,expert,count\n" + "9" * 5000: "line 2: '" + "9" * 100 + "' is not three whole numbers",
}


@pytest.mark.parametrize("text", BAD)
def test_a_line_that_cannot_be_is_named_with_what_to_do(text: str) -> None:
    with pytest.raises(CountsFileError, match=re.escape(f"counts.csv, {BAD[text]}")):
        read_counts(text.splitlines(), [4, 3], "counts.csv")


def test_records_without_a_line_count_nothing_and_what_is_written_is_read() -> None:
    table = read_counts(["layer,expert,count", "0,3,7", "1,2,5\r\n"], [4, 3], "x")
    assert table.tolist() == [[0, 0, 0, 7], [0, 0, 5, 0]]
    lines = list(write_counts(table, [4, 3]))
    assert lines[-1] == "1,2,5" and len(lines) == 8
    assert (read_counts(lines, [4, 3], "x") == table).all()


def test_a_file_that_is_too_large_or_no_text_is_refused(
    folder: Path, nobody: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large.csv"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    ask = ["profile", str(MODEL), *nobody, "--import"]
    assert main([*ask, str(large)]) == 1
    assert "large.csv: more than" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\x00" * 1000)
    assert main([*ask, str(tmp_path / "binary")]) == 1
    assert "binary, line 1: it begins with" in capsys.readouterr().err
    assert main([*ask, str(tmp_path / "missing")]) == 1
    assert "missing: cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "zero").write_text("layer,expert,count\n0,0,0\n")
    assert main([*ask, str(tmp_path / "zero")]) == 1
    assert "all counts are 0" in capsys.readouterr().err
    assert not folder.exists()
    with pytest.raises(SystemExit):
        main(["profile", "--export", "a", "--import", "b"])
    assert main([*ask, "x", "--tag", "Two Words"]) == 1
    assert "no tag of traffic" in capsys.readouterr().err
