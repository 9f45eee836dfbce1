"""The worker's engine on an executor that invents logits: what comes out, in which order, and what it costs others."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkd.errors import RequestError
from sparkd.executors.base import Batch, RecordRefused, RowKind, StepResult
from sparkd.graph.program import ConvState, KvCache, Program
from sparkd.graph.state import StateLayout
from sparkd.ipc.directory import StepCounter
from sparkd.ipc.internal import Admitted, Done, Prefilled, Produced, Refused
from sparkd.ipc.messages import Part, Sampling
from sparkd.text.answer import AnswerParser, joined
from sparkd.text.markup import QWEN
from sparkd.text.stop import StopMatcher
from sparkd.worker.engine import Engine, Routing
from sparkd.worker.scheduler import Scheduler
from sparkd.worker.sequences import Clock, Sequence
from sparkd.worker.state import PoolSize, StatePool

VOCAB = 32
CONTEXT = 200
MAX_ROWS = 16
END = 31
PROGRAM = Program(
    "test", 8, VOCAB, CONTEXT, (), (KvCache(0, 1, 4, 0), KvCache(1, 1, 4, 70)), (ConvState(2, 3, 4),), (), (), ()
)


class FakeExecutor:
    """The best next token is (sum of all ids so far + position) mod VOCAB; remembers ids per state record."""

    def __init__(self, poison: int | None = None) -> None:
        #: Sequences whose first id this is need a record that cannot be had, from the step of this number on.
        self.refused: tuple[int, int] | None = None
        self.waited: list[int] = []
        self.waited_s = 0.0
        self.read: dict[int, list[int]] = {}
        self.batches: list[Batch] = []
        self.poison = poison
        #: Whether only the best tokens are told where no more is wanted; in how many steps that was so.
        self.finds_best = False
        self.found = 0

    def step(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        row = 0
        logits = []
        for segment in batch.segments:
            if segment.start == 0:
                self.read[segment.state] = []
            ids = self.read[segment.state]
            assert len(ids) == segment.start
            for token in batch.tokens[row : row + segment.length]:
                ids.append(int(token))
                if row in batch.logits_rows:
                    logits.append(self.logits(ids))
                row += 1
        if self.refused is not None and len(self.batches) >= self.refused[1]:
            self.refuse(batch, self.refused[0])
        experts = np.zeros((1, len(batch.tokens), 2), np.int16)
        waited = np.resize(np.array(self.waited or [0], np.int32), len(batch.tokens))
        if self.finds_best and batch.best_of:
            self.found += 1
            rows = [row[: batch.best_of] for row in np.array(logits, np.float32).reshape(-1, VOCAB)]
            best = [
                int(row.argmax()) if np.isfinite(row).all() else -1 - int(np.isfinite(row).argmin()) for row in rows
            ]
            none = np.empty((0, VOCAB), np.float32)
            return StepResult(none, experts, waited, self.waited_s, best=np.array(best, np.int32))
        return StepResult(np.array(logits, np.float32).reshape(-1, VOCAB), experts, waited, self.waited_s)

    def refuse(self, batch: Batch, first: int) -> None:
        row, rows = 0, []
        for segment in batch.segments:
            if self.read[segment.state][0] == first:
                rows.append(row + segment.length - 1)
            row += segment.length
        if rows:
            raise RecordRefused("expert 3 of expert layer 0 cannot be had: it burns", 0, 3, rows)

    def logits(self, ids: list[int]) -> np.ndarray:
        row = np.zeros(VOCAB, np.float32)
        row[next_token(ids)] = 1.0
        if self.poison is not None and ids[0] == self.poison:
            row[3] = np.nan
        return row


def next_token(ids: list[int]) -> int:
    return (sum(ids) + len(ids)) % VOCAB


def continuation(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class Letters:
    """A detokenizer: token n is the n-th letter and a space; what is odd waits for the next token."""

    def push(self, index: int) -> str:
        return f"{chr(97 + index % 26)} "

    def finish(self) -> str:
        return ""


def text_of(tokens: list[int]) -> str:
    return "".join(Letters().push(token) for token in tokens)


class Bench:
    def __init__(
        self,
        limit: int = 2,
        poison: int | None = None,
        vocab: int = VOCAB,
        room: int | None = None,
        max_step_s: float = 1e9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = StateLayout.of(PROGRAM, 4)
        self.pool = StatePool(layout, PoolSize.worst_case(layout, limit, room or CONTEXT, MAX_ROWS), MAX_ROWS)
        self.executor = FakeExecutor(poison)
        self.routed: list[Routing] = []
        self.counters = np.zeros(8, np.uint64)
        self.engine = Engine(
            self.executor,
            self.pool,
            Scheduler(MAX_ROWS, max_step_s),
            {END},
            limit,
            vocab=vocab,
            steps=StepCounter(self.counters, 0),
            routed=self.routed.append,
            clock=clock,
        )

    def submit(self, request: int, prompt: list[int], produced: list[int] | None = None, **fields: Any) -> None:
        given = {"max_tokens": 10, "ignore_eos": True, "stop": [], "sampling": Sampling(seed=5)} | fields
        stops = StopMatcher(given["stop"], given.get("ends", ()))
        for token in produced or []:
            stops.push(Letters().push(token))
        self.engine.submit(
            Sequence(
                request,
                array("i", [*prompt, *(produced or [])]),
                len(prompt),
                given["max_tokens"],
                given["sampling"],
                given.get("logprobs"),
                given["ignore_eos"],
                Letters(),  # type: ignore[arg-type]
                stops,
                Clock(),
                given.get("answer"),
            )
        )

    def run(self) -> list[Any]:
        events = []
        while self.engine.busy:
            events += self.engine.step()
        assert self.pool.used_bytes() == 0
        return events


def tokens(events: list[Any], request: int) -> list[int]:
    return [e.token for e in events if isinstance(e, Produced) and e.request == request]


def done(events: list[Any], request: int) -> Done:
    (end,) = (e for e in events if isinstance(e, Done) and e.request == request)
    return end


def test_an_answer_in_parts_has_the_tokens_and_the_words_of_the_text() -> None:
    bench = Bench()
    bench.submit(1, [1, 2, 3])
    bench.submit(2, [1, 2, 3], answer=AnswerParser(QWEN, [], thinking=False))
    events = bench.run()
    assert tokens(events, 1) == tokens(events, 2)
    text = "".join(e.text for e in events if isinstance(e, Produced | Done) and e.request == 1)
    assert not any(e.text for e in events if isinstance(e, Produced | Done) and e.request == 2)
    parts = joined([part for e in events if isinstance(e, Produced | Done) for part in e.parts])
    assert parts == [Part("text", text)]


def test_tokens_of_an_open_thought_are_told_from_others() -> None:
    bench = Bench()
    bench.submit(1, [1, 2, 3], answer=AnswerParser(QWEN, [], thinking=True))
    bench.submit(2, [1, 2, 3], answer=AnswerParser(QWEN, [], thinking=False))
    made = [event for event in bench.run() if isinstance(event, Produced)]
    assert all(event.thought == (event.request == 1) for event in made) and made


def test_a_request_goes_from_admission_over_its_chunks_to_its_end() -> None:
    bench = Bench()
    prompt = list(range(20)) * 2
    bench.submit(1, prompt, max_tokens=3)
    events = bench.run()
    assert events[0] == Admitted(1, prompt, 5)
    assert [(e.done, e.total) for e in events if isinstance(e, Prefilled)] == [(16, 40), (32, 40), (40, 40)]
    assert tokens(events, 1) == continuation(prompt, 3)
    assert [e.index for e in events if isinstance(e, Produced)] == [0, 1, 2]
    end = done(events, 1)
    assert (end.reason, end.prompt_tokens, end.output_tokens, end.seed) == ("length", 40, 3, 5)


def test_everybody_gets_the_tokens_they_get_alone() -> None:
    bench = Bench(limit=3)
    prompts = {n: [n] * (7 * n + 1) for n in range(6)}
    for request, prompt in prompts.items():
        bench.submit(request, prompt, max_tokens=5 + request)
    events = bench.run()
    for request, prompt in prompts.items():
        assert tokens(events, request) == continuation(prompt, 5 + request)
    most = max(sum(s.kind is RowKind.DECODE for s in b.segments) for b in bench.executor.batches)
    assert most == 3 and all(len(b.tokens) <= MAX_ROWS for b in bench.executor.batches)


def test_requests_are_admitted_in_the_order_they_came() -> None:
    bench = Bench(limit=1)
    for request in range(4):
        bench.submit(request, [request + 1], max_tokens=2)
    assert [e.request for e in bench.run() if isinstance(e, Admitted)] == [0, 1, 2, 3]


def test_an_end_token_ends_the_answer_and_is_no_part_of_it() -> None:
    prompt = next([a, b] for a in range(VOCAB) for b in range(VOCAB) if END in continuation([a, b], 8)[2:])
    where = continuation(prompt, 8).index(END)
    bench = Bench()
    bench.submit(1, prompt, max_tokens=8, ignore_eos=False)
    bench.submit(2, prompt, max_tokens=8)
    events = bench.run()
    assert tokens(events, 1) == continuation(prompt, where)
    assert (done(events, 1).reason, done(events, 1).stop) == ("stop", None)
    assert tokens(events, 2) == continuation(prompt, 8)


def test_a_stop_string_ends_the_answer_before_it_and_never_leaks() -> None:
    prompt = [3, 4]
    text = text_of(continuation(prompt, 9))
    stop = text[5:10]
    bench = Bench()
    bench.submit(1, prompt, max_tokens=9, stop=[stop])
    events = bench.run()
    end = done(events, 1)
    shown = "".join(e.text for e in events if isinstance(e, Produced)) + end.text
    assert shown == text[: text.index(stop)] and (end.reason, end.stop) == ("stop", stop)


def test_text_that_was_held_back_comes_with_the_end() -> None:
    prompt = [3, 4]
    text = text_of(continuation(prompt, 4))
    bench = Bench()
    bench.submit(1, prompt, max_tokens=4, stop=[text[-2:] + "never"])
    events = bench.run()
    assert done(events, 1).text == text[-2:]
    assert "".join(e.text for e in events if isinstance(e, Produced)) == text[:-2]


def test_numbers_that_are_not_finite_fail_their_request_alone() -> None:
    bench = Bench(poison=9)
    bench.submit(1, [9, 1], max_tokens=5)
    bench.submit(2, [8, 1], max_tokens=5)
    events = bench.run()
    (refused,) = (e for e in events if isinstance(e, Refused))
    assert refused.request == 1 and refused.code == RequestError.code
    assert tokens(events, 1) == [] and tokens(events, 2) == continuation([8, 1], 5)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_aborted_request_stops_between_two_steps_and_gives_everything_back(steps: int) -> None:
    bench = Bench(limit=1)
    bench.submit(1, [1] * 40, max_tokens=100)
    bench.submit(2, [2], max_tokens=3)
    for _ in range(steps):
        bench.engine.step()
    (end,) = bench.engine.abort(1)
    assert isinstance(end, Done) and end.reason == "cancelled"
    rows = sum(len(b.tokens) for b in bench.executor.batches)
    assert tokens(bench.run(), 2) == continuation([2], 3)
    assert sum(len(b.tokens) for b in bench.executor.batches) == rows + 3
    assert bench.engine.abort(1) == []


@pytest.mark.parametrize("cut", range(9))
def test_a_resumed_request_goes_on_where_it_was(cut: int) -> None:
    prompt = [5, 6, 7]
    whole = Bench()
    whole.submit(1, prompt, max_tokens=8, stop=["zz"])
    events = whole.run()
    resumed = Bench()
    resumed.submit(1, prompt, produced=tokens(events, 1)[:cut], max_tokens=8, stop=["zz"])
    rest = resumed.run()
    assert tokens(rest, 1) == tokens(events, 1)[cut:]
    assert [e.index for e in rest if isinstance(e, Produced)] == list(range(cut, 8))
    assert [e.text for e in rest if isinstance(e, Produced)] == [e.text for e in events if isinstance(e, Produced)][
        cut:
    ]
    assert (done(rest, 1).reason, done(rest, 1).output_tokens) == ("length", 8)


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_a_resumed_request_chooses_the_same_tokens_under_penalties(cut: int) -> None:
    prompt = [5, 6, 7, 7]
    sampling = Sampling(
        temperature=1.0, seed=11, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, min_p=0.01
    )
    whole = Bench()
    whole.submit(1, prompt, max_tokens=12, sampling=sampling)
    expected = tokens(whole.run(), 1)
    resumed = Bench()
    resumed.submit(1, prompt, produced=expected[:cut], max_tokens=12, sampling=sampling)
    assert tokens(resumed.run(), 1) == expected[cut:]
    plain = Bench()
    plain.submit(1, prompt, max_tokens=12, sampling=Sampling(temperature=1.0, seed=11))
    assert tokens(plain.run(), 1) != expected


def test_ids_beyond_the_vocabulary_are_never_chosen_however_likely() -> None:
    bench = Bench(vocab=VOCAB // 2)
    bench.submit(1, [3, 4], max_tokens=40)
    bench.submit(2, [3, 5], max_tokens=40, sampling=Sampling(temperature=1.0, seed=3))
    events = bench.run()
    assert max(continuation([3, 4], 40)) >= VOCAB // 2
    assert len(tokens(events, 1)) == len(tokens(events, 2)) == 40
    assert max(tokens(events, 1) + tokens(events, 2)) < VOCAB // 2


@pytest.mark.parametrize("limit", [1, 3])
def test_tokens_are_the_same_where_the_executor_tells_the_best_one_alone(limit: int) -> None:
    told = []
    for finds_best in (False, True):
        bench = Bench(limit, poison=9, vocab=VOCAB // 2)
        bench.executor.finds_best = finds_best
        bench.submit(1, [3, 4] * 20, max_tokens=30)
        bench.submit(2, [9, 1], max_tokens=5)
        bench.submit(3, [3, 5], max_tokens=9, sampling=Sampling(temperature=1.0, seed=3))
        bench.submit(4, [3, 6], max_tokens=9, logprobs=1)
        bench.submit(5, [3, 7], max_tokens=9, sampling=Sampling(repetition_penalty=1.5, seed=1))
        events = bench.run()
        told.append([e for e in events if isinstance(e, Produced | Refused)])
        assert bool(bench.executor.found) is finds_best
        assert [e.request for e in events if isinstance(e, Refused)] == [2]
    assert told[0] == told[1]


def test_log_probabilities_come_with_each_token_that_asked_for_them() -> None:
    bench = Bench()
    bench.submit(1, [3, 4], max_tokens=3, logprobs=2)
    bench.submit(2, [3, 4], max_tokens=3)
    events = bench.run()
    # FakeExecutor gives one token the logit 1 and all others 0
    likely, other = 1 - np.log(np.e + VOCAB - 1), -np.log(np.e + VOCAB - 1)
    for event in (e for e in events if isinstance(e, Produced) and e.request == 1):
        assert event.choice is not None
        assert event.choice.logprob == pytest.approx(likely, abs=1e-5)
        first, second = event.choice.best
        assert (first.token, first.logprob) == (event.token, event.choice.logprob)
        assert second.logprob == pytest.approx(other, abs=1e-5) and second.token == (0 if event.token else 1)
    assert all(e.choice is None for e in events if isinstance(e, Produced) and e.request == 2)


def test_an_answer_that_spells_the_end_of_its_turn_ends_there_unless_that_is_to_be_ignored() -> None:
    text = text_of(continuation([3, 4], 9))
    end = text[6:9]
    bench = Bench()
    bench.submit(1, [3, 4], max_tokens=9, ends=[end])
    events = bench.run()
    assert (done(events, 1).reason, done(events, 1).stop) == ("stop", None)
    assert "".join(e.text for e in events if isinstance(e, Produced)) + done(events, 1).text == text[: text.index(end)]


def test_a_request_waits_until_its_state_fits_and_one_that_never_can_is_refused_with_both_sizes() -> None:
    bench = Bench(limit=3, room=64)
    for request in (1, 2):
        bench.submit(request, [request] * 60, max_tokens=40)
    bench.submit(3, [3] * 4, max_tokens=4)
    bench.submit(4, [4] * 180, max_tokens=20)
    events = bench.run()
    for request, prompt in ((1, [1] * 60), (2, [2] * 60), (3, [3] * 4)):
        count = done(events, request).output_tokens
        assert tokens(events, request) == continuation(prompt, count)
    (refused,) = (e for e in events if isinstance(e, Refused))
    assert refused.request == 4 and "200 positions" in refused.message
    _, needed, there = (int(number) for number in re.findall(r"\d+", refused.message))
    assert needed > there


def test_the_share_of_experts_that_decode_rows_did_not_wait_for_is_told_where_there_were_any() -> None:
    bench = Bench(limit=2)
    bench.executor.waited = [1, 0]
    bench.submit(1, [1] * 2, max_tokens=4)
    bench.submit(2, [2] * 2, max_tokens=3)
    bench.submit(3, [3], max_tokens=1)
    events = bench.run()
    # Of three and of two decode rows, the first of a step waited for one of two experts.
    beside = [sum(s.kind is RowKind.DECODE for s in b.segments) for b in bench.executor.batches]
    assert beside == [0, 1, 2, 2, 0]
    assert done(events, 1).hit_rate == 0.5
    assert done(events, 2).hit_rate == 1.0
    assert done(events, 3).hit_rate is None


@pytest.mark.parametrize("number", range(1, 9))
def test_a_record_that_cannot_be_had_fails_who_needs_it_and_the_others_begin_again(number: int) -> None:
    bench = Bench(limit=3)
    bench.executor.refused = (9, number)
    prompts = {1: [1] * 5, 2: [9] * 6, 3: [3] * 20, 4: [9, 4]}
    for request, prompt in prompts.items():
        bench.submit(request, prompt, max_tokens=7)
    events = bench.run()
    refused = {e.request: e for e in events if isinstance(e, Refused)}
    assert set(refused) == {2, 4}
    assert all(e.code == "unavailable" and e.message.endswith("it burns") for e in refused.values())
    for request in (1, 3):
        assert tokens(events, request) == continuation(prompts[request], 7)
        assert [e.index for e in events if isinstance(e, Produced) and e.request == request] == list(range(7))
        assert done(events, request).reason == "length"


@pytest.mark.parametrize(("waited", "rows"), [(0.0, MAX_ROWS // 4), (9.9, MAX_ROWS)])
def test_time_that_a_step_waits_for_experts_does_not_shorten_the_next_chunk(waited: float, rows: int) -> None:
    times = iter(range(0, 1000, 10))
    bench = Bench(max_step_s=0.25, clock=lambda: float(next(times)))
    bench.executor.waited_s = waited
    bench.submit(1, [1] * 60, max_tokens=1)
    bench.engine.step()
    assert bench.engine.chunk_rows == rows


def test_routing_says_which_rows_count_as_decode() -> None:
    bench = Bench()
    bench.submit(1, [1] * 20, max_tokens=3)
    bench.run()
    assert [r.decode.tolist() for r in bench.routed] == [[0] * 16, [0] * 4, [1], [1]]
    assert [r.tags for r in bench.routed] == [[""] * 16, [""] * 4, [""], [""]]
    assert [r.step for r in bench.routed] == [1, 2, 3, 4]


def test_a_step_counts_as_begun_before_the_executor_reads_weights_and_as_ended_only_afterwards():
    bench = Bench()
    seen = []
    step = bench.executor.step

    def counted(batch: Batch) -> StepResult:
        seen.append(bench.counters[:2].tolist())
        return step(batch)

    bench.executor.step = counted
    bench.submit(1, [3, 4, 5], max_tokens=4)
    while bench.engine.busy:
        bench.engine.step()
    assert seen == [[number + 1, number] for number in range(len(seen))]
    assert bench.counters[:2].tolist() == [len(seen)] * 2 == [4, 4]
