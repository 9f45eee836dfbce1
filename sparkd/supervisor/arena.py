"""The arena of a daemon that starts: a new one, or the one that its predecessor had the service manager keep."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from sparkd.config import Settings
from sparkd.ipc.memory import Region
from sparkd.store.planned import Plan
from sparkd.supervisor.notify import Notifier
from sparkd.supervisor.planning import plan

#: Bytes of a block in `st_blocks`, whatever the file system's own are.
_BLOCK = 512
_log = logging.getLogger(__name__)


def prepare(settings: Settings, notify: Notifier, kept: Sequence[tuple[str, int]]) -> tuple[Plan, Region]:
    """The plan, and an arena for it, which is kept by the service manager from now on. SparkError without a plan.

    `kept` are names and descriptors that were kept. One is adopted when its name says that it was made for the very
    same files and layout; what it lacks the store will load. Others are given back.
    """
    held = sum(os.fstat(fd).st_blocks * _BLOCK for _, fd in kept)
    planned = plan(settings, held, max((os.fstat(fd).st_size for _, fd in kept), default=0))
    name = f"sparkd-arena-{planned.arena}"
    adopted = None
    for kept_name, fd in kept:
        if kept_name == name and adopted is None:
            adopted = fd
            continue
        os.close(fd)
        if kept_name != name:
            notify.forget(kept_name)
    if adopted is not None:
        _log.info("adopted the arena of the daemon before: %d bytes of it are filled", held)
        return planned, Region.map(adopted)
    if held:
        planned = plan(settings)
    region = Region.create(planned.arena_bytes, pool=settings.memory.huge_pages == "auto")
    notify.keep(name, region.fd)
    return planned, region
