"""A daemon for a measurement: started in a folder of its own, asked, ended; its log is read as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from spark_client import Client, ConnectionFailed, RequestFailed

_START_S = 600.0


class Log:
    """Lines of a daemon, each with the second (of time.monotonic) at which it came; `heard` gets each at once."""

    def __init__(self, process: subprocess.Popen[str], heard: Callable[[str], None]) -> None:
        self._process = process
        self._heard = heard
        self._lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def first(self, pattern: str, since: float) -> float | None:
        """When a line with this regular expression came first after `since`."""
        return next((at for at, line in list(self._lines) if at > since and re.search(pattern, line)), None)

    def last(self) -> str:
        """The last line."""
        return self._lines[-1][1] if self._lines else "it said nothing"

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append((time.monotonic(), line.rstrip()))
            self._heard(line)


@contextmanager
def serving(
    model: Path, *flags: str, heard: Callable[[str], None] = lambda line: None, around: Sequence[str] = ()
) -> Iterator[tuple[Client, Log]]:
    """Serve `model` with default settings but for `flags` until the block ends; `heard` gets each line of the log.

    `around` is the beginning of a command that runs another.
    """
    with TemporaryDirectory(prefix="sparkd-") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARKD_")}
        # An installed daemon finds its modules compiled.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [*around, sys.executable, "-m", "sparkd.cli", "serve", str(model), "--config", os.devnull]
        process = subprocess.Popen(
            [*command, "--run-dir", folder, *flags],
            env=environment | {"STATE_DIRECTORY": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            log = Log(process, heard)
            with _connect(Path(folder) / "client.sock", process, log) as client:
                yield client, log
        finally:
            process.terminate()
            process.wait()


def _connect(path: Path, process: subprocess.Popen[str], log: Log) -> Client:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(ConnectionFailed, RequestFailed):
            client = Client(path, timeout=60.0)
            while client.status()["state"] != "ready":
                if process.poll() is not None:
                    break
                time.sleep(0.2)
            else:
                return client
            client.close()
        time.sleep(0.1)
    raise SystemExit(f"the daemon does not come up: {log.last()}")
