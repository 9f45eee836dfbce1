"""Routed steps for whoever records: all of them in order while it asks, bounded, and nothing while nobody does."""

from __future__ import annotations

from sparkd.calibration import recorder
from sparkd.calibration.recorder import Recorder
from sparkd.ipc.routing import Routed


def routed(step: int, rows: int = 1) -> Routed:
    return Routed(step, rows, 2, bytes([1] * rows), bytes([step % 256, 0, 9, 0]) * rows)


def numbers(data: bytes) -> list[int]:
    return [int.from_bytes(data[at + 8 : at + 16], "little") for at in range(0, len(data), 21)]


def test_nothing_is_kept_before_somebody_asks_and_all_in_order_while_he_does():
    record = Recorder()
    record.take(routed(1), 0.0)
    begun = record.since(0, 1.0)
    assert (begun.missed, begun.data) == (0, b"")
    for step in range(2, 7):
        record.take(routed(step), 2.0)
    told = record.since(begun.last, 3.0)
    assert (told.missed, numbers(told.data)) == (0, [2, 3, 4, 5, 6])
    assert record.since(told.last, 3.5).data == b""
    record.take(routed(7), 4.0)
    assert numbers(record.since(told.last, 4.0).data) == [7]
    assert numbers(record.since(told.last, 4.0).data) == [7], "an answer that was lost can be asked for again"


def test_who_asks_no_more_costs_nothing_and_begins_anew():
    record = Recorder()
    last = record.since(0, 0.0).last
    record.take(routed(1), 1.0)
    record.take(routed(2), 100.0)
    assert not record._steps and not record._bytes
    late = record.since(last, 101.0)
    assert late.data == b""
    record.take(routed(3), 102.0)
    assert numbers(record.since(late.last, 103.0).data) == [3]


def test_what_comes_faster_than_it_is_asked_for_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(recorder, "MAX_BYTES", 10 * 21)
    monkeypatch.setattr(recorder, "ANSWER_BYTES", 4 * 21)
    record = Recorder()
    told = record.since(0, 0.0)
    for step in range(1, 31):
        record.take(routed(step), 1.0)
    seen, missed = [], 0
    for _ in range(3):
        told = record.since(told.last, 1.0)
        seen += numbers(told.data)
        missed += told.missed
    assert seen == list(range(21, 31)) and missed == 20
    assert record.since(told.last, 1.0).data == b""


def test_a_number_that_was_never_told_begins_anew():
    record = Recorder()
    for after in (5, -1, 1 << 70):
        assert record.since(after, 0.0).data == b""
