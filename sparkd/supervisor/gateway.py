"""The gateway's process: an app of the daemon like any other, but started and restarted by its supervisor.

    down ──start──► running ──exit──► down, for a while that doubles ──► start
                                       └── too many exits ──► failed

It knows nothing but the client socket; the daemon serves its other apps whatever becomes of it.
"""

from __future__ import annotations

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
_MODULE = "spark_gateway"
_LIBRARIES = ("pydantic", "prometheus_client", "starlette", "uvicorn")


class Gateway:
    """One gateway for one daemon."""

    def __init__(self, settings: GatewaySettings, socket: Path) -> None:
        """`socket` is what it connects to. ConfigError when it is enabled and its libraries are not installed."""
        missing = [name for name in _LIBRARIES if find_spec(name) is None]
        if settings.enabled and missing:
            fix = "pip install 'sparkd[gateway]', or switch it off"
            raise ConfigError(f"{', '.join(missing)} is not installed", where="gateway.enabled", fix=fix)
        self._settings = settings
        self._socket = socket
        self._process: subprocess.Popen[bytes] | None = None
        self._exits: deque[float] = deque(maxlen=_EXITS)
        self._start_at = 0.0 if settings.enabled else math.inf
        self._starts = 0
        self.reason = ""

    @property
    def pid(self) -> int | None:
        """The process id, None while there is none."""
        return None if self._process is None else self._process.pid

    def tick(self, now: float) -> bool:
        """Start what is due; true when the process has just ended, for `reason`."""
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process.wait(), now)
            return True
        if self._process is None and now >= self._start_at:
            self._start()
        return False

    def status(self) -> dict[str, Json] | None:
        """Its line among the processes of the status document; None where none is wanted."""
        if not self._settings.enabled:
            return None
        state = "ready" if self._process is not None else "failed" if self._start_at == math.inf else "stopped"
        return {
            "role": "gateway",
            "pid": self.pid,
            "state": state,
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
        """End it at once and wait for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        given = self._settings
        command = [sys.executable, "-P", "-m", _MODULE, "--socket", str(self._socket), "--parent", str(os.getpid())]
        command += ["--host", given.host, "--port", str(given.port), "--aliases", given.aliases]
        command += ["--sampling", given.sampling, "--cors", given.cors]
        for flag, path in (("--unix", given.unix), ("--keys", given.keys)):
            if path:
                command += [flag, str(Path(path).expanduser().absolute())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0, close_fds=True
        )
        self._starts += 1

    def _ended(self, code: int, now: float) -> None:
        self._process = None
        if self._start_at == math.inf:
            return
        self._exits.append(now)
        self.reason = f"the gateway ended with status {code}; the log says why"
        if len(self._exits) == _EXITS and now - self._exits[0] < _WITHIN_S:
            self.reason += f", {_EXITS} times within {now - self._exits[0]:.0f} s: it is not started again"
            self._start_at = math.inf
        else:
            recent = sum(now - at < _WITHIN_S for at in self._exits)
            self._start_at = now + min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (recent - 1))
