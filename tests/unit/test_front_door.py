"""The apps' side of the supervisor: who waits, who runs, how it ends, and that no token is ever dropped."""

from __future__ import annotations

import dataclasses

import pytest
from front_door_house import LIMITS, NO_TIME, House
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkd.ipc import internal
from sparkd.ipc import messages as m
from sparkd.supervisor.front_door import LEASE_S, STALL_S
from sparkd.supervisor.journal import Standing
from sparkd.supervisor.probation import MAX_CRASHES, PROOF_TOKENS


@pytest.fixture
def house() -> House:
    return House.of_two()


def test_an_app_that_has_not_said_hello_is_told_to() -> None:
    house = House()
    house.door.receive(b"x", m.Ping(9), 0.0)
    (answer,) = house.heard(b"x")
    assert (answer.code, answer.tag) == ("protocol", 9)


def test_an_app_of_another_version_is_refused_with_both_versions() -> None:
    house = House()
    house.door.receive(b"x", m.Hello([98, 99], "test"), 0.0)
    (answer,) = house.heard(b"x")
    assert answer.code == "version" and "98" in answer.message and str(m.VERSION) in answer.message


def test_the_worker_gets_as_many_requests_as_it_runs_and_the_others_wait_in_order(house: House) -> None:
    numbers = [house.accepted(b"a", tag=i) for i in range(4)]
    assert [run.request for run in house.orders()] == numbers[:2]
    house.done(numbers[1])
    assert [run.request for run in house.orders()] == [numbers[2]]
    house.done(numbers[0])
    assert [run.request for run in house.orders()] == [numbers[3]]


def test_log_probabilities_travel_with_their_tokens(house: House) -> None:
    number = house.accepted(b"a", credit=1, logprobs=1)
    choices = [m.Choice(-0.5 * i, [m.Logprob(i, -0.25)]) for i in range(3)]
    house.worker(*(internal.Produced(number, i, 10 + i, "x", choice) for i, choice in enumerate(choices)))
    house.done(number, 3, "end")
    house.door.receive(b"a", m.Credit(number, 1), 0.0)
    first, second, end = house.heard(b"a")
    assert (first.choices, second.choices) == (choices[:1], choices[1:])
    assert isinstance(end, m.Finished)
    plain = house.accepted(b"a")
    house.produce(plain, 0, 1)
    assert house.heard(b"a")[-1].choices is None


def test_parts_wait_for_credit_and_neighbours_of_one_kind_become_one(house: House) -> None:
    number = house.accepted(b"a", tokens=None, chat=[{}], parts=True, credit=1)
    said = [m.Part("reasoning", "a"), m.Part("text", "b"), m.Part("text", "c"), m.Part("call", "{", 0, "f")]
    house.worker(*(internal.Produced(number, i, 10 + i, "", None, [part], i == 0) for i, part in enumerate(said)))
    house.worker(internal.Done(number, "stop", None, "", 3, 4, 42, NO_TIME, None, [m.Part("call", "}")]))
    house.door.receive(b"a", m.Credit(number, 1), 0.0)
    first, second, end = house.heard(b"a")
    assert first.parts == said[:1]
    assert second.parts == [m.Part("text", "bc"), m.Part("call", "{}", 0, "f")] and second.tokens == [11, 12, 13]
    assert isinstance(end, m.Finished) and (end.output_tokens, end.reasoning_tokens) == (4, 1)


def test_a_resumed_answer_in_parts_keeps_its_tools(house: House) -> None:
    tools = [{"function": {"name": "f"}}]
    number = house.accepted(b"a", tokens=None, chat=[{}], parts=True, tools=tools, call="f")
    house.worker(internal.Admitted(number, [1, 2], 7))
    house.door.worker_lost("killed", house.now)
    house.orders()
    house.door.worker_ready(house.now)
    (run,) = house.orders()
    assert (run.tokens, run.chat, run.tools, run.parts, run.call) == ([1, 2], None, tools, True, "f")


def test_the_end_tells_hit_rate_timings_and_how_often_a_request_was_resumed(house: House) -> None:
    first, second = house.accepted(b"a"), house.accepted(b"a")
    waiting = house.accepted(b"a")
    house.now = 2.0
    house.worker(internal.Done(first, "length", None, "", 3, 0, 42, NO_TIME, 0.75))
    house.now = 3.0
    house.produce(waiting, 0, 1)
    house.door.worker_lost("killed", house.now)
    house.now = 7.0
    house.door.worker_ready(house.now)
    house.worker(internal.Done(second, "length", None, "", 3, 0, 42, NO_TIME, 1.0))
    house.worker(internal.Done(waiting, "length", None, "", 3, 1, 42, NO_TIME, 1.0))
    ends = {msg.request: msg for msg in house.heard(b"a") if isinstance(msg, m.Finished)}
    assert (ends[first].hit_rate, ends[first].resumed) == (0.75, 0)
    assert ends[second].resumed == 1
    assert ends[waiting].timings == m.Timings(queued_s=2.0, prefill_s=1.0, decode_s=4.0)


def test_requests_wait_while_the_model_is_loaded() -> None:
    house = House(ready=False)
    house.hello(b"a")
    number = house.accepted(b"a")
    assert house.orders() == []
    house.door.worker_ready(1.0)
    assert [run.request for run in house.orders()] == [number]


def test_output_is_sent_against_credit_alone_and_gathers_without(house: House) -> None:
    number = house.accepted(b"a", credit=2)
    house.produce(number, 0, 5)
    house.done(number, 5, "end")
    first, second = house.heard(b"a")
    assert (first.tokens, second.tokens) == ([10], [11])
    house.door.receive(b"a", m.Credit(number, 1), 0.0)
    chunk, end = house.heard(b"a")
    assert (chunk.index, chunk.tokens, chunk.text) == (2, [12, 13, 14], "t2 t3 t4 end")
    assert isinstance(end, m.Finished) and (end.reason, end.output_tokens, end.seed) == ("length", 5, 42)
    assert house.door.idle


def test_a_stream_whose_app_stays_slow_is_ended_with_that_reason(house: House) -> None:
    slow, quick = house.accepted(b"a", credit=0), house.accepted(b"b", credit=8)
    house.orders()
    house.produce(slow, 0, 1)
    house.produce(quick, 0, 1)
    for _ in range(10):
        house.now += STALL_S / 9
        house.door.receive(b"a", m.Ping(0), house.now)
        house.door.receive(b"b", m.Ping(0), house.now)
        house.door.tick(house.now)
    failed = house.heard(b"a")[-1]
    assert isinstance(failed, m.Failed) and failed.code == "slow" and failed.request == slow
    assert house.orders() == [internal.Abort(slow)]
    assert not any(isinstance(msg, m.Failed) for msg in house.heard(b"b"))


def test_a_silent_app_loses_its_requests_and_others_do_not(house: House) -> None:
    lost, kept = house.accepted(b"a"), house.accepted(b"b")
    waiting = house.accepted(b"a")
    house.orders()
    house.now += LEASE_S * 0.9
    house.door.receive(b"b", m.Ping(0), house.now)
    house.now += LEASE_S * 0.2
    house.door.tick(house.now)
    assert house.orders() == [internal.Abort(lost)]
    assert (house.door.clients, house.door.queued, house.door.running) == (1, 0, 2)
    house.worker(internal.Done(lost, "cancelled", None, "", 3, 0, 1, NO_TIME))
    assert house.door.running == 1 and waiting != kept
    assert house.heard(b"a") == []


def test_a_cancelled_request_ends_at_once_and_frees_its_seat_when_the_worker_says_so(house: House) -> None:
    first, second, third = (house.accepted(b"a", tag=i) for i in range(3))
    house.orders()
    house.produce(first, 0, 2)
    house.door.receive(b"a", m.Cancel(first), 0.0)
    end = house.heard(b"a")[-1]
    assert isinstance(end, m.Finished) and (end.reason, end.output_tokens) == ("cancelled", 2)
    assert house.orders() == [internal.Abort(first)]
    house.produce(first, 2, 1)
    house.worker(internal.Done(first, "cancelled", None, "", 3, 3, 1, NO_TIME))
    assert house.heard(b"a") == []
    assert [run.request for run in house.orders()] == [third]
    assert house.door.running == 2 and second != third


def test_a_waiting_request_can_be_cancelled(house: House) -> None:
    numbers = [house.accepted(b"a", tag=i) for i in range(3)]
    house.orders()
    house.door.receive(b"a", m.Cancel(numbers[2]), 0.0)
    assert house.heard(b"a")[-1].reason == "cancelled"
    assert house.orders() == [] and house.door.queued == 0


def test_one_app_cannot_cancel_or_feed_the_request_of_another(house: House) -> None:
    number = house.accepted(b"a", credit=0)
    house.produce(number, 0, 1)
    house.orders()
    house.door.receive(b"b", m.Cancel(number), 0.0)
    house.door.receive(b"b", m.Credit(number, 5), 0.0)
    (answer,) = house.heard(b"b")
    assert isinstance(answer, m.Failed) and answer.request == number
    assert house.orders() == [] and house.heard(b"a") == []


def test_a_cancel_that_comes_after_the_end_is_no_mistake(house: House) -> None:
    number = house.accepted(b"a")
    house.done(number)
    assert isinstance(house.heard(b"a")[-1], m.Finished)
    house.door.receive(b"a", m.Cancel(number), 0.0)
    house.door.receive(b"a", m.Credit(number, 1), 0.0)
    assert house.heard(b"a") == []


def test_a_request_is_resumed_on_the_next_worker_with_the_ids_and_seed_it_had(house: House) -> None:
    number = house.accepted(b"a", tokens=None, prompt="some text", stop=["x"], sampling=m.Sampling(1.0))
    house.orders()
    house.worker(internal.Admitted(number, [4, 5], 99))
    house.produce(number, 0, 2)
    house.door.worker_lost("killed", 1.0)
    refused = house.ask(b"b")
    assert isinstance(refused, m.Failed) and refused.retry
    house.door.worker_ready(2.0)
    (run,) = house.orders()
    assert (run.prompt, run.tokens, run.produced, run.sampling.seed) == (None, [4, 5], [10, 11], 99)
    house.produce(number, 2, 1)
    house.done(number, 3)
    chunks = [msg for msg in house.heard(b"a") if isinstance(msg, m.Chunk)]
    assert [t for c in chunks for t in c.tokens] == [10, 11, 12]


def test_a_request_that_costs_worker_after_worker_fails_alone(house: House) -> None:
    number = house.accepted(b"a")
    for _ in range(MAX_CRASHES):
        house.door.worker_lost("killed by signal 11", 0.0)
        house.door.worker_ready(0.0)
    failed = house.heard(b"a")[-1]
    assert failed.request == number and failed.code == "crashed" and "signal 11" in failed.message
    assert isinstance(house.ask(b"b"), m.Accepted)


def test_requests_left_by_a_worker_are_resumed_one_after_another_the_shortest_first_before_new_ones(
    house: House,
) -> None:
    long, short, new = (house.accepted(b"a", tag=i) for i in range(3))
    house.orders()
    house.produce(long, 0, 5)
    house.door.worker_lost("killed", 1.0)
    house.door.worker_ready(2.0)
    assert [run.request for run in house.orders()] == [short]
    house.produce(short, 0, PROOF_TOKENS)
    assert [run.request for run in house.orders()] == [long]
    house.done(short)
    assert house.orders() == []
    house.produce(long, 5, PROOF_TOKENS)
    assert [run.request for run in house.orders()] == [new]


def test_a_request_fails_when_workers_end_with_nothing_else_running_and_its_neighbour_does_not(house: House) -> None:
    guilty, innocent = house.accepted(b"a"), house.accepted(b"b", max_tokens=50)
    for _ in range(MAX_CRASHES):
        house.door.worker_lost("killed by signal 11", 0.0)
        house.door.worker_ready(0.0)
    (failed,) = [msg for msg in house.heard(b"a") if isinstance(msg, m.Failed)]
    assert failed.request == guilty and failed.code == "crashed"
    assert [run.request for run in house.orders()][-1] == innocent
    house.done(innocent)
    assert isinstance(house.heard(b"b")[-1], m.Finished)


def test_a_silent_worker_gets_nothing_new_and_new_requests_may_be_retried(house: House) -> None:
    running = house.accepted(b"a")
    house.orders()
    house.door.worker_silent("the worker shows no life")
    answer = house.ask(b"b")
    assert isinstance(answer, m.Failed) and answer.retry and "no life" in answer.message
    house.produce(running, 0, 1)
    house.door.worker_back(1.0)
    assert isinstance(house.ask(b"b"), m.Accepted)
    house.door.worker_lost("killed", 2.0)
    house.door.worker_back(3.0)
    assert isinstance(house.ask(b"b"), m.Failed)


def test_draining_lets_what_runs_finish_and_refuses_the_rest(house: House) -> None:
    first, second, waiting = (house.accepted(b"a", tag=i) for i in range(3))
    house.orders()
    house.door.drain("the daemon is being stopped", 1.0)
    (ended,) = [msg for msg in house.heard(b"a") if isinstance(msg, m.Failed)]
    assert ended.request == waiting and ended.retry
    refused = house.ask(b"b")
    assert isinstance(refused, m.Failed) and refused.retry and "being stopped" in refused.message
    house.door.worker_lost("killed", 1.0)
    house.door.worker_ready(2.0)
    assert isinstance(house.ask(b"b"), m.Failed)
    house.done(first)
    assert not house.door.idle
    house.done(second)
    assert house.door.idle


def test_other_limits_hold_from_now_on(house: House) -> None:
    for tag in range(2):
        house.accepted(b"a", tag=tag)
    house.door.set_limits(dataclasses.replace(LIMITS, queue=0))
    assert isinstance(house.ask(b"b"), m.Failed)
    house.door.set_limits(LIMITS)
    assert isinstance(house.ask(b"b"), m.Accepted)


def test_closing_ends_every_request_with_the_reason(house: House) -> None:
    numbers = {house.accepted(b"a", tag=i) for i in range(4)}
    house.door.receive(b"b", m.Tokenize(8, "text"), 0.0)
    house.door.close("the daemon stops", 1.0)
    ends = [msg for msg in house.heard(b"a") if isinstance(msg, m.Failed)]
    assert {e.request for e in ends} == numbers and all(e.retry and "stops" in e.message for e in ends)
    assert house.heard(b"b")[-1].tag == 8
    assert isinstance(house.ask(b"b"), m.Failed)


def test_a_text_that_ends_worker_after_worker_fails_alone(house: House) -> None:
    running = [house.accepted(b"b"), house.accepted(b"b")]
    house.door.receive(b"a", m.Tokenize(5, "deadly"), 0.0)
    house.door.receive(b"b", m.Tokenize(6, "harmless"), 0.0)
    assert [type(order) for order in house.orders()] == [internal.Run, internal.Run, internal.Encode]
    for crash in range(MAX_CRASHES):
        assert house.heard(b"a") == []
        house.door.worker_lost(f"killed for the {crash + 1}. time", 0.0)
        house.door.worker_ready(0.0)
        if crash + 1 < MAX_CRASHES:
            (order,) = house.orders()  # by itself from now on
            assert order.text == "deadly"
    (failed,) = house.heard(b"a")
    assert (failed.tag, failed.code, failed.retry) == (5, "crashed", False)
    assert "3 workers ended while they tokenized this text; last: killed for the 3. time" in failed.message
    text, resumed = house.orders()
    assert text.text == "harmless" and resumed.request == running[0]
    assert all(isinstance(msg, m.Accepted | m.Progress) for msg in house.heard(b"b"))


def test_a_text_is_not_blamed_for_what_a_request_does_and_waits_while_that_is_tried(house: House) -> None:
    deadly = house.accepted(b"a")
    house.door.receive(b"b", m.Tokenize(6, "harmless"), 0.0)
    lives = 0
    while house.door.running or house.door.queued:
        orders = house.orders()
        if any(isinstance(order, internal.Encode) for order in orders) and len(orders) == 1:
            house.worker(internal.Encoded(orders[0].job, [1, 2]))
            continue
        lives += 1
        house.door.worker_lost("killed", 0.0)
        house.door.worker_ready(0.0)
    assert lives == MAX_CRASHES
    assert [msg.request for msg in house.heard(b"a") if isinstance(msg, m.Failed)] == [deadly]
    assert [msg for msg in house.heard(b"b") if isinstance(msg, m.Failed)] == []


def test_what_cannot_be_done_as_asked_counts_as_refused_and_what_went_wrong_here_as_failed(house: House) -> None:
    for code in ("request", "unsupported", "worker"):
        number = house.accepted(b"a", credit=8)
        house.orders()
        house.worker(internal.Refused(number, code, "why"))
        assert house.heard(b"a")[-1].code == code
    assert (house.door.totals.refused, house.door.totals.failed) == (2, 1)


def test_text_is_tokenized_by_the_worker_for_whoever_asked(house: House) -> None:
    house.door.receive(b"a", m.Tokenize(5, "one", True), 0.0)
    house.door.receive(b"b", m.Tokenize(6, "two"), 0.0)
    (one,) = house.orders()
    house.worker(internal.Encoded(one.job, [1, 2]))
    (two,) = house.orders()
    assert (one.text, one.special, two.text, two.special) == ("one", True, "two", False)
    house.worker(internal.Encoded(one.job, [9]), internal.Encoded(two.job, None, "too long"))
    assert house.heard(b"a") == [m.Tokens(5, [1, 2])]
    (failed,) = house.heard(b"b")
    assert (failed.tag, failed.message) == (6, "too long")


class Traffic(RuleBasedStateMachine):
    """Apps, a worker and time in any order; a ledger of what every app was granted and got."""

    PEERS = (b"a", b"b", b"c")

    def __init__(self) -> None:
        super().__init__()
        self.house = House()
        self.owner: dict[int, bytes] = {}
        self.credit: dict[int, int] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.at_worker: dict[int, int] = {}
        for peer in self.PEERS:
            self.house.hello(peer)

    def settle(self) -> None:
        """Deliver everything and check it against the ledger."""
        for peer in self.PEERS:
            for msg in self.house.heard(peer):
                if isinstance(msg, m.Accepted):
                    assert msg.request not in self.owner
                    self.owner[msg.request] = peer
                    self.got[msg.request] = []
                elif isinstance(msg, m.Chunk):
                    assert self.owner[msg.request] == peer and msg.request not in self.ended
                    self.credit[msg.request] -= 1
                    assert self.credit[msg.request] >= 0
                    assert msg.index == len(self.got[msg.request])
                    self.got[msg.request] += msg.tokens
                elif isinstance(msg, m.Finished):
                    assert msg.request not in self.ended
                    assert msg.output_tokens == len(self.got[msg.request])
                    self.ended.add(msg.request)
                elif isinstance(msg, m.Failed) and msg.request is not None:
                    assert msg.request not in self.ended
                    self.ended.add(msg.request)
        for order in self.house.orders():
            if isinstance(order, internal.Run):
                assert order.request not in self.at_worker
                self.at_worker[order.request] = len(order.produced)
            elif isinstance(order, internal.Abort):
                made = self.at_worker.pop(order.request)
                self.house.worker(internal.Done(order.request, "cancelled", None, "", 3, made, 1, NO_TIME))
                self.settle()

    @rule(peer=st.sampled_from(PEERS), credit=st.integers(0, 3))
    def generate(self, peer: bytes, credit: int) -> None:
        answer = self.house.ask(peer, credit=credit)
        if isinstance(answer, m.Accepted):
            self.owner[answer.request] = peer
            self.credit[answer.request] = credit
            self.got[answer.request] = []
        self.settle()

    @precondition(lambda self: self.at_worker)
    @rule(data=st.data(), count=st.integers(1, 4), last=st.booleans())
    def produce(self, data: st.DataObject, count: int, last: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.at_worker)))
        self.house.produce(number, self.at_worker[number], count)
        self.at_worker[number] += count
        if last:
            self.house.done(number, self.at_worker.pop(number))
        self.settle()

    @precondition(lambda self: self.owner)
    @rule(data=st.data(), chunks=st.integers(1, 3))
    def grant(self, data: st.DataObject, chunks: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.owner)))
        self.credit[number] += chunks
        self.house.door.receive(self.owner[number], m.Credit(number, chunks), self.house.now)
        self.settle()

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.owner)))
        self.house.door.receive(self.owner[number], m.Cancel(number), self.house.now)
        self.settle()
        assert number in self.ended

    @rule()
    def lose_worker(self) -> None:
        self.at_worker.clear()
        self.house.door.worker_lost("killed", self.house.now)
        self.settle()
        self.house.door.worker_ready(self.house.now)
        self.settle()

    @rule(seconds=st.floats(0, 15))
    def wait(self, seconds: float) -> None:
        self.house.now += seconds
        for peer in self.PEERS:
            self.house.door.receive(peer, m.Ping(0), self.house.now)
        self.house.door.tick(self.house.now)
        self.settle()

    @invariant()
    def no_more_run_than_there_are_seats(self) -> None:
        assert len(self.at_worker) == self.house.door.running <= LIMITS.sequences
        on_trial = any(standing is not Standing.CLEAR for standing in self.house.standings())
        assert self.house.door.queued == 0 or self.house.door.running == LIMITS.sequences or on_trial

    def teardown(self) -> None:
        """Whatever happened, every request can still come to its end with all its tokens."""
        while self.at_worker:
            for number, made in list(self.at_worker.items()):
                self.at_worker.pop(number)
                self.house.done(number, made)
            self.settle()
        for number in set(self.owner) - self.ended:
            self.credit[number] += 1
            self.house.door.receive(self.owner[number], m.Credit(number, 1), self.house.now)
        self.settle()
        assert self.ended == set(self.owner) and self.house.door.idle


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
