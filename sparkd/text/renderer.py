"""Renders a model's chat template in a process of its own, bounded in time, memory and output.

    (new) ──start──► idle ◄──reply── rendering ──limit exceeded──► dead ──next use──► start
                      └──────────────────▲

The process lives as long as its template serves; a template that exceeds a limit costs its process, and the next
request starts another. It ends by itself when this side of the socket closes, also when the worker is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sparkd.errors import ModelFileError, RequestError
from sparkd.text.tokenizer import MAX_CHARACTERS

#: Processor time of one render. Wall time is only a second line: on a loaded machine a good template may take long.
CPU_SECONDS = 1.5
WALL_SECONDS = 10.0
START_SECONDS = 60.0
MEMORY_BYTES = 512 << 20
MAX_TEMPLATE_CHARACTERS = 1 << 20
_MAX_REPLY_BYTES = 8 * MAX_CHARACTERS

_REASONS = {
    "size": f"writes more than {MAX_CHARACTERS} characters",
    "memory": f"needs more than {MEMORY_BYTES >> 20} MiB of memory",
    "time": f"takes more than {CPU_SECONDS} s",
}


class _Broken(Exception):
    """The process is gone; the argument says why."""


class Renderer:
    """One template and its process. Safe to use from several threads, one render at a time."""

    def __init__(self, source: str, where: str) -> None:
        """Start the process and compile `source`; ModelFileError naming `where` if that fails."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ModelFileError(f"the chat template has {len(source)} characters, too many", where=where)
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        try:
            told = self._start()
        except _Broken as error:
            raise ModelFileError(f"the chat template cannot be used: it {error}", where=where) from None
        #: The constant texts of the template, and the names of all variables that it looks at.
        self.literals: list[str] = told["literals"]
        self.variables = frozenset(told["variables"])

    def render(self, variables: dict[str, Any]) -> str:
        """The text for these variables (JSON values).

        Raises RequestError with the reason if the template refuses them, fails or exceeds a limit.
        """
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._end()
                    self._start()
                reply = self._ask({"variables": variables}, WALL_SECONDS)
            except _Broken as error:
                raise RequestError(f"the chat template {error}") from None
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        script = str(Path(__file__).with_name("render_process.py"))
        limits = [str(CPU_SECONDS), str(MEMORY_BYTES), str(MAX_CHARACTERS)]
        # What is preloaded here (allocators, sanitizers) may reserve more address space than the limit.
        variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with theirs:  # -P: the script's folder must not hide modules of the standard library
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, *limits],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=variables,
            )
        self._socket = ours
        try:
            return self._ask({"template": self._source}, START_SECONDS)
        except _Broken:
            self._end()
            raise

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(request, ensure_ascii=False).encode() + b"\n")
            reply: dict[str, Any] = json.loads(self._read_line(deadline))
        except TimeoutError:
            self._end()
            raise _Broken(_REASONS["time"]) from None
        except OSError:
            code = self._end()
            raise _Broken(_REASONS["time"] if code == -signal.SIGPROF else f"ended its process ({code})") from None
        except _Broken:
            self._end()
            raise
        kind = reply.get("error")
        if kind == "refused":
            raise _Broken(f"refuses these messages: {reply['reason']}")
        if kind is not None:
            raise _Broken(_REASONS.get(kind) or f"fails: {reply['reason']}")
        return reply

    def _read_line(self, deadline: float) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while not data.endswith(b"\n"):
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._socket.recv(1 << 20)
            if not piece:
                raise ConnectionResetError
            data += piece
            if len(data) > _MAX_REPLY_BYTES:
                raise _Broken(_REASONS["size"])
        return bytes(data)

    def _end(self) -> int | None:
        """Close the socket, which ends the process; returns its exit code."""
        if self._socket is not None:
            self._socket.close()
        process, self._process, self._socket = self._process, None, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.5)
        process.kill()
        return process.wait()
