"""How soon a process that wakes gets a processor.

Linux lets one run when the turn of another ends that computes, a few milliseconds at most. Whose own turns are shorter
need not wait so long, from Linux 6.12 on: that is for those who have little to do, and are waited for.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Any

#: Nanoseconds of a short turn.
SHORT = 200_000
#: Numbers of sched_setattr, which libraries of that age know nothing of.
_CALLS = {"x86_64": 314, "aarch64": 274}
#: struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def take_short_turns() -> bool:
    """Have this thread, and those that it starts from now on, take short turns; false where that does not go.

    An older kernel agrees and does nothing.
    """
    call = _CALLS.get(platform.machine())
    policy = os.sched_getscheduler(0)
    if call is None or policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    libc: Any = ctypes.CDLL(None, use_errno=True)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, SHORT, 0, 0))
    return bool(libc.syscall(call, 0, attributes, 0) == 0)
