"""Short turns: what the kernel then knows of a thread, and that nothing else of it changes."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, struct, threading
from sparkd.ipc import turns

def attributes():
    told = ctypes.create_string_buffer(48)
    call = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
    assert ctypes.CDLL(None).syscall(call, 0, told, 48, 0) == 0
    _, policy, _, nice, _, runtime, _, _ = struct.unpack("=IIQiIQQQ", told)
    print(policy, nice, runtime == turns.SHORT)

print(os.nice(3))
attributes()
print(turns.take_short_turns())
thread = threading.Thread(target=attributes)
thread.start()
thread.join()
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(turns.take_short_turns(), os.sched_getscheduler(0) == os.SCHED_IDLE)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no number of the call is known")
def test_threads_started_later_take_short_turns_too_with_policy_and_niceness_as_they_were() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    nice, before, taken, thread, idle = done.stdout.splitlines()
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    assert before == f"0 {nice} False"
    assert taken == "True"
    assert thread == f"0 {nice} {release >= (6, 12)}"
    assert idle == "False True", "who has asked for no turn in particular is left alone"
