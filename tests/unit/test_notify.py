"""What systemd hears, and what it kept, by the protocol of sd_notify and of socket activation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.supervisor.notify import Notifier, take_kept


class Manager:
    """The other end of the notify socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(10)

    def heard(self, count: int) -> list[str]:
        return [self.socket.recv(4096).decode() for _ in range(count)]


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(f"@sparkd-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify"))
    yield made
    made.socket.close()


def test_systemd_hears_how_the_service_is(manager: Manager) -> None:
    notify = Notifier(manager.address)
    notify.status("loading: 10 %")
    notify.status("loading: 10 %")
    notify.starting(90.5)
    notify.ready()
    notify.status("two\nlines")
    notify.reloading()
    notify.stopping()
    heard = manager.heard(6)
    assert heard[:4] == ["STATUS=loading: 10 %", "EXTEND_TIMEOUT_USEC=90500000", "READY=1", "STATUS=two lines"]
    assert heard[4].startswith("RELOADING=1\nMONOTONIC_USEC=") and heard[4].partition("C=")[2].isdecimal()
    assert heard[5] == "STOPPING=1"


def test_the_watchdog_is_fed_three_times_a_period_however_often_the_loop_turns(manager: Manager) -> None:
    notify = Notifier(manager.address, watchdog_s=3.0)
    for turn in range(100):
        notify.alive(turn * 0.1)
    notify.stopping()
    heard = manager.heard(11)
    assert heard == ["WATCHDOG=1"] * 10 + ["STOPPING=1"]


def test_a_kept_descriptor_arrives_with_its_name(manager: Manager) -> None:
    notify = Notifier(manager.address)
    fd = os.memfd_create("arena")
    os.write(fd, b"weights")
    notify.keep("sparkd-arena-1", fd)
    os.close(fd)
    data, (received,), _, _ = socket.recv_fds(manager.socket, 4096, 4)
    assert data.decode().splitlines() == ["FDSTORE=1", "FDNAME=sparkd-arena-1", "FDPOLL=0"]
    assert os.pread(received, 100, 0) == b"weights"
    os.close(received)
    notify.forget("sparkd-arena-1")
    assert manager.heard(1) == ["FDSTOREREMOVE=1\nFDNAME=sparkd-arena-1"]


def test_without_systemd_nothing_is_said_and_nothing_breaks(tmp_path: Path) -> None:
    Notifier("").ready()
    lonely = Notifier(str(tmp_path / "nobody"), watchdog_s=1.0)
    lonely.stopping()
    lonely.alive(0.0)


@pytest.mark.parametrize(("meant", "fed"), [("own", True), ("1", False), (None, True)])
def test_the_environment_says_where_and_how_often_and_is_read_once(
    manager: Manager, meant: str | None, fed: bool
) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "3000000", "OTHER": "stays"}
    if meant is not None:
        environment["WATCHDOG_PID"] = str(os.getpid()) if meant == "own" else meant
    notify = Notifier.take(environment)
    assert environment == {"OTHER": "stays"}
    notify.alive(0.0)
    notify.stopping()
    assert manager.heard(1) == ["WATCHDOG=1" if fed else "STOPPING=1"]


def kept_in_a_process(names: str, meant: str) -> str:
    """What a process finds that inherits two descriptors from 3 on."""
    script = (
        "import os, sys; from sparkd.supervisor.notify import take_kept\n"
        f"if {meant!r} == 'own': os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "kept = take_kept(os.environ)\n"
        "print([(name, fd, os.get_inheritable(fd), os.read(fd, 9)) for name, fd in kept],"
        " [name for name in os.environ if name.startswith('LISTEN')])"
    )
    first, second = (os.open(name, os.O_RDONLY) for name in ("/dev/zero", "/dev/null"))
    # Both come to lie at 3 and 4 whatever their numbers are here.
    moved = f'exec {sys.executable} -c "$0" 8</dev/zero 9</dev/null 3<&8 4<&9 8<&- 9<&-'
    environment = {**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": names, "LISTEN_PID": "1"}
    done = subprocess.run(["bash", "-c", moved, script], env=environment, capture_output=True, text=True, check=True)
    os.close(first)
    os.close(second)
    return done.stdout.strip()


def test_what_was_kept_is_found_by_name_and_not_passed_on() -> None:
    zeros = "b'" + "\\x00" * 9 + "'"
    assert kept_in_a_process("arena:other", "own") == f"[('arena', 3, False, {zeros}), ('other', 4, False, b'')] []"
    assert kept_in_a_process("", "own") == f"[('', 3, False, {zeros}), ('', 4, False, b'')] []"


def test_what_was_kept_for_another_process_is_left_alone() -> None:
    assert kept_in_a_process("arena:other", "another") == "[] []"
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}
    assert take_kept(environment) == [] and environment == {}
