"""Who computes what a card misses: the formula of sparkd/residency/misses.py, and what is made of it step by step."""

from __future__ import annotations

import math

import pytest

from sparkd.residency.misses import Chooser, Misses, Rates
from sparkd.worker.device_misses import MissPolicy

#: A byte is 0.02 ns sooner done by the CPU, and 40 layers take 0.8 ms of calls: worth it from 40 MB on.
RATES = Rates(link=25e9, host=50e9, call_s=20e-6)


def test_the_host_is_worth_its_calls_from_so_many_missed_bytes_on() -> None:
    assert RATES.worth_bytes(40) == pytest.approx(40e6)
    assert RATES.worth_bytes(20) == pytest.approx(20e6)
    assert math.isinf(Rates(link=25e9, host=25e9, call_s=20e-6).worth_bytes(40))
    assert math.isinf(Rates(link=50e9, host=25e9, call_s=20e-6).worth_bytes(40))


def test_low_residency_is_for_the_host_and_a_single_step_turns_nothing() -> None:
    chooser = Chooser(RATES, 40)
    assert [chooser.saw(80_000_000, True) for _ in range(3)] == [Misses.HOST] * 3
    assert chooser.saw(0, True) is Misses.HOST
    assert [chooser.saw(0, True) for _ in range(200)][-1] is Misses.IN_PLACE
    assert chooser.saw(80_000_000, True) is Misses.IN_PLACE
    assert 80e6 / 64 < chooser.missed_bytes < 5e6


@pytest.mark.parametrize("before", [0, 80_000_000])
def test_between_the_two_it_stays_as_it_was(before: int) -> None:
    chooser = Chooser(RATES, 40)
    choice = chooser.saw(before, True)
    for _ in range(1000):
        assert chooser.saw(40_000_000, True) is choice


def test_what_kernels_cannot_read_in_place_is_for_the_faster_one_of_cpu_and_link() -> None:
    assert Chooser(RATES, 40).saw(1, False) is Misses.HOST
    assert Chooser(Rates(link=50e9, host=25e9, call_s=20e-6), 40).saw(1, False) is Misses.IN_PLACE


def test_the_reason_is_said_with_what_was_measured() -> None:
    policy = MissPolicy("auto", RATES, 40)
    assert policy.saw(80_000_000, True) is policy.misses is Misses.HOST
    assert policy.why() == (
        "a step misses 80.0 MB; the CPU (50.0 GB/s, 20 µs a call) is sooner done than the link (25.0 GB/s) from 40.0 on"
    )
    assert policy.status() == {
        "setting": "auto",
        "policy": "host",
        "why": policy.why(),
        "link_bytes_s": 25e9,
        "host_bytes_s": 50e9,
        "call_s": 20e-6,
        "missed_bytes": 80e6,
        "worth_bytes": pytest.approx(40e6),
    }
    slow = MissPolicy("auto", Rates(link=50e9, host=25e9, call_s=20e-6), 40)
    assert slow.saw(10**9, True) is Misses.IN_PLACE and slow.status()["worth_bytes"] is None
    assert slow.why() == "the CPU computes 25.0 GB/s of experts, the link brings 50.0"


@pytest.mark.parametrize("setting", ["in_place", "copy", "host"])
def test_a_setting_is_kept_whatever_is_missed(setting: str) -> None:
    policy = MissPolicy(setting, None, 40)
    assert policy.saw(10**12, True) is policy.misses is Misses(setting)
    assert policy.why() == "worker.misses says so"


def test_where_nothing_could_be_measured_the_reason_is_that() -> None:
    policy = MissPolicy("auto", None, 40, "the rates of this machine cannot be measured: no")
    assert policy.saw(10**12, True) is Misses.IN_PLACE
    assert policy.status()["why"] == "the rates of this machine cannot be measured: no"
