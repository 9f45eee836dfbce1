"""How much host memory this process group may take: the setting, every cgroup above it, and what the machine has free.

Usage of a cgroup counts the page cache of files it has read; the kernel gives that back under pressure, so it counts as
free here. Otherwise the second start of a daemon would be refused for what the first one read. Beyond `memory.high` a
cgroup is slowed down to a crawl, so that is a limit as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparkd.errors import BudgetError
from sparkd.ipc.mapping import HUGE_PAGE
from sparkd.residency.budget import GIB, Limit, Scope


@dataclass(frozen=True, slots=True)
class _Version:
    """File names of a cgroup version, and the reclaimable lines of its memory.stat."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def host_limits(host_gib: float, held: int = 0, root: Path = Path("/")) -> list[Limit]:
    """All limits, in bytes still to be had; `host_gib` 0 sets none.

    `held` bytes are set aside already for the very purpose (an arena that is kept, a pool of huge pages) and count as
    free. /proc and /sys are looked up under `root`. BudgetError when nothing tells how much memory there is.
    """
    limits = [Limit("memory.host_gib", int(host_gib * GIB), Scope.ARENA)] if host_gib else []
    limits += [Limit(limit.name, limit.size + held) for limit in _cgroup_limits(root)]
    limits += _machine_limit(root, held)
    if not limits:
        raise BudgetError(
            "neither /proc/meminfo nor a cgroup tells how much memory there is",
            where="host memory",
            fix="set memory.host_gib",
        )
    return limits


def pool_bytes(root: Path = Path("/")) -> int:
    """Free bytes of the system's pool of huge pages, which are part of no other limit."""
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{HUGE_PAGE // 1024}kB"
    free, reserved = (_read(folder / name).strip() for name in ("free_hugepages", "resv_hugepages"))
    if not free.isdigit():
        return 0
    return max(int(free) - (int(reserved) if reserved.isdigit() else 0), 0) * HUGE_PAGE


def _machine_limit(root: Path, held: int) -> Iterator[Limit]:
    """What the machine has free, and never more than it has: some virtual ones tell of more."""
    told: dict[str, str] = dict(re.findall(r"^(\w+): +(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE))
    if "MemAvailable" not in told:
        return
    available = int(told["MemAvailable"]) * 1024 + held
    total = int(told.get("MemTotal", told["MemAvailable"])) * 1024
    if available > total + held:
        yield Limit("all memory of this machine (MemTotal; MemAvailable is even more)", total)
    else:
        yield Limit("the memory available on this machine (MemAvailable)", available)


def _cgroup_limits(root: Path) -> Iterator[Limit]:
    """What each cgroup leaves, from this process's own up to the mounted root, where it has a limit."""
    for controllers, path in _own_cgroups(root):
        version = _V2 if controllers == "" else _V1
        mount = _mount(root, controllers)
        if mount is None:
            continue
        mounted, top = mount
        folder = top / path.relative_to(mounted) if path.is_relative_to(mounted) else top
        while True:
            for name in version.limits:
                left = _left(folder, name, version)
                if left is not None:
                    yield Limit(f"{name} of cgroup /{folder.relative_to(root)}", left)
            if folder == top:
                break
            folder = folder.parent


def _own_cgroups(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """(controllers, path) of the hierarchies that may limit memory: v2 has no controllers named."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            yield controllers, PurePosixPath(path)


def _mount(root: Path, controllers: str) -> tuple[PurePosixPath, Path] | None:
    """(cgroup that is mounted, where) of a hierarchy.

    A line of mountinfo: id parent device ROOT POINT options ... - TYPE source SUPER_OPTIONS.
    """
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if controllers == "" and kind[0] == "cgroup2":
            return PurePosixPath(fields[3]), root / fields[4].lstrip("/")
        if controllers and kind[0] == "cgroup" and "memory" in kind[-1].split(","):
            return PurePosixPath(fields[3]), root / fields[4].lstrip("/")
    return None


def _left(folder: Path, name: str, version: _Version) -> int | None:
    """Limit of this name minus what is used and cannot be given back; None without a limit."""
    limit = _read(folder / name).strip()
    if not limit.isdigit():
        return None
    usage = _read(folder / version.usage).strip()
    stat: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / "memory.stat"), re.MULTILINE))
    cache = sum(int(stat.get(reclaimable, 0)) for reclaimable in version.reclaimable)
    used = max(int(usage) - cache, 0) if usage.isdigit() else 0
    return int(limit) - used


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
