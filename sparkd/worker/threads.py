"""How many threads compute: one per physical core, within what affinity and cgroups leave to this process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def count_threads(setting: int, root: Path = Path("/")) -> int:
    """The number for the setting `cpu.threads` (0: as many as make sense); /proc and /sys are read under `root`."""
    if setting:
        return setting
    cores = physical_cores(os.sched_getaffinity(0), root)
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def physical_cores(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Cores that the logical processors `cpus` belong to; a processor whose siblings are not known is a core."""
    siblings = {
        _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus
    }
    return len(siblings)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that the cgroups of this process allow; None without a limit."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers != "" and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = top / path.lstrip("/")
        for level in (folder, *folder.parents):
            quota, period = _limit(level, version=1 if controllers else 2)
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
            if level == top:
                break
    return min(quotas, default=None)


def _limit(folder: Path, version: int) -> tuple[str, str]:
    """Quota and period in microseconds, as a cgroup's files say ("max", -1 or nothing: no limit)."""
    if version == 1:
        return _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return quota, period


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
