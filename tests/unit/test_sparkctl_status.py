"""The status view: everything the document says, whatever part of it is there."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sparkctl.main import main
from sparkctl.status import show
from sparkctl.tables import amount, bar, duration, size, strip

MIB = 1 << 20


def document() -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "pid": 71,
        "uptime_s": 3725.0,
        "state": "ready",
        "reason": "",
        "model": {
            "name": "spark", "architecture": "laguna", "path": "/m/spark.gguf", "fingerprint": "ab", "context": 2048,
            "vocab": 4096,
        },
        "memory": {
            "arena_bytes": 20 * MIB, "core_bytes": 4 * MIB, "records_bytes": 15 * MIB, "locked_bytes": 5 * MIB,
            "lock_note": "ulimit -l allows 5 MiB", "state_bytes": 64 * MIB, "state_used_bytes": 16 * MIB,
            "need_bytes": 500 * MIB, "limit": "memory.host_gib", "limit_bytes": 1000 * MIB,
        },
        "processes": [
            {"role": "supervisor", "pid": 71, "state": "ready", "rss_bytes": 30 * MIB, "restarts": 0,
             "heartbeat_s": None, "reason": ""},
            {"role": "worker", "pid": None, "state": "failed", "rss_bytes": None, "restarts": 3, "heartbeat_s": 1.25,
             "reason": "killed by signal 9"},
            {"role": "gateway", "pid": 72, "state": "ready", "rss_bytes": 9 * MIB, "restarts": 0, "heartbeat_s": None,
             "reason": "", "url": "http://127.0.0.1:8080"},
        ],
        "loading": {"done_bytes": 10 * MIB, "total_bytes": 20 * MIB, "read_bytes": 10 * MIB},
        "residency": {
            "records": 8, "resident": 6, "layers": [{"records": 4, "resident": 4}, {"records": 4, "resident": 2}],
            "slabs": [{"record_bytes": 29696, "slots": 8}],
        },
        "requests": {"running": 1, "queued": 2, "clients": 3, "accepted": 10, "finished": 4, "refused": 8, "failed": 5,
                     "cancelled": 6, "output_tokens": 777},
        "speed": {"prefill_tokens_s": 321.0, "decode_tokens_s": 45.6, "steps": 9, "chunk_rows": 64},
        "executor": {"kind": "native", "isa": "x86-64-v3", "threads": 2, "max_rows": 512, "kv_type": "f16",
                     "types": {"Q4_K": "INT256"}},
        "calibration": {
            "steps": 9, "refused": 0, "dropped_steps": 0,
            "profile": {"path": "/s/x.profile", "note": "/s/x.profile: the checksum does not fit"},
            "decode": {"rows": 9, "counts": [[8, 1, 0, 0], [0, 4, 4, 0]], "busiest_quarter": [0.89, 0.5]},
            "prefill": {"rows": 9, "counts": [[8, 1, 0, 0], [0, 4, 4, 0]], "busiest_quarter": [0.89, 0.5]},
        },
        "settings": {},
        "notes": ["key 'x' is odd\x1b[31m"],
    }  # fmt: skip


def shown(status: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    show(status)
    text = capsys.readouterr().out
    assert not {c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160}
    return text


def row(text: str, name: str) -> str:
    return next(line.rstrip() for line in text.splitlines() if line.strip().startswith(name))


def test_every_part_of_the_document_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(document(), capsys)
    assert text.startswith("ready\n")
    assert "sparkd 0.1.0, process 71, up 1 h 2 min" in row(text, "daemon")
    assert "spark (laguna), context 2048" in row(text, "model")
    assert row(text, "memory").endswith("██████████░░░░░░░░░░ 500.0 MiB of 1000.0 MiB (memory.host_gib)")
    assert "5.0 MiB of 20.0 MiB of the weights locked: ulimit -l allows 5 MiB" in text
    assert "16.0 MiB of 64.0 MiB for contexts in use" in text
    assert "1 running, 2 queued, 3 connected; so far 4 finished, 8 refused, 5 failed, 6 cancelled, 777 tokens" in text
    assert "decode 45.6, prefill 321.0 tokens/s" in row(text, "speed")
    assert "native x86-64-v3, 2 threads, keys and values f16" in row(text, "computes")
    worker = row(text, "worker")
    assert "failed" in worker and "1.2 s ago" in worker and "killed by signal 9" in worker
    assert "http://127.0.0.1:8080" in text
    assert row(text, "note") == "note: key 'x' is odd\\x1b[31m"
    assert "note: /s/x.profile: the checksum does not fit" in text


def test_residency_is_a_bar_for_each_layer_beside_the_use_of_its_experts(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(document(), capsys)
    first, second = row(text, "0 "), row(text, "1 ")
    assert "████████████████████" in first and "4 of 4" in first and "█▁" in first and "89%" in first
    assert "██████████░░░░░░░░░░" in second and "2 of 4" in second and "██" in second and "50%" in second


def test_a_tier_smaller_than_the_model_tells_what_it_has_room_for_and_what_was_missed(capsys) -> None:
    slab = {"record_bytes": MIB, "slots": 6, "reserve": 2, "spare": 1, "hot": 1, "ring": 3, "moving": 0, "free": 2}
    tier = {
        "records": 8, "slots": 6, "partial": True, "resident": 4, "layers": [{"records": 8, "resident": 4}],
        "slabs": [slab], "read_bytes": 5 * MIB, "moved_bytes": MIB,
        "uses": {"decode": {"uses": 200, "misses": 3}, "prefill": {"uses": 0, "misses": 0}},
        "placement": {"version": 2, "swaps_left": 7, "refused": ""},
    }  # fmt: skip
    text = shown(document() | {"residency": tier}, capsys)
    assert "room for 6 of 8, the others are read when used" in row(text, "experts  ")
    assert "1 hot, 3 ring, 2 reserve, 1 spare" in text
    assert "decode: 98.5% of 200 uses found their expert in memory" in text and "prefill:" not in text
    assert "5.0 MiB read from disk since the start, 1.0 MiB moved" in text
    assert "placement 2: 7 swaps are left" in text
    refused = tier | {"placement": {"version": 2, "swaps_left": 7, "refused": "placement 3: too hot"}}
    assert "refused placement 3: too hot" in shown(document() | {"residency": refused}, capsys)
    assert "room for" not in shown(document(), capsys)


def test_a_card_is_shown_like_the_tier_of_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    slab = {"record_bytes": MIB, "slots": 6, "reserve": 2, "spare": 0, "hot": 1, "ring": 2, "moving": 1, "free": 2}
    card = {
        "limit_bytes": 80 * MIB, "used_bytes": 40 * MIB, "free_bytes": 9 * MIB, "total_bytes": 100 * MIB,
        "given_back_bytes": 0, "records": 8, "slots": 4, "partial": True, "resident": 3, "in_place": 8,
        "in_place_note": "", "layers": [{"records": 4, "resident": 3}, {"records": 4, "resident": 0}], "slabs": [slab],
        "uses": {"decode": {"uses": 200, "misses": 50}}, "moved_bytes": 5 * MIB,
        "placement": {"version": 2, "swaps_left": 7, "refused": ""},
        "misses": {"setting": "auto", "policy": "in_place", "why": "a step misses 1.0 MB"},
    }  # fmt: skip
    executor = {"kind": "cuda", "max_rows": 512, "kv_type": "f16", "types": {}}
    text = shown(document() | {"device": card, "executor": executor}, capsys)
    assert row(text, "card").endswith("██████████░░░░░░░░░░ 40.0 MiB of 80.0 MiB, 9.0 MiB free")
    assert "room for 4 of 8 experts" in row(text, "on the card  ")
    assert "1 hot, 2 ring, 2 reserve, 0 spare" in text
    assert "decode: 75.0% of 200 uses found their expert on the card" in text
    assert "5.0 MiB copied to the card since the start" in text
    assert "placement 2: 7 swaps are left" in text
    assert "cuda, keys and values f16" in row(text, "computes")
    assert "3 of 4" in row(text, "0  ") and "0 of 4" in row(text, "1  ")
    assert row(text, "missed experts").endswith("read in host memory: a step misses 1.0 MB")
    assert "given back" not in text and "cannot be read" not in text
    less = card | {"given_back_bytes": 3 * MIB, "in_place": 5, "in_place_note": "cannot be pinned"}
    text = shown(document() | {"device": less}, capsys)
    assert "3.0 MiB of slots given back, since others use the card" in text
    assert "3 experts cannot be read in host memory, and are copied when used: cannot be pinned" in text
    text = shown(document() | {"device": less | {"misses": {"policy": "host", "why": "worker.misses says so"}}}, capsys)
    assert row(text, "missed experts").endswith("computed by the CPU: worker.misses says so")
    assert "cannot be read" not in text


def test_loading_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(document() | {"state": "loading"}, capsys)
    assert row(text, "loading  ").endswith("██████████░░░░░░░░░░ 10.0 MiB of 20.0 MiB")
    assert not any(line.startswith("loading ") for line in shown(document(), capsys).splitlines())


def test_a_state_that_is_not_ready_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(document() | {"state": "degraded", "reason": "the worker ended 5 times"}, capsys)
    assert text.startswith("degraded: the worker ended 5 times\n")


@pytest.mark.parametrize("missing", [*document()])
@pytest.mark.parametrize("empty", [True, False])
def test_a_part_that_is_not_known_yet_is_left_out(
    missing: str, empty: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    status = document()
    if empty:
        status[missing] = type(status[missing])()
    else:
        del status[missing]
    assert len(shown(status, capsys).splitlines()) >= 10


def test_a_daemon_that_has_just_started_has_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown({"state": "starting", "reason": "planning"}, capsys).strip() == "starting: planning"


def test_the_command_asks_the_daemon(fake_daemon: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    daemon = fake_daemon(status=document())
    assert main(["status", "--socket", str(daemon.path)]) == 0
    assert capsys.readouterr().out.startswith("ready\n")
    assert main(["status", "--socket", str(daemon.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document()


def test_sizes_amounts_and_durations_have_fitting_units() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 * MIB, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB"]
    assert [amount(n) for n in (7, 1500, 29.9e6, 35e9)] == ["7", "1.5 K", "29.9 M", "35.0 B"]
    assert [duration(s) for s in (0.25, 61, 7260)] == ["0.2 s", "1 min 1 s", "2 h 1 min"]


@pytest.mark.parametrize("columns", [80, 140])
def test_a_row_is_one_line_on_a_terminal_of_any_usual_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = document()
    layers = [{"records": 256, "resident": 256 - i} for i in range(40)]
    counts = [[i % 7 for i in range(256)] for _ in layers]
    told["residency"] |= {"layers": layers}
    told["calibration"]["decode"] |= {"counts": counts, "busiest_quarter": [0.5] * 40}
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns))
    show(told)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    rows = [line for line in text.splitlines() if re.match(r" *\d+ .* of 256", line)]
    assert len(rows) == 40 and all(line.rstrip().endswith("50%") for line in rows)


def test_lines_in_a_pipe_end_with_their_last_word_and_are_never_folded(capsys: pytest.CaptureFixture[str]) -> None:
    told = document()
    told["processes"][1]["reason"] = "a long reason, " * 20
    show(told)
    lines = capsys.readouterr().out.splitlines()
    assert any("a long reason, " * 19 in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_bars_and_strips_stay_within_their_width() -> None:
    assert [bar(share).plain.count("█") for share in (-1.0, 0.0, 0.5, 1.0, 9.0)] == [0, 0, 10, 20, 20]
    assert {len(bar(share).plain) for share in (-1.0, 0.3, 9.0)} == {20}
    assert strip([]).plain == "" and strip([0, 0]).plain == "  "
    assert strip([0, 1, 100]).plain == " ▁█"
    assert len(strip(range(256)).plain) == 32
