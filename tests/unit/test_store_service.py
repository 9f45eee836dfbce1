"""What the store answers: slots and generations of what is resident, a reason for everything else."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fake_disk import FakeDisk
from filled_arena import empty, filled, regions_closed

from sparkd.ipc.directory import State
from sparkd.ipc.internal import Attach, Release, Stage, Staged, Stop, Used
from sparkd.ipc.messages import MessageError
from sparkd.store import service as service_module
from sparkd.store.service import StoreService

NAME = "laguna-tiny-s1-q4_k_m"


@pytest.fixture(autouse=True)
def _close_regions():
    with regions_closed():
        yield


@pytest.fixture
def full(model_path):
    return filled(model_path(NAME))


@pytest.fixture
def service(full):
    service = StoreService(full.residents, full.loader, full.copier, NAME)
    for number, peer in enumerate((b"w", b"other")):
        service.answer(peer, Attach(number, NAME))
    return service


def stage(service: StoreService, peer: bytes, msg: Stage) -> Staged:
    """The answer, which is due at once when all is resident."""
    reply = service.answer(peer, msg)
    if reply is not None:
        return reply
    ((whom, staged),) = service.granted()
    assert whom == peer
    return staged


def test_attach_tells_what_the_arena_holds(full, service):
    answer = service.answer(b"w", Attach(0, NAME))
    assert answer.fingerprint == full.model.fingerprint
    assert answer.arena_bytes == full.region.size
    assert answer.resident == answer.records == sum(layer.experts for layer in full.program.expert_layers)
    assert (answer.partial, answer.error) == (False, None)
    assert service.answer(b"w", Attach(0, "")).error is None


def test_attach_for_another_model_says_which_one_is_served(service):
    assert service.answer(b"w", Attach(0, "other")).error == f"model 'other' is not served here, {NAME!r} is"


def test_staged_records_come_with_slot_and_generation_in_the_order_asked_for(full, service):
    records = [[6, 7], [0, 0], [3, 2], [0, 0]]
    answer = stage(service, b"w", Stage(9, NAME, "decode", records))
    assert answer.batch == 9
    assert answer.error is None
    entries = [full.arena.directory.entry(*record) for record in records]
    assert answer.slots == [entry.slot for entry in entries]
    assert answer.generations == [entry.generation for entry in entries]
    assert service.status()["leases"] == 1
    assert service.answer(b"w", Release(answer.lease)) is None
    assert service.status()["leases"] == 0


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([7, 0], "no expert layer 7: the model has 7"),
        ([-1, 0], "no expert layer -1"),
        ([0, 8], "no expert 8 in expert layer 0: it has 8"),
        ([0, -1], "no expert -1"),
        ([0], r"a record is \[expert layer, expert\], found 1 numbers"),
        ([0, 1, 2], "found 3 numbers"),
        ([], "found 0 numbers"),
    ],
)
def test_a_record_that_does_not_exist_is_named_and_nothing_is_leased(service, record, said):
    answer = service.answer(b"w", Stage(1, NAME, "decode", [[0, 0], record]))
    assert re.search(said, answer.error)
    assert answer.slots == answer.generations == []
    assert service.status()["leases"] == 0


def test_of_records_that_are_still_being_loaded_it_is_told_where_they_will_be_and_then_that_they_are_there(model_path):
    one = empty(model_path(NAME))
    service = StoreService(one.residents, one.loader, one.copier, NAME)
    service.answer(b"w", Attach(0, NAME))
    assert service.answer(b"w", Stage(1, NAME, "decode", [[0, 0], [6, 7]])) is None
    ((peer, staged),) = service.granted()
    assert one.arena.directory.last_filling() == 0
    assert service.status()["resident"] == 0
    one.loader.load()
    entries = [one.arena.directory.entry(*record) for record in ([0, 0], [6, 7])]
    assert (peer, staged.batch, staged.error) == (b"w", 1, None)
    assert service.granted() == [], "it was told already"
    assert staged.slots == [entry.slot for entry in entries]
    assert staged.generations == [entry.generation for entry in entries]
    layout, places = one.arena.layout, zip(staged.slots, staged.generations, strict=True)
    for layer, (slot, generation) in zip((0, 6), places, strict=True):
        assert one.arena.directory.holds(layout.slot_number(layout.layers[layer].slab, slot), generation)


def test_whoever_waits_for_a_record_that_cannot_be_read_is_told_why(model_path, monkeypatch):
    disk = FakeDisk()
    disk.one = one = empty(model_path(NAME), copies=disk)
    service = StoreService(one.residents, one.loader, one.copier, NAME)
    service.answer(b"w", Attach(0, NAME))
    service.answer(b"w", Stage(1, NAME, "decode", [[3, 4]]))
    assert one.arena.directory.entry(3, 4).state is State.LOADING
    (key,) = disk.jobs
    assert disk.jobs[key].urgent
    ((_, lent),) = service.granted()
    disk.fail(key)
    ((_, staged),) = service.granted()
    assert (lent.error, staged.batch, staged.refused) == (None, lent.batch, [3, 4])
    assert staged.error == "expert 4 of expert layer 3 cannot be had: cannot read 100 bytes"
    assert (service.status()["leases"], one.arena.directory.entry(3, 4).state) == (0, State.ABSENT)


def test_a_worker_attaches_before_it_stages(service):
    assert service.answer(b"stranger", Stage(1, NAME, "decode", [[0, 0]])).error == "a worker attaches before it stages"
    assert service.answer(b"stranger", Attach(16, NAME)).error == "no worker 16: their numbers go to 15"


def test_a_lease_is_its_workers_alone(service):
    lease = stage(service, b"w", Stage(1, NAME, "decode", [[0, 0]])).lease
    for peer, number in ((b"other", lease), (b"w", lease + 1)):
        with pytest.raises(MessageError, match="not held by this worker"):
            service.answer(peer, Release(number))
    assert service.status()["leases"] == 1


def test_the_leases_of_a_worker_end_when_it_is_gone_replaced_or_attached_again(service):
    for peer in (b"w", b"other"):
        stage(service, peer, Stage(1, NAME, "decode", [[0, 0]]))
    service.drop(b"other")
    assert service.status()["leases"] == 1
    service.answer(b"new", Attach(0, NAME))
    assert service.status()["leases"] == 0
    stage(service, b"new", Stage(1, NAME, "decode", [[0, 0]]))
    service.answer(b"new", Stage(2, NAME, "decode", [[0, 1]]))
    service.answer(b"new", Attach(0, NAME))
    assert service.status()["leases"] == 0
    assert service.granted() == [], "the second answer is not due any more"


def test_a_grant_that_did_not_reach_its_worker_is_taken_back(service):
    staged = stage(service, b"w", Stage(1, NAME, "decode", [[0, 0]]))
    service.unsent(staged)
    service.unsent(staged)
    assert service.status()["leases"] == 0


def test_a_worker_that_never_releases_is_bounded(service, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_LEASES", 3)
    answers = [stage(service, b"w", Stage(n, NAME, "decode", [[0, 0]])) for n in range(4)]
    assert [answer.error for answer in answers] == [None, None, None, "this worker holds 3 leases already"]
    assert stage(service, b"other", Stage(0, NAME, "decode", [[0, 0]])).error is None


def test_records_are_staged_for_decode_or_prefill(service):
    answer = service.answer(b"w", Stage(1, NAME, "training", [[0, 0]]))
    assert answer.error == "records are staged for decode or prefill, not for 'training'"
    assert stage(service, b"w", Stage(1, NAME, "prefill", [[0, 0]])).error is None


def test_what_a_step_used_is_counted_decode_and_prefill_apart(full, service):
    used = []
    full.residents.used = lambda worker, records, use: used.append((worker, use.value, records))
    bits = np.zeros(56, np.uint8)
    bits[[0, 9, 55]] = 1
    assert service.answer(b"other", Used(1, np.packbits(bits, bitorder="little").tobytes(), b"\x02")) is None
    assert used == [(1, "decode", [(0, 0), (1, 1), (6, 7)]), (1, "prefill", [(0, 1)])]
    assert service.answer(b"other", Used(2, b"", b"")) is None
    assert len(used) == 2


def test_a_bitset_that_names_what_is_not_there_is_refused(service):
    with pytest.raises(MessageError, match=r"used.prefill: 8 bytes, more than the directory has words for"):
        service.answer(b"w", Used(1, b"", bytes(8)))
    with pytest.raises(MessageError, match="attaches before"):
        service.answer(b"stranger", Used(1, b"", b""))


def test_messages_that_are_not_for_a_store_are_refused(service):
    with pytest.raises(MessageError, match="takes no Stop"):
        service.answer(b"w", Stop())


def test_status_tells_sizes_and_residents(full, service):
    status = service.status()
    told = [(layer["records"], layer["resident"], len(layer["experts"])) for layer in status["layers"]]
    assert told == [(8, 8, 8)] * 7
    assert {letter for layer in status["layers"] for letter in layer["experts"]} <= {"h", "r"}
    assert status["bytes_loaded"] == status["bytes_total"] == status["bytes_read"] == full.loader.total
    assert sum(slab["slots"] for slab in status["slabs"]) == status["records"] == 56
    assert sum(slab["ring"] for slab in status["slabs"]) == 56
    assert sum(slab["free"] + slab["moving"] + slab["reserve"] + slab["hot"] for slab in status["slabs"]) == 0
