"""What store and calibrator have for each other reaches them, and whoever takes their place."""

from __future__ import annotations

import dataclasses

from sparkd.ipc.internal import Placement, Tier
from sparkd.supervisor.advice import Advice

TIER = Tier("tiny", "host", [0], [8], [100], [4], [0])
PLACEMENT = Placement(3, "tiny", "host", [[1]], 0.5, 64.0)


def test_each_is_for_the_other_and_for_its_successor():
    advice = Advice()
    assert advice.for_new("store") == advice.for_new("calibrator") == advice.for_new("worker") == []
    assert advice.take(TIER) == "calibrator"
    assert advice.for_new("calibrator") == [TIER]
    assert advice.take(PLACEMENT) == "store"
    assert advice.for_new("store") == [PLACEMENT]
    assert advice.for_new("calibrator") == [PLACEMENT, TIER], "what is advised next has a later version"
    assert advice.for_new("worker") == []


def test_a_placement_for_a_card_is_for_the_worker_that_has_it():
    advice = Advice()
    advice.take(dataclasses.replace(TIER, tier="device"))
    placement = dataclasses.replace(PLACEMENT, tier="device")
    assert advice.take(placement) == "worker"
    assert advice.for_new("worker") == [placement]
    assert advice.for_new("store") == []


def test_the_last_placement_counts():
    advice = Advice()
    later = Placement(4, "tiny", "host", [[2]], 0.5, 64.0)
    for placement in (PLACEMENT, later):
        advice.take(placement)
    assert advice.for_new("store") == [later]
