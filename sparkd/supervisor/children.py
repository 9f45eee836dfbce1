"""The supervisor's children: started in order, restarted after a crash, stopped in reverse order.

    down ──start──► starting ──Ready──► ready ◄──heartbeats──► silent
      ▲                │ exit              │ exit                │ exit
      │◄── backoff ────┴───────────────────┴─────────────────────┘
      │
      └── too many crashes, or it said itself that it cannot go on ──► failed (until somebody asks for it: `revive`)

A child that shows no life, or gets no further, for too long (`pulse`) is killed, which is an exit like any other. A
child belongs to a process group of its own (Ctrl-C reaches the supervisor alone) and is killed by the kernel when the
supervisor ends, however it ends.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sparkd.ipc.internal import Heartbeat
from sparkd.ipc.messages import Json
from sparkd.ipc.sockets import RunDirectory
from sparkd.supervisor.pulse import SILENT_S, Pulse

#: Seconds before the second restart (the first is made at once); each further crash doubles them.
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
#: This many crashes within this many seconds, and no request served meanwhile, are a crash loop.
_LOOP_CRASHES = 6
_LOOP_S = 60.0
#: Seconds a child has to end in order.
STOP_S = 5.0
#: Seconds between two looks at the children that mean that the supervisor itself was stopped meanwhile.
_OVERSLEPT_S = 1.0
_MODULES = {
    "store": "sparkd.store.main",
    "worker": "sparkd.worker.main",
    "calibrator": "sparkd.calibration.main",
}


class Condition(enum.Enum):
    """What a child is doing; the module's diagram shows how it changes."""

    DOWN = "stopped"
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class ChildProcess:
    """One role and the process that fills it now. `inherits`: names of the regions whose descriptors it gets."""

    role: str
    inherits: tuple[str, ...]
    condition: Condition = Condition.DOWN
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    restarts: int = -1
    reason: str = ""
    last_words: str = ""
    #: Why the supervisor killed it.
    verdict: str = ""
    pulse: Pulse | None = None
    restart_at: float | None = None
    crashes: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOP_CRASHES))
    #: The child's part of the status document, as it told it last.
    status: dict[str, Json] = field(default_factory=dict)

    @property
    def pid(self) -> int | None:
        """The process id, None while there is none."""
        return None if self.process is None else self.process.pid

    @property
    def address(self) -> bytes:
        """Its routing id on the control socket."""
        return f"{self.role}/{self.pid}".encode()


class Children:
    """All children of one daemon."""

    def __init__(
        self,
        run_dir: RunDirectory,
        settings: str,
        fingerprint: str,
        regions: Mapping[str, int],
        record: Callable[[Sequence[tuple[str, int]]], None],
    ) -> None:
        """`settings` are those that new processes get, with the fingerprint of the model that is planned for.

        `record` notes role and process id of all that exist.

        `regions` are descriptors by name: `arena`, and `routing` if there is to be a calibrator.
        """
        self.settings = settings
        self._fingerprint = fingerprint
        self._run_dir = run_dir
        self._regions = regions
        self._record = record
        roles = [ChildProcess("store", ("arena",)), ChildProcess("worker", ("arena", "routing"))]
        if "routing" in regions:
            roles.append(ChildProcess("calibrator", ("routing",)))
        self.by_role = {child.role: child for child in roles}
        self._stop_at: float | None = None
        self._looked: float | None = None

    def __getitem__(self, role: str) -> ChildProcess:
        return self.by_role[role]

    def all(self) -> list[ChildProcess]:
        """Every child, in the order of starting."""
        return list(self.by_role.values())

    @property
    def running(self) -> list[ChildProcess]:
        """Children that have a process."""
        return [child for child in self.all() if child.process is not None]

    def start(self, child: ChildProcess, now: float) -> None:
        """Start a process for a role."""
        command = [sys.executable, "-P", "-m", _MODULES[child.role], "--run-dir", str(self._run_dir.path)]
        command += ["--settings", self.settings, "--fingerprint", self._fingerprint, "--parent", str(os.getpid())]
        inherited = {name: self._regions[name] for name in child.inherits if name in self._regions}
        for name, fd in inherited.items():
            command += [f"--{name}-fd", str(fd)]
        child.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=inherited.values(),
            process_group=0,
            # numpy's linear algebra is not used, and its threads take their time to start.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        child.pidfd = os.pidfd_open(child.process.pid)
        child.condition = Condition.STARTING
        child.restarts += 1
        child.restart_at = None
        child.last_words = child.verdict = ""
        child.pulse = Pulse.since(now)
        self._record([(other.role, other.process.pid) for other in self.all() if other.process is not None])

    def reap(self, child: ChildProcess, now: float) -> None:
        """The process of `child` has ended: note why, and decide what comes next."""
        assert child.process is not None
        code = child.process.wait()
        os.close(child.pidfd)
        child.process, child.pidfd, child.pulse = None, -1, None
        child.status = {}
        child.condition = Condition.DOWN
        if self._stop_at is not None:
            return
        child.crashes.append(now)
        child.reason = child.last_words or f"the {child.role} {child.verdict or _ending(code)}"
        in_loop = len(child.crashes) == _LOOP_CRASHES and now - child.crashes[0] < _LOOP_S
        if in_loop:
            child.reason += f", {_LOOP_CRASHES} times within {now - child.crashes[0]:.0f} s"
        if in_loop or child.last_words:
            child.condition = Condition.FAILED
            child.reason += "; it stays down until 'sparkctl reload' (SIGHUP), or a restart of the daemon"
        else:
            recent = sum(now - at < _LOOP_S for at in child.crashes)
            child.restart_at = now + (min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (recent - 2)) if recent > 1 else 0.0)

    def heartbeat(self, child: ChildProcess, beat: Heartbeat, now: float) -> bool:
        """Note a sign of life; true when a child that was silent is back."""
        if child.pulse is None:
            return False
        child.pulse.beat(beat.progress, beat.busy, now)
        if child.condition is not Condition.SILENT or child.verdict:
            return False
        child.condition, child.reason = Condition.READY, ""
        return True

    def listen(self, now: float) -> Iterator[ChildProcess]:
        """Kill what will not go on by itself; yields the children that have just become silent."""
        asleep = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        for child in self.running:
            assert child.pulse is not None
            if asleep > _OVERSLEPT_S:
                child.pulse.overslept(asleep, now)
            verdict = child.pulse.lost(now)
            if verdict and not child.verdict:
                child.verdict = verdict
                self._signal(child, signal.SIGKILL)
            elif child.condition is Condition.READY and child.pulse.silent(now):
                child.condition = Condition.SILENT
                child.reason = f"the {child.role} has shown no life for {SILENT_S:g} s; it is replaced if that goes on"
                yield child

    def due(self) -> float:
        """When time alone changes something: a restart, or a silence that lasts too long. Infinity: never."""
        restarts = [child.restart_at for child in self.all() if child.restart_at is not None]
        relied_on = [child.pulse for child in self.running if child.condition is Condition.READY]
        return min([*restarts, *(pulse.silent_at for pulse in relied_on if pulse is not None)], default=math.inf)

    def forgive(self) -> None:
        """The daemon has proved that it works: what happened before is no crash loop."""
        for child in self.all():
            child.crashes.clear()

    def revive(self, now: float) -> list[str]:
        """Start what had given up once more, with all its chances; returns the roles."""
        down = [child for child in self.all() if child.condition is Condition.FAILED]
        for child in down:
            child.crashes.clear()
            child.condition, child.restart_at = Condition.DOWN, now
        return [child.role for child in down]

    def tick(self, now: float) -> None:
        """Start what is due; while stopping, go on to the next child or lose patience."""
        if self._stop_at is None:
            for child in self.all():
                if child.restart_at is not None and now >= child.restart_at:
                    self.start(child, now)
            return
        if now >= self._stop_at:
            for child in self.running:
                self._signal(child, signal.SIGKILL)
        elif [child.role for child in self.running] == ["store"]:
            self._signal(self["store"], signal.SIGTERM)

    def stop(self, now: float) -> None:
        """Have all end: the store last, since the others use what it owns."""
        self._stop_at = now + STOP_S
        for child in self.running:
            if child.role != "store":
                self._signal(child, signal.SIGTERM)
        self.tick(now)

    def kill(self) -> None:
        """End all processes at once and wait for them."""
        for child in self.running:
            self._signal(child, signal.SIGKILL)
            assert child.process is not None
            child.process.wait()
            os.close(child.pidfd)
            child.process = None

    def _signal(self, child: ChildProcess, number: signal.Signals) -> None:
        assert child.process is not None
        child.process.send_signal(number)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
