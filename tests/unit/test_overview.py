"""What status and log tell of apps and requests: enough to see who waits for what, and nothing of what was said."""

from __future__ import annotations

import json

import pytest

from sparkd.config import LimitSettings
from sparkd.ipc import internal
from sparkd.ipc import messages as m
from sparkd.supervisor import overview
from sparkd.supervisor.admission import Served
from sparkd.supervisor.front_door import FrontDoor
from sparkd.worker.limits import Room

NO_TIME = m.Timings(0.0, 0.0, 0.0)
SECRET = "the secret plan"


@pytest.fixture
def door() -> FrontDoor:
    """Two apps; one request is decoded without credit, one is read, one waits."""
    made = FrontDoor(LimitSettings(context=100, sequences=2, queue=3), Served("tiny", Room(100), 50), pid=7)
    made.worker_ready(0.0)
    for peer, name in ((b"a", "editor"), (b"b", 'b\n"')):
        made.receive(peer, m.Hello([m.VERSION], name), 0.0)
    for peer, at in ((b"a", 1.0), (b"a", 2.0), (b"b", 3.0)):
        made.receive(peer, m.Generate(tag=1, prompt=SECRET, max_tokens=9, credit=0), at)
    made.from_worker(internal.Admitted(1, [31, 32, 33], 42), 4.0)
    made.from_worker(internal.Produced(1, 0, 17, "tell "), 5.0)
    made.from_worker(internal.Produced(1, 1, 18, "né"), 5.5)
    return made


def test_the_status_lists_who_is_connected_and_what_each_request_does(door: FrontDoor) -> None:
    assert door.overview(6.0) == {
        "clients": [
            {"name": "editor", "requests": 2, "waiting_bytes": 8, "silent_s": 4.0},
            {"name": 'b\n"', "requests": 1, "waiting_bytes": 0, "silent_s": 3.0},
        ],
        "open_requests": [
            {
                "request": number, "client": client, "stage": stage, "position": position, "prompt_tokens": prompt,
                "output_tokens": output, "waiting_bytes": waiting, "age_s": age, "resumed": 0,
            }
            for number, client, stage, position, prompt, output, waiting, age in (
                (1, "editor", "decode", None, 3, 2, 8, 5.0),
                (2, "editor", "prefill", None, 0, 0, 0, 4.0),
                (3, 'b\n"', "queued", 0, 0, 0, 0, 3.0),
            )
        ],
    }  # fmt: skip


def test_neither_text_nor_token_ids_are_told(door: FrontDoor) -> None:
    door.receive(b"a", m.Cancel(1), 6.0)
    door.from_worker(internal.Done(1, "cancelled", None, "", 3, 2, 42, NO_TIME), 6.0)
    door.from_worker(internal.Refused(2, "request", f"cannot be rendered: {SECRET}"), 7.0)
    told = json.dumps(door.overview(7.0)) + "".join(overview.line(request, 7.0) for request in door.ended)
    assert len(door.ended) == 2
    assert "secret" not in told and "tell" not in told and "31, 32" not in told


def test_every_request_is_logged_once_however_it_ends(door: FrontDoor) -> None:
    door.receive(b"a", m.Credit(1, 5), 6.0)
    door.from_worker(internal.Done(1, "stop", None, "", 3, 2, 42, NO_TIME, hit_rate=0.5), 7.0)
    door.from_worker(internal.Refused(2, "request", "too long"), 8.0)
    door.receive(b"b", m.Bye(), 9.0)
    door.from_worker(internal.Done(3, "cancelled", None, "", 0, 0, 0, NO_TIME), 9.0)
    assert [overview.line(request, 9.0) for request in door.ended] == [
        "request=1 client=editor reason=stop prompt_tokens=3 output_tokens=2 "
        "queued_s=0.000 prefill_s=4.000 decode_s=2.000 hit_rate=0.500",
        "request=2 client=editor reason=refused code=request prompt_tokens=0 output_tokens=0 "
        "queued_s=0.000 prefill_s=7.000 decode_s=0.000",
        r'request=3 client="b\n\"" reason=left prompt_tokens=0 output_tokens=0 '
        "queued_s=4.000 prefill_s=2.000 decode_s=0.000",
    ]


def test_a_long_queue_is_listed_in_part() -> None:
    limits = LimitSettings(context=100, queue=overview.MOST + 10)
    door = FrontDoor(limits, Served("tiny", Room(100), 50), pid=7)
    door.receive(b"a", m.Hello([m.VERSION], "a"), 0.0)
    for number in range(overview.MOST + 10):
        door.receive(b"a", m.Generate(tag=number, tokens=[1], max_tokens=1), 0.0)
    assert (door.queued, len(door.overview(1.0)["open_requests"])) == (overview.MOST + 10, overview.MOST)


def test_the_outline_of_a_message_holds_nothing_of_its_content() -> None:
    assert overview.outline(m.Generate(tag=3, prompt=SECRET)) == "type=Generate tag=3"
    assert overview.outline(m.Cancel(7)) == "type=Cancel request=7"
    assert overview.outline(m.Hello([1], SECRET)) == "type=Hello"
