"""Who may connect: the daemon's user, members of `socket.group`, nobody else; and nobody to what lies behind."""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon import daemon

NOBODY = 65534


def connect_as(user: int, groups: list[int], path: Path) -> int:
    """0 when a process of another user can connect to a socket, else the number of the error."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(NOBODY)
            os.setuid(user)
            with socket.socket(socket.AF_UNIX) as tried:
                tried.connect(str(path))
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
        finally:
            os._exit(254)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_members_of_the_group_reach_the_client_socket_and_nothing_else(
    model_path: Callable[[str], Path], open_folder: Path
) -> None:
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, NOBODY))
    run_dir = open_folder / "run"
    with daemon(model_path("laguna-tiny-s1-q4_k_m"), run_dir, socket={"group": group.gr_name}) as one:
        place = one.socket.stat()
        assert (stat.S_IMODE(place.st_mode), place.st_gid) == (0o660, group.gr_gid)
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o710
        assert connect_as(NOBODY, [group.gr_gid], one.socket) == 0
        assert connect_as(NOBODY, [], one.socket) == errno.EACCES
        for internal in ("control.sock", "store.sock"):
            assert connect_as(NOBODY, [group.gr_gid], run_dir / internal) == errno.EACCES


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_without_a_group_the_daemon_s_user_alone_can_connect(
    model_path: Callable[[str], Path], open_folder: Path
) -> None:
    with daemon(model_path("laguna-tiny-s1-q4_k_m"), open_folder / "run") as one:
        assert stat.S_IMODE((open_folder / "run").stat().st_mode) == 0o700
        assert connect_as(NOBODY, [os.getgid()], one.socket) == errno.EACCES
