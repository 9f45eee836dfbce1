"""Settings that change in a running daemon (SIGHUP)."""

from __future__ import annotations

import grp
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkd.config import Settings, keys
from sparkd.errors import ConfigError, SparkError
from sparkd.ipc.messages import Json
from sparkd.supervisor.run_lock import RunLock

#: Keys that take effect at once; all others need a restart.
LIVE = {
    ("limits", "queue"),
    ("limits", "timeout_s"),
    ("log", "level"),
    ("scheduler", "max_step_ms"),
    ("socket", "group"),
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """The settings from now on, and which keys differ: those that take effect, those that wait for a restart."""

    settings: Settings
    applied: list[str]
    restart: list[str]


def change(current: Settings, wanted: Settings) -> Change:
    """What of `wanted` takes effect without a restart."""
    values: dict[str, dict[str, Any]] = current.to_dict()
    applied, restart = [], []
    for section, key, _ in keys():
        value = getattr(getattr(wanted, section), key)
        if value == values[section][key]:
            continue
        if (section, key) in LIVE:
            values[section][key] = value
            applied.append(f"{section}.{key}")
        else:
            restart.append(f"{section}.{key}")
    return Change(Settings.of(values), applied, restart)


class Reloader:
    """Reads the settings again; `outcome` goes into the status document."""

    def __init__(self, read: Callable[[], Settings] | None) -> None:
        """`read` gives the settings as they are written now (SparkError: they are wrong); None: nothing to read."""
        self._read = read
        self.outcome: dict[str, Json] = {}

    def reload(self, current: Settings, place: RunLock) -> Settings:
        """The settings from now on: the current ones when those that are written now cannot be used."""
        try:
            if self._read is None:
                raise ConfigError("the settings came from the command line alone, there is nothing to read again")
            found = change(current, self._read())
            if "socket.group" in found.applied:
                _change_group(place, found.settings.socket.group)
        except SparkError as error:
            _log.error("settings stay as they are: %s", error)
            self._note([], [], str(error))
            return current
        _log.info("settings read again: %s", ", ".join(found.applied) or "nothing has changed that can")
        if found.restart:
            _log.warning("settings that need a restart: %s", ", ".join(found.restart))
        self._note(found.applied, found.restart, "")
        return found.settings

    def _note(self, applied: list[str], restart: list[str], error: str) -> None:
        count = self.outcome.get("count", 0) + 1
        self.outcome = {"count": count, "applied": applied, "restart": restart, "error": error, "revived": []}


def group_id(name: str) -> int:
    """The id of a group, -1 for no name. ConfigError when there is none."""
    if not name:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"no group {name!r} on this machine", where="socket.group") from None


def _change_group(place: RunLock, name: str) -> None:
    try:
        place.change_group(group_id(name))
    except OSError as error:
        raise ConfigError(
            f"the client socket cannot be given to {name or 'nobody'!r}: {error.strerror}", where="socket.group"
        ) from None
