"""`sparkctl doctor`: is this machine fit to serve, and what to do where it is not. Works with and without a daemon."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pwd
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from spark_client import Client, SparkClientError
from spark_client.address import find_socket
from sparkctl import findings
from sparkctl.findings import Finding, Level
from sparkctl.plain import printable, write_json
from sparkctl.process import DaemonProcess
from sparkctl.tables import console, size, table
from sparkd.calibration.profile import state_folder
from sparkd.config import ModelSettings, Settings, load
from sparkd.errors import BudgetError, ModelFileError, SparkError
from sparkd.gguf.model_file import ModelFile
from sparkd.kernels import available
from sparkd.store.limits import host_limits

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


@dataclass(frozen=True, slots=True)
class Running:
    """What is known of the daemon that runs; `limits` are its own, by the kernel's names (-1: none)."""

    pid: int = 0
    status: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    descriptors: int | None = None

    @property
    def serves(self) -> bool:
        """Whether there is one that tells of itself."""
        return bool(self.status)


def run(args: argparse.Namespace) -> int:
    """Print all findings; exit code 1 when one of them keeps the daemon from serving."""
    found = _as_user(args) if args.user else list(_examine(args))
    if args.json:
        write_json([_document(finding) for finding in found])
    else:
        _show(found)
    return 1 if any(finding.level is Level.FAIL for finding in found) else 0


def _show(found: list[Finding]) -> None:
    made = table("check", "", "finding")
    for finding in found:
        what = Text(printable(finding.what))
        if finding.fix:
            what.append(f"\n→ {printable(finding.fix)}", style="bold")
        made.add_row(finding.check, Text(finding.level.value, style=_COLOURS[finding.level]), what)
    console().print(made)


def _document(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "level": finding.level.value, "what": finding.what, "fix": finding.fix}


def _as_user(args: argparse.Namespace) -> list[Finding]:
    """The findings of another user, who may be without access to what this one may read. Needs root."""
    try:
        user = pwd.getpwnam(args.user)
    except KeyError:
        raise SparkClientError(f"no user {args.user!r} on this machine") from None
    reading, writing = os.pipe()
    # A new program could not be run by a user who may not enter the folder of the interpreter.
    child = os.fork()
    if child == 0:
        os.close(reading)
        said: dict[str, Any] = {"error": "the examination failed"}
        try:
            os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            for name in [name for name in os.environ if name.startswith("XDG_")]:
                del os.environ[name]
            os.environ["HOME"] = user.pw_dir
            said = {"findings": [_document(finding) for finding in _examine(args)]}
        except PermissionError:
            said = {"error": f"only root can look with the eyes of {args.user}"}
        finally:
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    if "error" in said:
        raise SparkClientError(said["error"])
    return [Finding(f["check"], Level(f["level"]), f["what"], f["fix"]) for f in said["findings"]]


def _examine(args: argparse.Namespace) -> Iterator[Finding]:
    socket = args.socket or find_socket()
    running = _running(socket, args.timeout)
    yield _daemon(socket, running)
    settings = Settings()
    try:
        settings = load([args.config] if args.config else None)
        yield Finding("settings", Level.OK, "can be used")
    except SparkError as error:
        yield Finding("settings", Level.FAIL, str(error), "mend it; 'sparkctl config' shows the rest")
    path = args.model or settings.model.path or running.status.get("model", {}).get("path", "")
    arena = running.status.get("memory", {}).get("arena_bytes", 0)
    if path:
        model = Path(path).expanduser().absolute()
        readable = _model(model)
        yield readable
        if readable.level is Level.OK:
            yield findings.model_disk(model)
            memory, arena = _memory(settings, model, running, arena)
            yield memory
    else:
        yield Finding("model", Level.WARN, "none is set", "set model.path, or: sparkctl doctor MODEL.gguf")
    yield _cgroup()
    yield from _machine(settings, running, arena)
    yield findings.state_disk(state_folder())
    yield findings.socket_path(socket)
    files = running.limits.get("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield findings.descriptors(files, running.descriptors)


def _machine(settings: Settings, running: Running, arena: int) -> Iterator[Finding]:
    if running.serves:
        told = running.status["memory"]
        lock = findings.locked(told["locked_bytes"], told["arena_bytes"], told["lock_note"])
    else:
        # Who has CAP_IPC_LOCK is bound by no limit.
        lock = findings.memlock(-1 if _may_lock() else resource.getrlimit(resource.RLIMIT_MEMLOCK)[1], arena)
    if settings.memory.lock == "off":
        lock = Finding(lock.check, Level.OK, 'memory.lock is "off"')
    yield lock
    yield findings.swap(lock.level is Level.OK and settings.memory.lock != "off")
    yield findings.huge_pages(settings.memory.huge_pages != "off", arena)
    yield findings.numa()
    yield findings.processor(settings.cpu.isa, available()[0], len(os.sched_getaffinity(0)))


# ---- the daemon ----


def _running(socket: Path, timeout: float) -> Running:
    try:
        with closing(DaemonProcess.at(socket)) as daemon:
            pid, limits, descriptors = daemon.pid, _limits_of(daemon.pid), _descriptors_of(daemon.pid)
    except SparkClientError:
        return Running()
    try:
        with Client(socket, timeout=timeout, name="sparkctl") as client:
            return Running(pid, client.status(), limits, descriptors)
    except SparkClientError:
        return Running(pid, {}, limits, descriptors)


def _daemon(socket: Path, running: Running) -> Finding:
    if not running.pid and _out_of_reach(socket):
        what = f"{socket} is out of this user's reach, so nothing is known of who listens there"
        return Finding("daemon", Level.WARN, what, "look as the daemon's user; socket.group lets a group in")
    if not running.pid:
        return Finding("daemon", Level.OK, f"none runs at {socket}; this is about one you start here and now")
    if not running.serves:
        what = f"process {running.pid} listens at {socket} and does not answer"
        return Finding(
            "daemon", Level.FAIL, what, f"sparkctl logs; if it stays so, kill {running.pid} and start it again"
        )
    state, reason = running.status["state"], running.status["reason"]
    what = f"process {running.pid}: {state}" + (f": {reason}" if reason else "")
    if state == "degraded":
        return Finding("daemon", Level.FAIL, what, "sparkctl logs")
    return Finding("daemon", Level.OK, what)


def _out_of_reach(socket: Path) -> bool:
    try:
        socket.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(socket, os.W_OK, effective_ids=True)


def _limits_of(pid: int) -> dict[str, int]:
    """Soft limits of a process by name ("open files"); empty when they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/limits").read_text()
    except OSError:
        return {}
    rows = re.findall(r"^Max (.+?) {2,}(\d+|unlimited)", text, re.MULTILINE)
    return {name: -1 if value == "unlimited" else int(value) for name, value in rows}


def _descriptors_of(pid: int) -> int | None:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None


# ---- model and memory ----


def _model(path: Path) -> Finding:
    """Whether it can be opened: every component of the path, every part of a set, the header."""
    try:
        model = ModelFile.open(path)
    except ModelFileError as error:
        where = f"{error.where}: " if error.where else ""
        return Finding("model", Level.FAIL, where + error.what, error.fix or "name another file")
    except SparkError as error:
        return Finding("model", Level.FAIL, str(error))
    parts = f", {len(model.shards)} parts" if len(model.shards) > 1 else ""
    return Finding("model", Level.OK, f"{path}: {model.architecture}, {size(model.total_bytes)}{parts}")


def _memory(settings: Settings, model: Path, running: Running, arena: int) -> tuple[Finding, int]:
    """Whether the model fits, as the daemon's own plan says, and the bytes of its weights in memory."""
    if running.serves:
        told = running.status["memory"]
        what = f"served; it needs {size(told['need_bytes'])} of {size(told['limit_bytes'])} ({told['limit']})"
        return _tier(what, running.status.get("residency", {})), arena
    chosen = dataclasses.replace(settings, model=ModelSettings(str(model)))
    command = [sys.executable, "-P", "-m", "sparkd.store.plan", "--settings", chosen.to_json()]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        what = f"{sys.executable} cannot be run: {error.strerror}"
        return Finding("memory", Level.FAIL, what, "install sparkd where the daemon's user may run it"), 0
    answer: dict[str, Any] = (
        json.loads(done.stdout) if done.returncode in (0, 1) and done.stdout else {"error": "the plan fails"}
    )
    if "error" in answer:
        return Finding("memory", Level.FAIL, answer["error"]), 0
    what = f"fits: needs {size(answer['need_bytes'])} of {size(answer['limit_bytes'])} ({answer['limit']})"
    return _tier(what, answer), answer["arena_bytes"]


def _tier(what: str, told: Mapping[str, Any]) -> Finding:
    """`what` fits, and whether that is all of the model; `told` by a plan or by the status."""
    if not told.get("partial"):
        return Finding("memory", Level.OK, what)
    what += f"; room for {told['slots']} of {told['records']} experts, the others are read from disk when used"
    return Finding("memory", Level.WARN, what, "raise the limit, or serve a smaller model, for more speed")


def _cgroup() -> Finding:
    try:
        limits = host_limits(0.0)
    except BudgetError as error:
        return Finding("cgroup", Level.WARN, str(error))
    tightest = min(limits, key=lambda limit: limit.size)
    if "this machine" in tightest.name:
        return Finding("cgroup", Level.OK, "none leaves less than the machine has")
    return Finding("cgroup", Level.OK, f"{tightest.name} leaves {size(tightest.size)}")


def _may_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> 14 & 1)
