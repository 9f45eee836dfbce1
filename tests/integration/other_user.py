"""Programs run as a user who owns nothing: tests about permissions are vacuous as root.

Where the interpreter or this checkout lies in a folder that other users may not enter (/root, often), the program gets
a mount namespace of its own, in which that folder can be entered and holds nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

#: The user id of nobody, who owns no files.
NOBODY = 65534
_ROOT = Path(__file__).resolve().parent.parent.parent
_NEEDED = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), _ROOT}


def nobody(*arguments: str) -> list[str]:
    """The command line of this interpreter with `arguments`, as another user; skips where that cannot be."""
    import pytest

    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    if not _closed():
        return command
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"another user may not enter {next(iter(_closed()))}, and no mount namespace can be made")
    return [*unshare, *command]


def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter as another user, without anybody's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARKD_", "XDG_", "RUNTIME_"))}
    return subprocess.run(
        nobody(*arguments), capture_output=True, text=True, cwd="/", env=kept | {"HOME": "/nonexistent"}, check=False
    )


def _closed() -> dict[Path, list[Path]]:
    """Folders that others may not enter, and what is needed in each."""
    closed = defaultdict(list)
    for path in _NEEDED:
        for folder in reversed([path, *path.parents]):
            if not folder.stat().st_mode & 0o001:
                closed[folder].append(path)
                break
    return closed


def _open() -> None:
    """In a namespace of our own: put an open folder with what is needed in the place of each closed one."""
    for folder, needed in _closed().items():
        kept = []
        for path in needed:
            place = tempfile.mkdtemp(prefix="sparkd-test-")
            subprocess.run(["mount", "--bind", path, place], check=True)
            kept.append((path, place))
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder], check=True)
        for path, place in kept:
            path.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--move", place, path], check=True)
            Path(place).rmdir()


def _main() -> None:
    _open()
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    _main()
