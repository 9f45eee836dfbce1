"""The calibrator as a process: counts what workers routed, and survives what they should not have sent."""

from __future__ import annotations

import time

import numpy as np
import pytest
from control import PATIENCE_S, Control, control, settings_for

from sparkd.ipc import messages
from sparkd.ipc.messages import Ready, Routed
from sparkd.ipc.sockets import Channel


@pytest.fixture
def link(tmp_path):
    with control(tmp_path) as link:
        yield link


@pytest.fixture
def calibrator(link):
    child = link.start("calibration", settings_for(""))
    name = link.name("calibrator", child)
    link.wait(name, Ready)
    return child, name


def _routed(ids: np.ndarray, decode: list[int], experts: int = 8, model: str = "m") -> Routed:
    layers, rows, top_k = ids.shape
    return Routed(1, model, layers, experts, rows, top_k, bytes(decode), ids.astype("<i2").tobytes())


def _status(link: Control, name: bytes, messages_taken: int) -> dict:
    """The status once so many messages were taken."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = link.status(name)
        if status["steps"] + status["refused"] == messages_taken:
            return status
        assert time.monotonic() < deadline, status


def test_routed_ids_are_counted_by_layer_expert_and_kind(link, calibrator):
    _, name = calibrator
    assert link.status(name) == {"model": "", "steps": 0, "refused": 0}
    worker = Channel.push(link.context, link.run_dir.calibrator)
    ids = np.array([[[0, 1], [0, 2], [7, 0]], [[3, 4], [4, 3], [5, 6]]])
    for _ in range(2):
        worker.send(_routed(ids, [1, 0, 1]))
    status = _status(link, name, 2)
    assert status["model"] == "m"
    assert status["decode"]["counts"] == [[4, 2, 0, 0, 0, 0, 0, 2], [0, 0, 0, 2, 2, 2, 2, 0]]
    assert status["prefill"]["counts"] == [[2, 0, 2, 0, 0, 0, 0, 0], [0, 0, 0, 2, 2, 0, 0, 0]]
    assert (status["decode"]["rows"], status["prefill"]["rows"]) == (4, 2)
    assert status["decode"]["busiest_quarter"] == [0.75, 0.5]


def test_what_cannot_be_is_refused_and_counting_goes_on(link, calibrator):
    child, name = calibrator
    worker = Channel.push(link.context, link.run_dir.calibrator)
    good = np.array([[[0, 1]]])
    worker.send(_routed(good, [1]))
    worker.socket.send(b"\xc1")
    worker.send(messages.Stop())
    worker.send(_routed(np.array([[[0, 8]]]), [1]))
    worker.send(_routed(np.array([[[3, 3]]]), [1]))
    worker.send(_routed(good, [1, 1]))
    worker.send(Routed(1, "m", -1, 8, -1, 2, b"", b"1234"))
    worker.send(Routed(1, "m", 1 << 40, 1 << 40, 0, 0, b"", b""))
    worker.send(_routed(good, [1]))
    status = _status(link, name, 9)
    assert (status["steps"], status["refused"]) == (2, 7)
    assert status["decode"]["counts"] == [[2, 2, 0, 0, 0, 0, 0, 0]]
    child.terminate()
    code, said = link.ended(child)
    assert code == 0
    assert "Traceback" not in said
    assert said.count("dropped a message of a worker") == 7


def test_another_model_starts_its_own_counts(link, calibrator):
    _, name = calibrator
    worker = Channel.push(link.context, link.run_dir.calibrator)
    worker.send(_routed(np.array([[[0, 1]]]), [1], model="one"))
    worker.send(_routed(np.array([[[2, 1]]]), [0], model="two"))
    status = _status(link, name, 2)
    assert status["model"] == "two"
    assert status["decode"]["rows"] == 0
    assert status["prefill"]["counts"] == [[0, 1, 1, 0, 0, 0, 0, 0]]
