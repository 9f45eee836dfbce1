"""What `sparkctl doctor` looks at, one function a check. All of /proc and /sys is looked up under `root`.

A finding says how things are and, unless they are well, what to do: `warn` for what costs speed or safety, `fail` for
what keeps the daemon from serving.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from pathlib import Path

from spark_client.address import SYSTEM_SOCKET
from sparkctl.tables import size

#: Descriptors with which 256 apps and all processes get by.
_DESCRIPTORS = 1024
#: Longest path of a socket file on Linux, and the longest name that the daemon gives one.
_PATH_BYTES = 107
_LONGEST_SOCKET = "calibrator.sock"
_HUGE_PAGE = 2 << 20
#: File systems whose files come over a network, or through another program.
_REMOTE = re.compile(r"nfs\d?|cifs|smb3?|9p|virtiofs|ceph|glusterfs|lustre|fuse(\..+|blk)?|sshfs")
#: What is left over on the disk of the profiles, at the least.
_FREE_BYTES = 64 << 20
_MORE_LOCKED = (
    'raise the limit (LimitMEMLOCK=infinity in the unit, memlock in /etc/security/limits.conf), or memory.lock = "off"'
)
ROOT = Path("/")


class Level(enum.Enum):
    """How a finding is meant."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; `fix` is empty when nothing needs to be done."""

    check: str
    level: Level
    what: str
    fix: str = ""


def locked(done: int, need: int, note: str) -> Finding:
    """What a daemon has locked: `done` of `need` bytes, and why it is not more."""
    what = f"{size(done)} of {size(need)} of weights are locked"
    if done == need:
        return Finding("locked memory", Level.OK, what)
    return Finding("locked memory", Level.WARN, what + (f": {note}" if note else ""), _MORE_LOCKED)


def memlock(soft: int, need: int) -> Finding:
    """`soft`: bytes that may be locked (-1: all); `need`: bytes of the weights, 0 when they are not known."""
    if soft == -1:
        return Finding("locked memory", Level.OK, "no limit")
    what = f"{size(soft)} may be locked"
    if need and soft >= need:
        return Finding("locked memory", Level.OK, f"{what}, enough for {size(need)} of weights")
    of = f", the weights take {size(need)}" if need else ""
    return Finding("locked memory", Level.WARN, f"{what}{of}: the rest may be swapped out", _MORE_LOCKED)


def swap(lockable: bool, root: Path = ROOT) -> Finding:
    """`lockable`: all weights may be locked, so that swap does not concern them."""
    lines = _read(root / "proc/swaps").splitlines()[1:]
    total = sum(int(fields[2]) * 1024 for fields in map(str.split, lines) if len(fields) > 2 and fields[2].isdigit())
    if not total:
        return Finding("swap", Level.OK, "none")
    if lockable:
        return Finding("swap", Level.OK, f"{size(total)}; the weights are locked, it does not concern them")
    return Finding(
        "swap",
        Level.WARN,
        f"{size(total)}, and the weights are not all locked: the first words after a pause may be slow",
        "raise the limit on locked memory, or swapoff -a",
    )


def huge_pages(wanted: bool, need: int, root: Path = ROOT, release: str | None = None) -> Finding:
    """`wanted`: memory.huge_pages is not off; `need`: bytes of the weights; `release`: of the kernel."""
    if not wanted:
        return Finding("huge pages", Level.OK, 'memory.huge_pages is "off"')
    pool = root / f"sys/kernel/mm/hugepages/hugepages-{_HUGE_PAGE // 1024}kB/free_hugepages"
    free = int(_read(pool) or 0) * _HUGE_PAGE
    if need and free >= need:
        return Finding("huge pages", Level.OK, f"the system's pool has {size(free)} free")
    version = tuple(map(int, re.findall(r"\d+", release or os.uname().release)[:2]))
    if version >= (6, 1):
        return Finding("huge pages", Level.OK, "the kernel joins pages into transparent ones after the load")
    pages = -(-need // _HUGE_PAGE) if need else "<bytes of the weights / 2 MiB>"
    return Finding(
        "huge pages",
        Level.WARN,
        f"Linux {version[0]}.{version[1]} joins no pages of shared memory and the system's pool has {size(free)} free",
        f"sysctl vm.nr_hugepages={pages}, or Linux 6.1",
    )


def numa(root: Path = ROOT) -> Finding:
    """Whether all memory is equally near to all processors."""
    online = _read(root / "sys/devices/system/node/online").strip() or "0"
    nodes = sum(int(last or first) - int(first) + 1 for first, last in re.findall(r"(\d+)(?:-(\d+))?", online))
    if nodes == 1:
        return Finding("NUMA", Level.OK, "one node")
    return Finding(
        "NUMA",
        Level.WARN,
        f"{nodes} nodes: weights on one are slow for the processors of the others",
        "numactl --interleave=all sparkd serve ..., or keep to one node: numactl -N 0 -m 0",
    )


def processor(isa: str, best: str, cores: int) -> Finding:
    """`isa`: the setting; `best`: what this machine runs; `cores`: processors this process may use."""
    what = f"{best}, {cores} processors may be used"
    if best == "portable":
        return Finding("processor", Level.WARN, f"{what}: no kernels for this machine, computing is slow", "use x86-64")
    if isa not in ("auto", best):
        return Finding("processor", Level.WARN, f"{what}, cpu.isa is {isa}", 'cpu.isa = "auto" is faster, same bits')
    if best == "x86-64":
        return Finding("processor", Level.WARN, f"{what}: no AVX2, computing is slow", "a processor with AVX2 and FMA")
    return Finding("processor", Level.OK, what)


def model_disk(path: Path, root: Path = ROOT) -> Finding:
    """The file system a model lies on, and whether it can be read past the page cache."""
    kind = file_system(path, root)
    where = f"{kind} at {path}"
    if _REMOTE.fullmatch(kind):
        return Finding("model's disk", Level.WARN, f"{where}: comes over a network or another program, loading is slow",
                       "copy the model to a local disk")  # fmt: skip
    if kind in ("tmpfs", "ramfs"):
        return Finding("model's disk", Level.WARN, f"{where}: lies in memory, the weights take it twice",
                       "move the model to a disk")  # fmt: skip
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        return Finding("model's disk", Level.OK, f"{where}; read through the page cache")
    return Finding("model's disk", Level.OK, f"{where}; read past the page cache")


def state_disk(folder: Path | None) -> Finding:
    """Room for the profiles of what experts are used."""
    if folder is None:
        return Finding("profiles", Level.WARN, "no folder for them: what was learned is forgotten at the end",
                       "set STATE_DIRECTORY, XDG_STATE_HOME or HOME")  # fmt: skip
    there = next(part for part in (folder, *folder.parents) if part.exists())
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        what = f"{folder} cannot be " + ("written" if there == folder else "made")
        return Finding("profiles", Level.WARN, f"{what}: what was learned is forgotten at the end",
                       "make it for the daemon's user, or set STATE_DIRECTORY (the unit does both)")  # fmt: skip
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    if free < _FREE_BYTES:
        return Finding("profiles", Level.WARN, f"{size(free)} are free at {there}", "make room")
    return Finding("profiles", Level.OK, f"{size(free)} are free at {folder}")


def socket_path(client: Path) -> Finding:
    """Whether all sockets beside the client socket can have their names, and be made."""
    folder = client.parent
    longest = max(len(os.fsencode(client)), len(os.fsencode(folder / _LONGEST_SOCKET)))
    if longest > _PATH_BYTES:
        return Finding(
            "sockets",
            Level.FAIL,
            f"paths in {folder} have up to {longest} bytes, a socket may have {_PATH_BYTES}",
            "choose a shorter run directory: SPARKD_RUN_DIR, or sparkd serve --run-dir",
        )
    if client == SYSTEM_SOCKET and not folder.exists():
        return Finding(
            "sockets",
            Level.WARN,
            f"{folder} is the service's, made when that starts; nothing names a folder for a daemon of your own",
            "start the unit, or set XDG_RUNTIME_DIR or SPARKD_RUN_DIR, or sparkd serve --run-dir",
        )
    there = next(part for part in (folder, *folder.parents) if part.exists())
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        if client == SYSTEM_SOCKET:
            return Finding(
                "sockets",
                Level.WARN,
                f"{folder} is the service's, this user cannot make it",
                "start the unit, or set XDG_RUNTIME_DIR or SPARKD_RUN_DIR for a daemon of your own",
            )
        return Finding(
            "sockets",
            Level.FAIL,
            f"{there} cannot be written, so that there can be no sockets in {folder}",
            "choose another run directory (SPARKD_RUN_DIR) or set XDG_RUNTIME_DIR",
        )
    return Finding("sockets", Level.OK, f"{client}, {longest} of {_PATH_BYTES} bytes at the longest")


def descriptors(soft: int, used: int | None) -> Finding:
    """`soft`: files a process may have open (-1: no limit); `used`: by the daemon that runs, None without one."""
    what = ("no limit" if soft == -1 else f"{soft} files may be open") + ("" if used is None else f", {used} are")
    if soft != -1 and soft < _DESCRIPTORS:
        fix = f"ulimit -n {_DESCRIPTORS} (LimitNOFILE= in the unit)"
        return Finding("descriptors", Level.WARN, f"{what}: many apps at once will be refused", fix)
    return Finding("descriptors", Level.OK, what)


def file_system(path: Path, root: Path = ROOT) -> str:
    """Type of the file system that holds `path`, as /proc/self/mountinfo tells; "unknown" where it does not."""
    real, best, kind = os.path.realpath(path), "", "unknown"
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), left.split()[4])
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _read(path: Path) -> str:
    """A file of the kernel's; empty where this machine has none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
