"""Typed sockets: what is sent arrives, what is wrong is named, nothing blocks and nothing is lost silently."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import zmq

from sparkd.errors import ConfigError
from sparkd.ipc import messages
from sparkd.ipc.internal import Encode, Stop
from sparkd.ipc.messages import MessageError, Ping, Pong
from sparkd.ipc.sockets import CLIENT_MODE, Channel, Malformed, PeerGone, PeerSlow, Router, RunDirectory


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def _next(router: Router):
    assert router.socket.poll(30_000), "nothing arrived"
    return router.receive()


def _raw(context, path: Path, identity: bytes = b"raw") -> zmq.Socket:
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.ROUTING_ID, identity)
    sock.connect(f"ipc://{path}")
    return sock


def test_a_reply_reaches_the_peer_that_asked(context, tmp_path):
    router = Router(context, tmp_path / "a.sock")
    one, two = (Channel.dealer(context, tmp_path / "a.sock", name) for name in (b"one", b"two"))
    one.send(Ping(1))
    assert _next(router) == (b"one", Ping(1))
    two.send(Ping(2))
    assert _next(router) == (b"two", Ping(2))
    router.send(b"two", Pong(2))
    router.send(b"one", Pong(1))
    assert one.receive(5.0) == Pong(1)
    assert two.receive(5.0) == Pong(2)
    assert one.receive() is None
    assert router.receive() is None


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [messages.encode(Stop()), b"more"], [b"", messages.encode(Stop())], [b"\x80"]]
)
def test_a_malformed_message_names_its_peer_and_the_socket_goes_on(context, tmp_path, frames):
    router = Router(context, tmp_path / "a.sock")
    bad, good = _raw(context, tmp_path / "a.sock", b"bad"), Channel.dealer(context, tmp_path / "a.sock", b"good")
    bad.send_multipart(frames)
    with pytest.raises(MessageError) as caught:
        _next(router)
    assert isinstance(caught.value, Malformed)
    assert caught.value.peer == b"bad"
    good.send(Ping(1))
    assert _next(router) == (b"good", Ping(1))


def test_a_message_above_the_limit_costs_its_sender_the_connection_and_nobody_else(context, tmp_path):
    router = Router(context, tmp_path / "a.sock", max_bytes=1000)
    bad, good = _raw(context, tmp_path / "a.sock", b"bad"), Channel.dealer(context, tmp_path / "a.sock", b"good")
    bad.send(bytes(1001))
    good.send(Ping(1))
    assert _next(router) == (b"good", Ping(1))
    assert router.receive() is None


def test_what_an_app_may_send_at_most_fits_between_processes_with_what_is_added_to_it(context, tmp_path):
    router = Router(context, tmp_path / "a.sock")
    child = Channel.dealer(context, tmp_path / "a.sock", b"worker")
    child.send(Encode(1, "x" * messages.MAX_BYTES, special=False))
    peer, order = _next(router)
    assert isinstance(order, Encode)
    router.send(peer, order)
    assert child.receive(wait_s=30.0) == order


def test_sending_to_nobody_is_an_error(context, tmp_path):
    router = Router(context, tmp_path / "a.sock")
    with pytest.raises(PeerGone):
        router.send(b"nobody", Pong(1))


def test_a_peer_that_does_not_read_is_reported_not_dropped(context, tmp_path):
    router = Router(context, tmp_path / "a.sock", high_water=4)
    slow = Channel.dealer(context, tmp_path / "a.sock", b"slow")
    slow.send(Ping(0))
    _next(router)
    sent = 0
    with pytest.raises(PeerSlow):
        while True:
            router.send(b"slow", messages.Tokens(sent, list(range(2000))))
            sent += 1
    got = 0
    while (message := slow.receive(0.5)) is not None:
        assert message.tag == got
        got += 1
    assert got == sent


def test_only_the_owner_reaches_internal_sockets_and_the_group_the_client_socket(context, tmp_path):
    umask = os.umask(0o022)
    try:
        Router(context, tmp_path / "internal.sock")
        Router(context, tmp_path / "client.sock", mode=CLIENT_MODE, group=os.getgid())
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes == {"internal.sock": 0o700, "client.sock": 0o660}


def test_a_stale_socket_file_is_replaced(context, tmp_path):
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    router = Router(context, path)
    dealer = Channel.dealer(context, path, b"x")
    dealer.send(Ping(1))
    assert _next(router) == (b"x", Ping(1))


def test_a_file_that_is_no_socket_is_not_replaced(context, tmp_path):
    path = tmp_path / "a.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="in the way"):
        Router(context, path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_missing_is_one_clear_line(context, tmp_path):
    with pytest.raises(ConfigError, match=r"missing/a\.sock: cannot bind"):
        Router(context, tmp_path / "missing" / "a.sock")


def test_the_longest_socket_path_is_taken_and_one_more_is_refused(context, tmp_path):
    room = 107 - len(os.fsencode(tmp_path / "x" / "control.sock")) + 1
    fits = tmp_path / ("d" * room)
    fits.mkdir()
    router = Router(context, RunDirectory(fits).control)
    dealer = Channel.dealer(context, RunDirectory(fits).control, b"x")
    dealer.send(Stop())
    assert _next(router) == (b"x", Stop())
    with pytest.raises(ConfigError, match="108 characters, a Unix socket allows 107; choose a shorter run directory"):
        RunDirectory(tmp_path / ("d" * (room + 1)))


def test_the_limit_counts_bytes_not_letters(tmp_path):
    with pytest.raises(ConfigError, match="a Unix socket allows 107"):
        RunDirectory(Path("/") / ("é" * 60))


def test_the_run_directory_comes_from_the_environment(monkeypatch):
    for name in ("SPARKD_RUN_DIR", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="no run directory"):
        RunDirectory.default()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert RunDirectory.default().path == Path("/run/user/1/sparkd")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/sparkd:/run/other")
    assert RunDirectory.default().path == Path("/run/sparkd")
    monkeypatch.setenv("SPARKD_RUN_DIR", "/tmp/x")
    assert RunDirectory.default().client == Path("/tmp/x/client.sock")
