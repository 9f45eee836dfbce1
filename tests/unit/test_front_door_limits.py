"""The apps' side of the supervisor: turns, deadlines, bounds, and what is refused at once."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from front_door_house import LIMITS, House

from sparkd.ipc import internal
from sparkd.ipc import messages as m
from sparkd.supervisor.admission import Served
from sparkd.supervisor.front_door import HELD_BYTES, FrontDoor
from sparkd.supervisor.questions import MAX_CHARACTERS, MAX_QUESTIONS
from sparkd.supervisor.requests import PROGRESS_S
from sparkd.worker.limits import Room


@pytest.fixture
def house() -> House:
    return House.of_two()


def test_a_full_queue_refuses_with_an_error_that_may_be_retried(house: House) -> None:
    for tag in range(2 + 2):
        house.accepted(b"a", tag=tag)
    house.accepted(b"b")
    for peer in (b"a", b"b"):
        answer = house.ask(peer)
        assert isinstance(answer, m.Failed)
        assert answer.retry and answer.code == "busy" and "limits.queue is 3" in answer.message


def test_an_app_that_fills_the_queue_leaves_a_place_for_each_other(house: House) -> None:
    while isinstance(answer := house.ask(b"a"), m.Accepted):
        pass
    assert "1 of it kept for other apps" in answer.message and answer.retry
    house.accepted(b"b")
    assert isinstance(house.ask(b"b"), m.Failed)
    house.hello(b"c")
    assert isinstance(house.ask(b"c"), m.Failed)
    assert house.door.queued == LIMITS.queue


def test_apps_take_turns_and_are_told_how_many_are_before_them(house: House) -> None:
    runs = [house.accepted(b"a", tag=i) for i in range(2)]
    house.orders()
    waiting = [house.accepted(b"a", tag=i) for i in range(2, 4)]
    late = house.ask(b"b")
    assert isinstance(late, m.Accepted) and late.position == 1
    house.now += PROGRESS_S
    house.door.tick(house.now)
    assert house.heard(b"a") == [m.Progress(waiting[1], "queued", 0, 0, 2)]
    house.done(runs[0])
    house.done(runs[1])
    assert [run.request for run in house.orders()] == [waiting[0], late.request]
    house.heard(b"a")
    house.now += PROGRESS_S
    house.door.tick(house.now)
    assert house.heard(b"a") == [m.Progress(waiting[1], "queued", 0, 0, 0)] and house.heard(b"b") == []


def test_progress_is_told_at_most_every_half_second_however_short_the_steps_are(house: House) -> None:
    number = house.accepted(b"a", tokens=[1] * 80)
    for done in range(1, 80):
        house.now += PROGRESS_S / 10
        house.worker(internal.Prefilled(number, done, 80))
        house.door.tick(house.now)
    heard = house.heard(b"a")
    assert all(isinstance(msg, m.Progress) and msg.stage == "prefill" for msg in heard)
    told = [msg.done for msg in heard]
    assert told[0] == 1
    assert all(later - earlier >= 10 for earlier, later in pairwise(told)) and 7 <= len(told) <= 9


@pytest.mark.parametrize("where", ["queue", "prompt", "output"])
@pytest.mark.parametrize("own", [True, False])
def test_a_deadline_holds_while_queued_in_prefill_and_in_decode(where: str, own: bool) -> None:
    house = House(dataclasses.replace(LIMITS, timeout_s=900.0 if own else 5.0))
    house.hello(b"a")
    busy = [house.accepted(b"a", tag=i, timeout_s=800.0 if own else None) for i in range(2 if where == "queue" else 0)]
    late = house.accepted(b"a", timeout_s=5.0 if own else None)
    if where == "output":
        house.produce(late, 0, 2)
    house.orders()
    house.heard(b"a")
    house.door.tick(4.9)
    assert not any(isinstance(msg, m.Failed) for msg in house.heard(b"a"))
    house.door.tick(5.1)
    failed = next(msg for msg in house.heard(b"a") if isinstance(msg, m.Failed) and msg.request == late)
    assert failed.code == "timeout" and not failed.retry
    assert ("its timeout_s = 5 s" if own else "limits.timeout_s = 5 s") in failed.message
    said = {"queue": "queued", "prompt": "prompt was being read", "output": "2 output tokens"}
    assert said[where] in failed.message
    aborted = [order.request for order in house.orders()]
    if own:
        assert aborted == ([] if where == "queue" else [late])
        assert house.door.running == (2 if where == "queue" else 1) and len(busy) == (2 if where == "queue" else 0)


def test_prompts_that_wait_are_bounded_in_bytes_for_one_app_and_for_all(house: House) -> None:
    house = House(dataclasses.replace(LIMITS, queue=1000))
    text = "x" * (HELD_BYTES // 10)
    refusals = []
    for peer in (b"a", b"b", b"c"):
        house.hello(peer)
        accepted = 0
        while isinstance(answer := house.ask(peer, tokens=None, prompt=text), m.Accepted):
            accepted += 1
        refusals.append((accepted, answer))
    assert [accepted for accepted, _ in refusals] == [4, 4, 1]
    for _, refusal in refusals:
        assert refusal.retry and refusal.code == "busy" and str(HELD_BYTES) in refusal.message
    huge = house.ask(b"c", tokens=None, prompt="x" * (HELD_BYTES // 2))
    assert isinstance(huge, m.Failed) and not huge.retry and str(HELD_BYTES // 2) in huge.message
    chat = [{"role": "user", "content": [text]}]
    assert isinstance(house.ask(b"c", tokens=None, chat=chat), m.Failed)


def test_what_an_app_sent_is_forgotten_once_the_ids_of_its_prompt_are_known(house: House) -> None:
    text = "x" * (HELD_BYTES // 3)
    number = house.accepted(b"a", tokens=None, prompt=text)
    assert isinstance(house.ask(b"a", tokens=None, prompt=text), m.Failed)
    house.worker(internal.Admitted(number, [1] * 90, 7))
    house.accepted(b"a", tokens=None, prompt=text)


@pytest.mark.parametrize("kind", ["prompt", "tokens"])
@pytest.mark.parametrize("times", [1, 5])
def test_a_text_that_cannot_fit_however_it_is_cut_is_refused_at_once_with_both_numbers(kind: str, times: int) -> None:
    house = House()
    house.door = FrontDoor(LIMITS, Served("tiny", Room(100), 50, longest_token=8), pid=7)
    house.hello(b"a")
    fits = {"prompt": "é" * 4 * 90, "tokens": [1] * 90}
    over = {"prompt": "é" * (4 * 100 * times - 39), "tokens": [1] * (100 * times - 9)}
    given = {"prompt": None, "tokens": None}
    assert isinstance(house.ask(b"a", **given | {kind: fits[kind]}), m.Accepted)
    refused = house.ask(b"a", **given | {kind: over[kind]})
    assert isinstance(refused, m.Failed) and not refused.retry
    assert f"{100 * times - 9} " in refused.message and "100" in refused.message


@pytest.mark.parametrize(
    ("room", "advice"),
    [
        (Room(100, 100), "a request may have 100 (the model has no more); shorten the prompt"),
        (
            Room(100, 900),
            "100 (limits.context; the model has 900); shorten the prompt or raise limits.context",
        ),
    ],
)
@pytest.mark.parametrize("fields", [{"tokens": [1] * 150}, {"tokens": None, "prompt": "x" * 150 * 8}])
def test_advice_on_a_prompt_that_is_too_long_is_about_the_limit_that_holds(
    room: Room, advice: str, fields: dict[str, Any]
) -> None:
    house = House()
    house.door = FrontDoor(LIMITS, Served("tiny", room, 50, longest_token=8), pid=7)
    house.hello(b"a")
    refused = house.ask(b"a", **fields, max_tokens=1 << 30, shorten=True)
    assert isinstance(refused, m.Failed) and "150 tokens and needs room for one more" in refused.message
    assert refused.message.endswith(advice) and "max_tokens" not in refused.message
    refused = house.ask(b"a", **fields, max_tokens=10)
    assert isinstance(refused, m.Failed) and "max_tokens is 10, 160 positions together" in refused.message
    assert ("raise limits.context" in refused.message) == (room.holds == "limits.context")


@pytest.mark.parametrize(("prompt", "fits"), [(90, True), (91, False), (100, False), (500, False)])
def test_a_prompt_beyond_the_limit_is_refused_with_both_numbers(house: House, prompt: int, fits: bool) -> None:
    answer = house.ask(b"a", tokens=[1] * prompt, max_tokens=10)
    if fits:
        assert isinstance(answer, m.Accepted)
    else:
        assert isinstance(answer, m.Failed)
        assert str(prompt + 10) in answer.message and "100" in answer.message and not answer.retry


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "other"}, "'tiny'"),
        ({"prompt": "x"}, "prompt and tokens"),
        ({"tokens": None}, "none of them"),
        ({"tokens": []}, "no tokens"),
        ({"tokens": None, "prompt": "x", "max_tokens": 100}, "101 positions"),
        ({"tokens": [1, 50]}, "token 50"),
        ({"tokens": [-1]}, "token -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tools": [{}]}, "tools belong to chat"),
        ({"options": {"enable_thinking": True}}, "options belong to chat"),
        ({"parts": True}, "parts belong to the answer to a chat"),
        ({"call": ""}, "call is given without parts"),
        ({"tokens": None, "chat": [{}], "parts": True, "call": ""}, "call asks for a tool"),
        (
            {"tokens": None, "chat": [{}], "parts": True, "tools": [{}], "call": "f"},
            "the tool 'f', which",
        ),
        ({"credit": -1}, "credit is -1"),
        ({"timeout_s": 0.0}, "timeout_s is 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": 1001.0}, "timeout_s is 1001; give more than 0 and at most limits.timeout_s = 1000"),
        ({"traffic_tag": "Two Words"}, "traffic_tag is 'Two Words'; up to 24 characters of a to z"),
        ({"traffic_tag": "x" * 25}, "traffic_tag is"),
        ({"logprobs": 21}, "logprobs is 21; give a whole number from 0 to 20"),
        ({"stop": ["x"] * 33}, "stop: 33 strings"),
        ({"stop": [""]}, "stop: a string has 0 characters"),
        ({"sampling": m.Sampling(temperature=-1.0)}, "temperature is -1.0; give a number from 0 to 100"),
        ({"sampling": m.Sampling(min_p=2.0)}, "min_p is 2.0; give a number from 0 to 1"),
        ({"sampling": m.Sampling(logit_bias=[m.Bias(50, 1.0)])}, "token 50 is not in the vocabulary"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(house: House, fields: dict[str, Any], named: str) -> None:
    answer = house.ask(b"a", **fields)
    assert isinstance(answer, m.Failed) and named in answer.message and answer.tag == 1
    assert house.door.idle


def test_a_late_request_is_ended_with_the_limit_it_exceeded() -> None:
    house = House(dataclasses.replace(LIMITS, timeout_s=5.0))
    house.hello(b"a")
    number = house.accepted(b"a")
    house.door.tick(5.5)
    failed = house.heard(b"a")[-1]
    assert (failed.code, failed.request) == ("timeout", number) and "limits.timeout_s = 5" in failed.message


def test_apps_take_turns_in_having_texts_tokenized_and_an_app_that_left_holds_up_nobody(house: House) -> None:
    for tag in range(3):
        house.door.receive(b"a", m.Tokenize(tag, f"a{tag}"), 0.0)
    house.door.receive(b"b", m.Tokenize(0, "b0"), 0.0)
    served = []
    for _ in range(3):
        (order,) = house.orders()
        served.append(order.text)
        house.worker(internal.Encoded(order.job, [1]))
    assert served == ["a0", "a1", "b0"]
    house.door.gone(b"a", 0.0)
    house.door.receive(b"b", m.Tokenize(7, "b7"), 0.0)
    (order,) = house.orders()
    house.worker(internal.Encoded(order.job, [1]))
    (order,) = house.orders()
    assert order.text == "b7"
    house.heard(b"b")
    house.door.worker_lost("killed", 0.0)
    assert house.heard(b"b") == []
    house.door.worker_ready(0.0)
    assert house.orders() == [order]
    house.door.close("no worker comes any more", 0.0)
    (failed,) = house.heard(b"b")
    assert (failed.tag, failed.retry) == (7, True)


def test_texts_that_wait_to_be_tokenized_are_bounded_in_number_and_length(house: House) -> None:
    long = "x" * (MAX_CHARACTERS // 4)
    answers = []
    for tag in range(8):
        house.door.receive(b"a", m.Tokenize(tag, long), 0.0)
        answers += house.heard(b"a")
    assert [answer.tag for answer in answers] == [5, 6, 7]
    assert all(answer.retry and str(MAX_CHARACTERS) in answer.message for answer in answers)
    house = House.of_two()
    for tag in range(MAX_QUESTIONS + 2):
        house.door.receive(b"a", m.Tokenize(tag, "x"), 0.0)
    (refused,) = house.heard(b"a")
    assert refused.tag == MAX_QUESTIONS + 1 and refused.retry and str(MAX_QUESTIONS) in refused.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "either text or chat"),
        ({"text": "x", "chat": [{}]}, "either text or chat"),
        ({"text": "x", "tools": [{}]}, "tools belong to chat"),
        ({"chat": [{}], "special": True}, "special belongs to text"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(house: House, fields: dict[str, Any], named: str) -> None:
    house.hello(b"a")
    house.door.receive(b"a", m.Tokenize(5, **fields), 0.0)
    (answer,) = house.heard(b"a")
    assert (answer.tag, answer.code in ("request", "unsupported")) == (5, True) and named in answer.message


def test_output_that_may_be_shortened_never_keeps_a_prompt_out(house: House) -> None:
    house.hello(b"a")
    assert isinstance(house.ask(b"a", tokens=[1] * 90, max_tokens=500, shorten=True), m.Accepted)
    assert [run.max_tokens for run in house.orders()] == [10]
    refused = house.ask(b"a", tokens=[1] * 100, max_tokens=500, shorten=True)
    assert isinstance(refused, m.Failed) and "the prompt has 100 tokens" in refused.message
