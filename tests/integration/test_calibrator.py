"""The calibrator as a process: counts what workers routed, keeps it, and survives what they should not have sent."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from control import PATIENCE_S, Control, control, settings_for

from sparkd.calibration import profile
from sparkd.calibration.counts import RoutingCounts
from sparkd.ipc.internal import Placement, Ready, Tier, TraceAnswer, TraceQuery
from sparkd.ipc.memory import Region
from sparkd.ipc.routing import Routed, RoutingRing

MODEL = "c0" * 32


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    with control(tmp_path) as link:
        yield link


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(1 << 20, "sparkd-routing") as made:
        RoutingRing.create(made, MODEL, layers=2, experts=8)
        yield made


@pytest.fixture
def ring(region: Region) -> RoutingRing:
    return RoutingRing(region)


def start(link: Control, region: Region) -> tuple[subprocess.Popen, bytes]:
    child = link.start("calibration", settings_for(""), routing=region)
    name = link.name("calibrator", child)
    link.wait(name, Ready)
    return child, name


def routed(ids: list, decode: list[int]) -> Routed:
    array = np.array(ids, "<i2")
    _, rows, top_k = array.shape
    return Routed(1, rows, top_k, bytes(decode), array.tobytes())


ONE = [[[0, 1]], [[2, 3]]]


def status_after(link: Control, name: bytes, steps: int) -> dict:
    """The status once so many steps were taken."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = link.status(name)
        if status["steps"] + status["refused"] == steps:
            return status
        assert time.monotonic() < deadline, status


def test_routed_ids_are_counted_by_layer_expert_and_kind(link: Control, region: Region, ring: RoutingRing) -> None:
    _, name = start(link, region)
    before = link.status(name)
    assert (before["steps"], before["refused"], before["dropped_steps"]) == (0, 0, 0)
    for _ in range(2):
        ring.push(routed([[[0, 1], [0, 2], [7, 0]], [[3, 4], [4, 3], [5, 6]]], [1, 0, 1]))
    status = status_after(link, name, 2)
    assert status["decode"]["counts"] == [[4, 2, 0, 0, 0, 0, 0, 2], [0, 0, 0, 2, 2, 2, 2, 0]]
    assert status["prefill"]["counts"] == [[2, 0, 2, 0, 0, 0, 0, 0], [0, 0, 0, 2, 2, 0, 0, 0]]
    assert (status["decode"]["rows"], status["prefill"]["rows"]) == (4, 2)
    assert status["decode"]["busiest_quarter"] == [0.75, 0.5]


def test_steps_that_came_before_the_calibrator_are_counted_too(
    link: Control, region: Region, ring: RoutingRing
) -> None:
    for _ in range(100):
        ring.push(routed(ONE, [1]))
    _, name = start(link, region)
    status = status_after(link, name, 100)
    assert status["decode"]["counts"][0][:2] == [100, 100] and status["dropped_steps"] == 0


def test_what_cannot_be_is_refused_and_counting_goes_on(link: Control, region: Region, ring: RoutingRing) -> None:
    child, name = start(link, region)
    ring.push(routed(ONE, [1]))
    ring.push(routed([[[0, 8]], [[0, 1]]], [1]))
    ring.push(routed([[[3, 3]], [[0, 1]]], [1]))
    ring.push(routed([[[-1, 3]], [[0, 1]]], [1]))
    ring.push(routed(ONE, [1]))
    status = status_after(link, name, 5)
    assert (status["steps"], status["refused"]) == (2, 3)
    assert status["decode"]["counts"] == [[2, 2, 0, 0, 0, 0, 0, 0], [0, 0, 2, 2, 0, 0, 0, 0]]
    words = region.view(0, 4096).cast("Q")
    words[8] += 24
    status = status_after(link, name, 6)
    ring.push(routed(ONE, [1]))
    assert status_after(link, name, 7)["steps"] == 3
    child.terminate()
    code, said = link.ended(child)
    assert code == 0
    assert "Traceback" not in said
    assert said.count("dropped a step of a worker") == 3 and said.count("dropped what was in the ring") == 1


def test_counts_are_kept_over_an_orderly_end(link: Control, region: Region, ring: RoutingRing, tmp_path: Path) -> None:
    child, name = start(link, region)
    ring.push(routed(ONE, [1]))
    status_after(link, name, 1)
    ring.push(routed(ONE, [0]))
    child.terminate()
    assert link.ended(child)[0] == 0
    assert [path.name for path in (tmp_path / "state" / "sparkd").iterdir()] == [f"{MODEL}.profile"]
    _, name = start(link, region)
    status = link.status(name)
    assert (status["decode"]["rows"], status["prefill"]["rows"], status["steps"]) == (1, 1, 0)
    path = tmp_path / "state" / "sparkd" / f"{MODEL}.profile"
    assert status["profile"] == {"path": str(path), "note": "", "saved": path.stat().st_mtime}


def test_a_damaged_profile_is_said_in_status_and_log_and_does_not_stop_the_daemon(
    link: Control, region: Region, ring: RoutingRing, tmp_path: Path
) -> None:
    folder = tmp_path / "state" / "sparkd"
    folder.mkdir(parents=True)
    (folder / f"{MODEL}.profile").write_text("damaged")
    child, name = start(link, region)
    assert "set aside" in link.status(name)["profile"]["note"]
    ring.push(routed(ONE, [1]))
    status_after(link, name, 1)
    child.terminate()
    code, said = link.ended(child)
    assert code == 0 and said.count("set aside") == 1
    assert sorted(path.name for path in folder.iterdir()) == [f"{MODEL}.damaged", f"{MODEL}.profile"]


def test_a_folder_that_cannot_be_used_is_said_and_counting_goes_on(
    link: Control, region: Region, ring: RoutingRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "file"))
    child, name = start(link, region)
    ring.push(routed(ONE, [1]))
    assert "Not a directory" in status_after(link, name, 1)["profile"]["note"]
    child.terminate()
    assert link.ended(child)[0] == 0


def test_a_killed_calibrator_leaves_the_steps_it_had_not_dealt_with(
    link: Control, region: Region, ring: RoutingRing
) -> None:
    child, name = start(link, region)
    os.kill(child.pid, 19)
    for _ in range(50):
        ring.push(routed(ONE, [1]))
    child.kill()
    child.wait()
    _, name = start(link, region)
    assert status_after(link, name, 50)["decode"]["rows"] == 50


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_a_calibrator_that_is_killed_while_it_saves_leaves_the_old_profile_or_the_new_one(
    link: Control, region: Region, ring: RoutingRing, tmp_path: Path, kills: int
) -> None:
    folder = tmp_path / "state" / "sparkd"
    unfinished = profile.profile_path(folder, MODEL).with_suffix(".new")
    chance = random.Random(5)
    rows, left, cut = 0, [], 0
    delay = 0.002
    for _ in range(kills):
        child, name = start(link, region)
        assert link.status(name)["decode"]["rows"] == rows, "it begins with what was there"
        ring.push(routed(ONE, [1]))
        status_after(link, name, 1)
        unfinished.unlink(missing_ok=True)
        child.terminate()
        time.sleep(delay * chance.uniform(0.5, 1.5))
        child.kill()
        child.wait()
        cut += unfinished.exists()
        found = profile.load(folder, MODEL, 2, 8) if folder.exists() else (RoutingCounts(2, 8), "")
        assert found[1] == ""
        left.append(found[0].decode_rows - rows)
        rows = found[0].decode_rows
        assert found[0].decode.tolist() == [[rows, rows, *[0] * 6], [0, 0, rows, rows, *[0] * 4]]
        # Come nearer to the moment of saving, however fast this machine is today.
        delay *= 0.8 if left[-1] else 1.25
    print(f"{kills} kills: {sum(left)} had saved, {cut} were writing")
    assert set(left) <= {0, 1}
    assert kills < 100 or (set(left) == {0, 1} and cut), "some were killed before, some after, some while they wrote"


def test_tags_are_counted_apart_and_kept(link: Control, region: Region, ring: RoutingRing) -> None:
    child, name = start(link, region)
    ring.push(routed(ONE, [ring.kind(1, "coding")]))
    ring.push(routed([[[4, 5], [0, 1]], [[6, 7], [2, 3]]], [ring.kind(1, "legal"), ring.kind(1, "")]))
    told = status_after(link, name, 2)["worth"]["tags"]
    assert set(told) == {"", "coding", "legal"}
    assert told["legal"]["rows"] == 1.0 and told["coding"]["recent"] == pytest.approx(1 / 3, abs=0.01)
    assert told["coding"]["hottest"] == [1.0, 1.0, 1.0]
    child.terminate()
    assert link.ended(child)[0] == 0
    _, name = start(link, region)
    assert set(link.status(name)["worth"]["tags"]) == {"", "coding", "legal"}


TIER = Tier("tiny", "host", slabs=[0, 0], experts=[8, 8], record_bytes=[100], slots=[8], spare=[0])


def placements(link: Control, name: bytes) -> list[Placement]:
    return [msg for msg in link.heard.get(name, []) if isinstance(msg, Placement)]


def test_a_tier_that_lacks_room_is_filled_by_the_profile_and_then_follows_the_traffic(
    link: Control, region: Region, ring: RoutingRing
) -> None:
    child, name = start(link, region)
    link.send(name, TIER)
    assert link.status(name)["tier"]["placement"] == 0
    for step in range(600):
        ring.push(routed([[[0, 1 + step % 2]], [[6, 4 + step % 2]]], [1]))
    status = status_after(link, name, 600)
    tier = status["tier"]
    assert (tier["name"], tier["slots"], tier["records"]) == ("host", 8, 16)
    assert tier["hit_rates"]["lru"] > 0.9
    assert not placements(link, name), "where all rules find everything there is nothing to change"
    child.terminate()
    assert link.ended(child)[0] == 0
    child, name = start(link, region)
    link.send(name, Placement(6, "tiny", "host", [[], []], 1.0, 64.0))
    link.send(name, TIER)
    first = link.wait(name, Placement)
    assert isinstance(first, Placement)
    assert (first.version, first.model, first.tier, first.ring) == (7, "tiny", "host", pytest.approx(0.2))
    assert [sorted(layer) for layer in first.hot] == [[0, 1, 2], [4, 5, 6]]
    rng = np.random.default_rng(1)
    for _ in range(1200):
        ids = np.stack([rng.choice(8, 2, replace=False) for _ in range(2)])
        while not ring.push(routed(ids[:, None].tolist(), [1])):
            link.hear(0.05)
    status_after(link, name, 1200)
    assert [msg.version for msg in placements(link, name)] == list(range(7, 7 + len(placements(link, name))))
    assert 1 <= len(placements(link, name)) <= 5, "few, however the traffic jumps about"


def test_a_message_that_is_not_for_a_calibrator_is_passed_over(link: Control, region: Region) -> None:
    _, name = start(link, region)
    link.send(name, Ready("store"))
    assert link.status(name)["tier"] == {}


def test_routed_steps_are_told_to_who_records_and_hold_ids_of_experts_alone(
    link: Control, region: Region, ring: RoutingRing
) -> None:
    _, name = start(link, region)
    ring.push(routed(ONE, [1]))
    status_after(link, name, 1)
    link.send(name, TraceQuery(1, 0))
    begun = link.wait(name, TraceAnswer)
    assert isinstance(begun, TraceAnswer) and begun.data == b""
    kind = ring.kind(1, "coding")
    ring.push(routed(ONE, [kind]))
    status_after(link, name, 2)
    link.heard[name] = []
    link.send(name, TraceQuery(2, begun.last))
    told = link.wait(name, TraceAnswer)
    assert isinstance(told, TraceAnswer)
    assert (told.job, told.last, told.missed, told.layers, told.experts) == (2, begun.last + 1, 0, 2, 8)
    assert told.tags == ["", "coding"]
    assert told.data[:16] == bytes([1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
    assert told.data[16:] == bytes([kind, 0, 0, 1, 0, 2, 0, 3, 0])
