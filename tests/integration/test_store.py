"""The store as a process: fills the arena it was given, answers workers, and ends when it should."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from control import PATIENCE_S, Control, control, settings_for

from sparkd.ipc import internal, messages
from sparkd.ipc.directory import State
from sparkd.ipc.internal import ChildFailed, ChildHello, ChildProgress, Ready
from sparkd.ipc.memory import Region
from sparkd.ipc.sockets import Channel
from sparkd.models import build_program
from sparkd.residency.budget import GIB, Limit, Scope
from sparkd.store.arena import Arena
from sparkd.store.layout import core_tensors
from sparkd.store.plan import make_plan

NAME = "qwen35moe-tiny-s1-q4_k_m"


@pytest.fixture
def path(model_path, tmp_path) -> Path:
    (tmp_path / "models").mkdir()
    return Path(shutil.copy(model_path(NAME), tmp_path / "models" / f"{NAME}.gguf"))


@pytest.fixture
def link(tmp_path):
    (tmp_path / "run").mkdir()
    with control(tmp_path / "run") as link:
        yield link


@pytest.fixture
def region(path):
    with Region.create(make_plan(settings_for(path)).arena_bytes) as region:
        yield region


def _ready(link: Control, path: Path, region: Region) -> tuple[subprocess.Popen, bytes]:
    child = link.start("store", settings_for(path), region)
    name = link.name("store", child)
    link.wait(name, Ready)
    return child, name


def test_a_store_fills_the_arena_and_reports_it(link, path, region):
    child, name = _ready(link, path, region)
    hello, *rest, ready = link.heard[name]
    assert hello == ChildHello("store", child.pid)
    assert ready.detail["resident"] == ready.detail["records"] == 64
    assert all(isinstance(message, ChildProgress) for message in rest)
    done = [message.done for message in rest]
    assert done == sorted(done)
    assert done[-1] == rest[-1].total == ready.detail["bytes_read"]
    arena = Arena.attach(region, build_program)
    tensor = arena.model.tensors[core_tensors(arena.program)[-1]]
    start = arena.tensor(tensor.name).address - region.address
    with path.open("rb") as file:
        file.seek(tensor.offset)
        assert bytes(region.view(start, tensor.nbytes)) == file.read(tensor.nbytes)
    assert all(addresses.all() for addresses in arena.records())


def test_a_worker_attaches_stages_and_releases(link, path, region):
    _, name = _ready(link, path, region)
    worker = link.channel(link.run_dir.store)
    worker.send(internal.Attach(0, NAME))
    attached = worker.receive(PATIENCE_S)
    assert (attached.resident, attached.records, attached.error) == (64, 64, None)
    worker.send(internal.Stage(1, NAME, "decode", [[0, 0], [7, 7]]))
    staged = worker.receive(PATIENCE_S)
    arena = Arena.attach(region, build_program)
    assert staged.slots == [arena.directory.entry(0, 0).slot, arena.directory.entry(7, 7).slot]
    worker.send(internal.Stage(2, NAME, "decode", [[8, 0]]))
    assert worker.receive(PATIENCE_S).error == "no expert layer 8: the model has 8"
    assert link.status(name)["leases"] == 1
    worker.send(internal.Release(staged.lease))
    worker.send(internal.Attach(0, NAME))
    worker.receive(PATIENCE_S)
    assert link.status(name)["leases"] == 0


def test_malformed_messages_of_a_worker_do_not_end_the_store(link, path, region):
    _, name = _ready(link, path, region)
    worker = link.channel(link.run_dir.store)
    for frames in ([b"\xc1"], [b"", b"", b""], [messages.encode(internal.Stop())]):
        worker.socket.send_multipart(frames)
    worker.send(internal.Attach(0, NAME))
    assert worker.receive(PATIENCE_S).error is None
    assert link.status(name)["core_loaded"] is True


@pytest.mark.parametrize("how", ["stop", "sigterm"])
def test_a_store_ends_when_told_to(link, path, region, how):
    child, name = _ready(link, path, region)
    if how == "stop":
        link.send(name, internal.Stop())
    else:
        child.terminate()
    assert link.ended(child) == (0, "")


def test_the_interrupt_key_is_left_to_the_supervisor(link, path, region):
    child, name = _ready(link, path, region)
    child.send_signal(signal.SIGINT)
    assert link.status(name)["resident"] == 64
    assert child.poll() is None


def test_heartbeats_go_on_while_the_store_idles(link, path, region):
    _, name = _ready(link, path, region)
    beat = name + b"/beat"
    before = link.beats.get(beat, 0)
    deadline = time.monotonic() + PATIENCE_S
    while link.beats.get(beat, 0) < before + 2:
        assert time.monotonic() < deadline
        link.hear(0.2)


def test_a_killed_stores_successor_reads_nothing_again(link, path, region):
    child, name = _ready(link, path, region)
    before = bytes(region.view(0, region.size))
    child.kill()
    child.wait()
    _, name = _ready(link, path, region)
    status = link.status(name)
    assert status["bytes_read"] == 0
    assert status["bytes_loaded"] == status["bytes_total"]
    assert bytes(region.view(0, region.size)) == before


def test_a_successor_refuses_a_file_that_was_replaced_and_says_both_identities(link, path, region):
    child, _ = _ready(link, path, region)
    child.kill()
    child.wait()
    inode = path.stat().st_ino
    copy = path.with_suffix(".new")
    shutil.copy(path, copy)
    copy.rename(path)
    child = link.start("store", settings_for(path), region)
    failed = link.wait(link.name("store", child), ChildFailed)
    assert failed.code == "model_file"
    assert f"inode {inode}" in failed.message
    assert f"inode {path.stat().st_ino}" in failed.message
    assert link.ended(child) == (1, "")


def _missing(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def _other_model(path: Path) -> None:
    path.write_bytes(b"GGUF nonsense")


@pytest.mark.parametrize("damage", [_missing, _cut, _other_model])
def test_a_model_that_went_bad_is_one_line_to_the_supervisor_and_no_traceback(link, path, region, damage):
    damage(path)
    child = link.start("store", settings_for(path), region)
    failed = link.wait(link.name("store", child), ChildFailed)
    assert failed.code == "model_file"
    assert str(path) in failed.message
    assert "\n" not in failed.message
    assert link.ended(child) == (1, "")


def test_an_arena_of_the_wrong_size_is_refused(link, path):
    with Region.create(1 << 16) as region:
        child = link.start("store", settings_for(path), region)
        failed = link.wait(link.name("store", child), ChildFailed)
    assert "65536 were planned" in failed.message


def test_a_store_dies_with_its_supervisor(link, path, region):
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([*sys.argv[2:], '--parent', str(os.getpid())], pass_fds=[int(sys.argv[1])])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-m", "sparkd.store.main", "--run-dir", str(link.run_dir.path)]
    command += ["--settings", settings_for(path).to_json(), "--arena-fd", str(region.fd)]
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(region.fd), *command], pass_fds=[region.fd], stdout=subprocess.PIPE, text=True
    )
    pid = int(supervisor.stdout.readline())
    link.wait(f"store/{pid}".encode(), Ready)
    supervisor.kill()
    supervisor.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_store_whose_supervisor_is_gone_already_does_not_start(link, path, region):
    command = [sys.executable, "-m", "sparkd.store.main", "--run-dir", str(link.run_dir.path), "--parent", "1"]
    command += ["--settings", settings_for(path).to_json(), "--arena-fd", str(region.fd)]
    done = subprocess.run(command, pass_fds=[region.fd], timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert not link.run_dir.store.exists()


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended but was not waited for by its foster parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("module", ["store", "calibration"])
def test_the_process_carries_neither_torch_nor_kernels(module):
    code = f"import sparkd.{module}.main, sys; print(*(m for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert f"sparkd.{module}.main" in loaded
    unwanted = {"torch", "cupy", "gguf", "tokenizers", "jinja2"}
    assert not unwanted & {name.split(".")[0] for name in loaded}
    assert not [name for name in loaded if name.startswith("sparkd._native")]


# ---- a tier smaller than the model ----

LARGE = "laguna-tinyk-s1-f32"


@pytest.fixture
def scarce(model_path, tmp_path):
    """A model, and a region with room for about half of its experts."""
    (tmp_path / "models").mkdir()
    path = Path(shutil.copy(model_path(LARGE), tmp_path / "models" / f"{LARGE}.gguf"))
    whole = make_plan(settings_for(path), limits=[Limit("enough", 99 * GIB)])
    half = whole.arena_bytes - whole.records_bytes // 2
    plan = make_plan(settings_for(path), limits=[Limit("half", half, Scope.ARENA)])
    assert plan.partial
    with Region.create(plan.arena_bytes) as region:
        yield path, region


def _bytes(path: Path, region: Region, layer: int, expert: int, slot: int) -> tuple[bytes, bytes]:
    """What a slot holds, and what the file has of this expert: the first of the three pieces."""
    arena = Arena.attach(region, build_program)
    weight = arena.program.expert_layers[layer].gate
    tensor = arena.model.tensors[weight.tensor]
    size = weight.rows * tensor.row_bytes
    with path.open("rb") as file:
        file.seek(tensor.slice_offset(expert) + weight.first_row * tensor.row_bytes)
        place = arena.layout.record(layer, slot) + arena.pieces(layer)[0].offset
        return bytes(region.view(place, size)), file.read(size)


def _absent(region: Region) -> list[list[int]]:
    directory = Arena.attach(region, build_program).directory
    every = [(layer, expert) for layer in range(directory.layers) for expert in range(directory.experts)]
    return [[*record] for record in every if directory.entry(*record).state is not State.RESIDENT]


def _stage(worker: Channel, region: Region, batch: int, use: str, record: list[int]) -> internal.Staged:
    """The answer, once the record is there."""
    worker.send(internal.Stage(batch, "", use, [record]))
    staged = worker.receive(PATIENCE_S)
    assert (staged.batch, staged.error) == (batch, None)
    arena = Arena.attach(region, build_program)
    number = arena.layout.slot_number(arena.layout.layers[record[0]].slab, staged.slots[0])
    until = time.monotonic() + PATIENCE_S
    while not arena.directory.holds(number, staged.generations[0]):
        assert time.monotonic() < until
        arena.directory.listen(arena.directory.rung(), 0.01)
    return staged


def test_a_scarce_store_reads_what_is_missed_and_its_successor_nothing_of_what_is_there(link, scarce):
    path, region = scarce
    child, name = _ready(link, path, region)
    ready = link.wait(name, Ready).detail
    assert 0 < ready["resident"] < ready["records"]
    assert isinstance(link.wait(name, internal.Tier), internal.Tier)
    worker = link.channel(link.run_dir.store)
    worker.send(internal.Attach(0, ""))
    assert worker.receive(PATIENCE_S).partial
    for batch, record in enumerate(_absent(region)):
        staged = _stage(worker, region, batch, "prefill", record)
        there, expected = _bytes(path, region, *record, staged.slots[0])
        assert there == expected
        worker.send(internal.Release(staged.lease))
    worker.send(internal.Stage(99, "", "decode", _absent(region)))
    assert "the reserve has" in worker.receive(PATIENCE_S).error
    before = link.status(name)
    assert (before["resident"], before["uses"]["decode"]["uses"]) == (ready["resident"], 0)
    assert before["read_bytes"] > 0
    child.kill()
    child.wait()
    _, name = _ready(link, path, region)
    after = link.status(name)
    assert (after["bytes_read"], after["resident"]) == (0, before["resident"])
    worker.close()


def test_a_scarce_store_counts_what_was_used_and_heeds_placements(link, scarce):
    path, region = scarce
    _, name = _ready(link, path, region)
    worker = link.channel(link.run_dir.store)
    worker.send(internal.Attach(0, ""))
    worker.receive(PATIENCE_S)
    (layer, expert), *_ = _absent(region)
    directory = Arena.attach(region, build_program).directory
    staged = _stage(worker, region, 1, "decode", [layer, expert])
    bits = 1 << (layer * directory.experts + expert)
    worker.send(internal.Release(staged.lease))
    worker.send(internal.Used(1, bits.to_bytes(-(-directory.layers * directory.experts // 8), "little"), b""))
    _until(link, lambda: link.status(name)["uses"]["decode"] == {"uses": 1, "misses": 1})
    _until(link, lambda: directory.entry(layer, expert).state is State.RESIDENT)
    hot = [[] for _ in range(directory.layers)]
    wanted = _absent(region)[0]
    hot[wanted[0]] = [wanted[1]]
    for refused, why in (
        (internal.Placement(1, "", "device", hot, 0.5, 64.0), "this is 'host'"),
        (internal.Placement(2, "", "host", hot[1:], 0.5, 64.0), "expert layers, the model has"),
    ):
        link.send(name, refused)
        _until(link, lambda why=why: why in link.status(name)["placement"]["refused"])
    link.send(name, internal.Placement(3, "", "host", hot, 0.5, 64.0))
    _until(link, lambda: directory.entry(*wanted).state is State.RESIDENT)
    _until(link, lambda: link.status(name)["placement"] == {"version": 3, "swaps_left": 0, "refused": ""})
    assert sum(slab["hot"] for slab in link.status(name)["slabs"]) == 1
    worker.close()


def _until(link: Control, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        link.hear(0.02)
