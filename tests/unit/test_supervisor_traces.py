"""Questions of apps that record reach the calibrator, and every answer its app."""

from __future__ import annotations

import pytest

from sparkd.errors import BusyError
from sparkd.ipc.internal import TraceAnswer, TraceQuery
from sparkd.ipc.messages import Failed, TraceReply, TraceRequest
from sparkd.supervisor.traces import MAX_WAITING, Traces


def answer(job: int) -> TraceAnswer:
    return TraceAnswer(job, 9, 1, 2, 8, ["", "coding"], b"steps")


def test_each_app_gets_the_answer_to_its_question_under_its_tag():
    traces = Traces()
    first, second = traces.ask(b"a", TraceRequest(5, 3)), traces.ask(b"b", TraceRequest(6))
    assert first == TraceQuery(1, 3)
    assert list(traces.answered(answer(second.job))) == [(b"b", TraceReply(6, 9, 1, 2, 8, ["", "coding"], b"steps"))]
    assert [peer for peer, _ in traces.answered(answer(first.job))] == [b"a"]
    assert not list(traces.answered(answer(first.job)))


def test_an_app_that_left_gets_nothing_and_a_lost_calibrator_is_said():
    traces = Traces()
    left = traces.ask(b"a", TraceRequest(5))
    traces.ask(b"b", TraceRequest(6))
    traces.gone(b"a")
    assert not list(traces.answered(answer(left.job)))
    assert list(traces.fail("unavailable", "gone")) == [(b"b", Failed(6, None, "unavailable", "gone", True))]
    assert not list(traces.fail("unavailable", "gone"))


def test_not_more_than_so_many_wait():
    traces = Traces()
    for tag in range(MAX_WAITING):
        traces.ask(b"a", TraceRequest(tag))
    with pytest.raises(BusyError):
        traces.ask(b"b", TraceRequest(1))
