"""The one error hierarchy: what can go wrong, said for people.

Possible faults are `SparkError`s and reach the user as one line: where, what, what to do.
Impossible states raise built-in exceptions where they happen and keep their traceback.
"""

from __future__ import annotations

#: Characters of a line; what a file or an app spells may be quoted in it.
_LONGEST = 2000


class SparkError(Exception):
    """A fault that a user can understand: `what` happened, `where` (file, key, byte offset), how to `fix` it."""

    #: Stable machine name of the kind, sent over the socket.
    code = "error"

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        line = f"{line}; {self.fix}" if self.fix else line
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


class ConfigError(SparkError):
    """A setting is unknown or impossible."""

    code = "config"


class ModelFileError(SparkError):
    """A model file is damaged, incomplete, or not what it says."""

    code = "model_file"


class UnsupportedError(SparkError):
    """Well formed, but something sparkd does not do (yet): named, never ignored."""

    code = "unsupported"


class BudgetError(SparkError):
    """The needs exceed a limit of this machine or of the settings."""

    code = "budget"


class DeviceError(SparkError):
    """The GPU refuses something, or is gone."""

    code = "device"


class RequestError(SparkError):
    """One request cannot be served; others are not concerned."""

    code = "request"


class UnavailableError(SparkError):
    """The daemon (or the part of it that is needed) cannot be reached now; trying again later may work."""

    code = "unavailable"


class BusyError(UnavailableError):
    """Too much is open or waits already; others keep their place."""

    code = "busy"
