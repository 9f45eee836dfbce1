"""The worker's side of staging, against a store that says what a test has it say."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from filled_arena import Filled, empty, regions_closed

from sparkd.errors import UnavailableError
from sparkd.executors.base import RecordRefused
from sparkd.ipc.directory import Entry, State
from sparkd.ipc.internal import Attach, Attached, Foreseen, Release, Stage, Staged, Used
from sparkd.ipc.messages import Message
from sparkd.ipc.sockets import Channel, Router
from sparkd.residency.slabs import SlabSize
from sparkd.worker.stager import StoreStager

NAME = "laguna-tiny-s1-q4_k_m"
#: Of each slab ten ordinary slots, and a reserve of four: parts of two.
SIZE = SlabSize(14, 4)
ATTACHED = Attached(NAME, "", 2, 0, 0, 0, True)

Answer = Callable[[Message], list[Message]]


class ScriptedStore:
    """A store in a thread: `answer` gives the replies to each message, `heard` are all of them."""

    def __init__(self, context: zmq.Context, path: Path, answer: Answer) -> None:
        self.heard: list[Message] = []
        self._answer = answer
        self._end = threading.Event()
        self._router = Router(context, path)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            self._router.socket.poll(10)
            while (received := self._router.receive()) is not None:
                peer, msg = received
                self.heard.append(msg)
                for reply in self._answer(msg):
                    self._router.send(peer, reply)
        self._router.close()

    def die(self) -> None:
        self._end.set()
        self._thread.join()

    def stages(self) -> list[tuple[str, list[list[int]]]]:
        return [(msg.use, msg.records) for msg in self.heard if isinstance(msg, Stage)]


class Setting:
    """A partial arena without a byte in it, a watched channel, stores one after another."""

    def __init__(self, made: Filled, path: Path) -> None:
        self.arena = made.arena
        self.context = zmq.Context()
        self.path = path
        self.stores: list[ScriptedStore] = []
        self.channel = Channel.dealer(self.context, path, watched=True)
        self.came = 0
        self.stager = StoreStager(self.arena, self.channel, 0, self.went_on)

    def went_on(self) -> None:
        self.came += 1

    def store(self, answer: Answer) -> ScriptedStore:
        self.stores.append(ScriptedStore(self.context, self.path, answer))
        return self.stores[-1]

    def address(self, layer: int, slot: int) -> int:
        return self.arena.region.address + self.arena.layout.record(layer, slot)

    def fill(self, layer: int, slot: int, generation: int) -> None:
        layout = self.arena.layout
        self.arena.directory.filled(layout.slot_number(layout.layers[layer].slab, slot), generation)

    def close(self) -> None:
        for store in self.stores:
            store.die()
        self.channel.close()
        self.context.destroy()


@pytest.fixture
def setting(model_path, tmp_path: Path) -> Iterator[Setting]:
    with regions_closed():
        layout = empty(model_path(NAME)).arena.layout
        made = Setting(empty(model_path(NAME), [SIZE] * len(layout.slabs)), tmp_path / "store.sock")
        yield made
        made.close()


def granting(setting: Setting, *, come: bool = True) -> Answer:
    """Leases everything at once: expert e in slot e mod 14; lease and filling have one number. `come`: all is there."""
    numbers = itertools.count(1)

    def answer(msg: Message) -> list[Message]:
        if isinstance(msg, Attach):
            return [ATTACHED]
        if isinstance(msg, Stage):
            number = next(numbers)
            slots = [expert % 14 for _, expert in msg.records]
            for (layer, _), slot in zip(msg.records, slots, strict=True) if come else ():
                setting.fill(layer, slot, number)
            return [Staged(msg.batch, number, slots, [number] * len(slots))]
        return []

    return answer


def test_parts_are_half_the_reserve_decode_first_and_given_back_when_they_have_been_read(setting: Setting) -> None:
    store = setting.store(granting(setting))
    setting.stager.request(1, [3, 5, 7], [4])
    expected = [([3, 5], [3, 5]), ([7], [7]), ([4], [4])]
    for number, ((experts, addresses), (named, slots)) in enumerate(
        zip(setting.stager.arrivals(), expected, strict=True)
    ):
        assert experts == named
        assert addresses == [setting.address(1, slot) for slot in slots]
        assert setting.came == number + 1
    setting.stager.request(1, [], [])
    setting.channel.send(Attach(0, ""))
    assert setting.channel.receive(60) == ATTACHED
    assert store.stages() == [("decode", [[1, 3], [1, 5]]), ("decode", [[1, 7]]), ("prefill", [[1, 4]])]
    assert [msg.lease for msg in store.heard if isinstance(msg, Release)] == [1, 2, 3]


def test_parts_are_taken_in_the_order_they_come(setting: Setting) -> None:
    waiting: list[Staged] = []

    def answer(msg: Message) -> list[Message]:
        if isinstance(msg, Stage):
            slots = [expert for _, expert in msg.records]
            waiting.insert(0, Staged(msg.batch, msg.batch, slots, [1] * len(slots)))
            for slot in slots:
                setting.fill(0, slot, 1)
        return waiting if len(waiting) == 3 else []

    setting.store(answer)
    setting.stager.request(0, [1, 2, 3, 4, 5], [])
    assert [list(experts) for experts, _ in setting.stager.arrivals()] == [[5], [3, 4], [1, 2]]


def test_records_are_handed_out_as_they_come_and_their_lease_is_given_back_with_the_next_word(setting: Setting) -> None:
    store = setting.store(granting(setting, come=False))
    setting.stager.request(1, [3, 5], [])
    arrivals = setting.stager.arrivals()
    for expert in (5, 3):
        timer = threading.Timer(0.05, setting.fill, (1, expert, 1))
        timer.start()
        assert next(arrivals) == ([expert], [setting.address(1, expert)])
        timer.join()
    assert list(arrivals) == []
    assert not any(isinstance(msg, Release) for msg in store.heard)
    setting.stager.request(1, [5], [])
    setting.fill(1, 5, 2)
    assert len(list(setting.stager.arrivals())) == 1
    setting.channel.send(Attach(0, ""))
    assert setting.channel.receive(60) == ATTACHED
    assert [type(msg) for msg in store.heard] == [Stage, Stage, Release, Attach]


def test_a_record_that_was_promised_and_cannot_be_read_is_named(setting: Setting) -> None:
    error = "expert 3 of expert layer 1 cannot be had: it burns"
    answer = granting(setting, come=False)

    def failing(msg: Message) -> list[Message]:
        refused = [Staged(msg.batch, 0, [], [], error, [1, 3])] if isinstance(msg, Stage) else []
        return answer(msg) + refused

    store = setting.store(failing)
    setting.stager.request(1, [2, 3], [])
    with pytest.raises(RecordRefused, match="it burns"):
        next(setting.stager.arrivals())
    setting.stager.begin()
    assert [type(msg) for msg in store.heard] == [Stage], "there is no lease left"


def test_of_a_part_that_has_come_half_the_successor_of_a_store_is_asked_for_the_other_half(setting: Setting) -> None:
    first = setting.store(granting(setting, come=False))
    setting.stager.request(1, [3, 5], [])
    arrivals = setting.stager.arrivals()
    timer = threading.Timer(0.05, setting.fill, (1, 5, 1))
    timer.start()
    assert next(arrivals)[0] == [5]
    timer.join()
    first.die()
    successor = setting.store(granting(setting))
    assert [list(experts) for experts, _ in arrivals] == [[3]]
    assert successor.stages() == [("decode", [[1, 3]])]


def test_a_store_that_dies_in_the_middle_is_followed_by_one_that_is_asked_for_what_is_missing(setting: Setting) -> None:
    answer = granting(setting)
    first = setting.store(lambda msg: answer(msg) if isinstance(msg, Stage) and msg.records == [[2, 1], [2, 2]] else [])
    setting.stager.request(2, [1, 2, 3, 4], [6])
    arrivals = setting.stager.arrivals()
    assert next(arrivals)[0] == [1, 2]
    first.die()
    successor = setting.store(granting(setting))
    assert [list(experts) for experts, _ in arrivals] == [[3, 4], [6]]
    # Whether a Release for the first one arrives here or not: Attach ends all of its leases.
    told = [msg for msg in successor.heard if not isinstance(msg, Release)]
    assert isinstance(told[0], Attach)
    assert successor.stages() == [("decode", [[2, 3], [2, 4]]), ("prefill", [[2, 6]])]


def test_a_store_that_dies_between_two_steps_is_noticed_with_the_next_word_to_it(setting: Setting) -> None:
    first = setting.store(granting(setting))
    setting.stager.request(0, [1], [])
    assert len(list(setting.stager.arrivals())) == 1
    first.die()
    successor = setting.store(granting(setting))
    assert setting.channel.receive(60) is None  # until the end of the first is known
    setting.stager.begin()
    setting.stager.used(1, np.ones(1, np.uint8), np.zeros((len(setting.arena.layout.layers), 1, 2), np.int16))
    setting.stager.request(0, [1], [])
    assert len(list(setting.stager.arrivals())) == 1
    assert [type(msg) for msg in successor.heard[:3]] == [Attach, Used, Stage]


def test_what_a_successor_says_before_it_knows_this_worker_is_no_refusal(setting: Setting, monkeypatch) -> None:
    knows = False
    grant = granting(setting)

    def answer(msg: Message) -> list[Message]:
        nonlocal knows
        knows = knows or isinstance(msg, Attach)
        if isinstance(msg, Stage) and not knows:
            return [Staged(msg.batch, 0, [], [], "a worker attaches before it stages")]
        return grant(msg)

    store = setting.store(answer)
    interrupted = iter([False, True])
    monkeypatch.setattr(setting.channel, "interrupted", lambda: next(interrupted, False))
    setting.stager.request(0, [1, 2], [])
    assert [list(experts) for experts, _ in setting.stager.arrivals()] == [[1, 2]]
    assert store.stages() == [("decode", [[0, 1], [0, 2]])] * 2


def test_a_record_that_cannot_be_read_is_named_and_the_next_step_begins_without_leases(setting: Setting) -> None:
    answer = granting(setting)

    def refusing(msg: Message) -> list[Message]:
        if isinstance(msg, Stage) and [1, 3] in msg.records:
            return [Staged(msg.batch, 0, [], [], "expert 3 of expert layer 1 cannot be had: it burns", [1, 3])]
        return answer(msg)

    store = setting.store(refusing)
    setting.stager.begin()
    setting.stager.request(1, [1, 2, 3, 4, 5], [])
    arrivals = setting.stager.arrivals()
    assert next(arrivals)[0] == [1, 2]
    with pytest.raises(RecordRefused, match="expert 3 of expert layer 1 cannot be had: it burns") as caught:
        next(arrivals)
    assert (caught.value.layer, caught.value.expert) == (1, 3)
    setting.stager.begin()
    setting.stager.request(1, [5, 6], [])
    assert [list(experts) for experts, _ in setting.stager.arrivals()] == [[5, 6]]
    assert [type(msg) for msg in store.heard[:6]] == [Stage, Stage, Stage, Release, Attach, Stage]


def test_a_step_that_is_given_up_while_it_reads_leaves_no_lease(setting: Setting) -> None:
    store = setting.store(granting(setting))
    setting.stager.begin()
    setting.stager.request(1, [1], [])
    arrivals = setting.stager.arrivals()
    next(arrivals)
    arrivals.close()
    setting.stager.begin()
    assert setting.channel.receive(60) == ATTACHED
    assert [type(msg) for msg in store.heard] == [Stage, Attach]


@pytest.mark.parametrize(
    "reply", [lambda batch: Staged(batch, 0, [], [], "no"), lambda _: dataclasses.replace(ATTACHED, error="no")]
)
def test_a_store_that_wants_nothing_of_this_worker_ends_the_wait(setting: Setting, reply) -> None:
    setting.store(lambda msg: [reply(msg.batch)])
    setting.stager.request(1, [1], [])
    with pytest.raises(UnavailableError, match="no"):
        next(setting.stager.arrivals())


def test_addresses_follow_the_directory_and_are_told_only_when_they_have_changed(setting: Setting) -> None:
    arena, stager = setting.arena, setting.stager
    first = stager.begin()
    assert first is not None and not first.any()
    assert stager.begin() is None
    arena.directory.publish(1, 3, Entry(State.RESIDENT, 1, 4))
    arena.directory.publish(1, 2, Entry(State.LOADING, 1, 5))
    second = stager.begin()
    assert second is not None
    assert [(layer, expert) for layer, expert in np.argwhere(second).tolist()] == [(1, 3)]
    assert second[1, 3] == setting.address(1, 4)


def test_the_store_hears_which_records_a_step_used_for_what(setting: Setting) -> None:
    store = setting.store(granting(setting))
    directory = setting.arena.directory
    setting.stager.begin()
    ids = np.zeros((directory.layers, 3, 2), np.int16)
    ids[:, 0], ids[:, 1], ids[:, 2] = [1, 2], [2, 5], [0, 7]
    setting.stager.used(9, np.array([1, 1, 0], np.uint8), ids)
    setting.stager.used(10, np.array([1, 1, 1], np.uint8), ids)
    setting.stager.request(0, [1], [])
    assert len(list(setting.stager.arrivals())) == 1
    first, second = (msg for msg in store.heard if isinstance(msg, Used))

    def words(bits: bytes) -> list[int]:
        return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist()

    def expected(*experts: int) -> list[int]:
        return [layer * directory.experts + expert for layer in range(directory.layers) for expert in experts]

    assert (first.step, words(first.decode), words(first.prefill)) == (9, expected(1, 2, 5), expected(0, 7))
    assert (second.step, words(second.decode), second.prefill) == (10, expected(0, 1, 2, 5, 7), b"")


def test_what_has_become_resident_since_the_step_began_is_read_without_a_word_to_the_store(setting: Setting) -> None:
    store = setting.store(granting(setting))
    stager, directory = setting.stager, setting.arena.directory
    stager.begin()
    stager.foresee(1, stager.absent(1, [3, 4, 5]))
    directory.publish(1, 3, Entry(State.RESIDENT, 1, 4))
    directory.publish(1, 4, Entry(State.LOADING, 1, 5))
    assert stager.absent(1, [3, 4]) == [4]
    stager.request(1, [3, 4], [])
    assert list(stager.arrivals()) == [([3], [setting.address(1, 4)]), ([4], [setting.address(1, 4)])]
    assert [msg.records for msg in store.heard if isinstance(msg, Foreseen)] == [[[1, 3], [1, 4], [1, 5]]]
    assert store.stages() == [("decode", [[1, 4]])]
