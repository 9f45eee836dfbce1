"""The gateway's process: an app of the daemon like any other, but started and restarted by its supervisor.

    down ──start──► starting ──it listens──► ready ──exit──► down, for a while that doubles ──► start
                       └──────────exit──────────────────────►  └── too many exits ──► failed

It knows nothing but the client socket; the daemon serves its other apps whatever becomes of it. What it says on its
standard output is for this end: `listens URL ...`, or `unusable REASON` before it ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections import deque
from importlib.util import find_spec
from pathlib import Path

from sparkd.config import GatewaySettings
from sparkd.errors import ConfigError
from sparkd.ipc.messages import Json
from sparkd.supervisor.processes import rss_bytes

#: Seconds before the first restart; each further exit doubles them.
_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
#: This many exits within this many seconds are the end.
_EXITS = 6
_WITHIN_S = 120.0
#: Seconds in which it ends by itself: streams may take five to hear of it.
_PATIENCE_S = 6.0
_MODULE = "spark_gateway"
_LIBRARIES = ("prometheus-client", "pydantic", "starlette", "uvicorn")


class Gateway:
    """One gateway for one daemon."""

    def __init__(self, settings: GatewaySettings, socket: Path, log_level: str) -> None:
        """`socket` is what it connects to. ConfigError when it is enabled and its libraries are not installed."""
        missing = [name for name in _LIBRARIES if find_spec(name.replace("-", "_")) is None]
        if settings.enabled and missing:
            fix = f"{sys.executable} -m pip install {' '.join(_LIBRARIES)}, or switch it off"
            raise ConfigError(f"{', '.join(missing)} is not installed", where="gateway.enabled", fix=fix)
        self._settings = settings
        self._socket = socket
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._exits: deque[float] = deque(maxlen=_EXITS)
        self._start_at = 0.0 if settings.enabled else math.inf
        self._starts = 0
        #: Where it listens, and why it cannot, in its own words.
        self._url = self._unusable = ""
        self.reason = ""

    @property
    def pid(self) -> int | None:
        """The process id, None while there is none."""
        return None if self._process is None else self._process.pid

    def tick(self, now: float) -> bool:
        """Start what is due; true when the process has just ended without being asked to, for `reason`."""
        if self._process is not None:
            ended = self._process.poll() is not None
            self._hear(self._process)
            if ended:
                return self._ended(self._process.wait(), now)
        if self._process is None and now >= self._start_at:
            self._start()
        return False

    def status(self) -> dict[str, Json] | None:
        """Its line among the processes of the status document; None where none is wanted."""
        if not self._settings.enabled:
            return None
        if self._process is not None:
            state = "ready" if self._url else "starting"
        else:
            state = "failed" if self._unusable or self._start_at == math.inf else "stopped"
        return {
            "role": "gateway",
            "pid": self.pid,
            "state": state,
            "url": self._url,
            "rss_bytes": 0 if self.pid is None else rss_bytes(self.pid),
            "restarts": max(0, self._starts - 1),
            "heartbeat_s": None,
            "reason": self.reason,
        }

    def stop(self) -> None:
        """Ask it to end, and start it no more."""
        self._start_at = math.inf
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and wait for it; if it was asked to end, after the time that it may take for that."""
        if self._process is not None:
            if self._start_at == math.inf:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE_S)
            self._process.kill()
            self._process.wait()
            self._forget(self._process)

    def _start(self) -> None:
        given = self._settings
        command = [sys.executable, "-P", "-m", _MODULE, "--socket", str(self._socket), "--parent", str(os.getpid())]
        command += ["--host", given.host, "--port", str(given.port), "--aliases", given.aliases]
        command += ["--sampling", given.sampling, "--cors", given.cors, "--log-level", self._log_level]
        for flag, path in (("--unix", given.unix), ("--keys", given.keys)):
            if path:
                command += [flag, str(Path(path).expanduser().absolute())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0, close_fds=True
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unusable = ""
        self._starts += 1

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        """Read what it has said; a line is shorter than what a pipe takes at once."""
        assert process.stdout is not None
        for line in (process.stdout.read() or b"").decode(errors="replace").splitlines():
            what, _, text = line.partition(" ")
            if what == "listens":
                self._url = text
            elif what == "unusable":
                self._unusable = text

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.stdout.close()
        self._process, self._url = None, ""

    def _ended(self, code: int, now: float) -> bool:
        """Note an end; whether nobody had asked for it."""
        assert self._process is not None
        self._forget(self._process)
        if self._start_at == math.inf:
            return False
        self._exits.append(now)
        self.reason = self._unusable or f"the gateway ended with status {code}; the log says why"
        if len(self._exits) == _EXITS and now - self._exits[0] < _WITHIN_S:
            self.reason += f", {_EXITS} times within {now - self._exits[0]:.0f} s: it is not started again"
            self._start_at = math.inf
        else:
            recent = sum(now - at < _WITHIN_S for at in self._exits)
            self._start_at = now + min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (recent - 1))
        return True
