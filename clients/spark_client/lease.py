"""When to ping, and when the daemon counts as gone: times (seconds of any monotonic clock) in, decisions out."""

from __future__ import annotations

#: Until the daemon has told its lease.
_FIRST_LEASE_S = 10.0
#: Pings within one lease; also how often the clock is looked at.
_PINGS = 4


class Lease:
    """The lease of one connection. It ends when a ping stays unanswered for `seconds`; any message is an answer."""

    def __init__(self, now: float) -> None:
        self.seconds = _FIRST_LEASE_S
        self._pinged = now
        self._waiting_since: float | None = None

    @property
    def tick_s(self) -> float:
        """The longest time to wait before looking again."""
        return self.seconds / _PINGS

    def granted(self, seconds: float) -> None:
        """The daemon has told how long its lease is."""
        self.seconds = max(seconds, 0.1)

    def heard(self) -> None:
        """A message came."""
        self._waiting_since = None

    def over(self, now: float) -> bool:
        """Whether the daemon has been silent for too long."""
        return self._waiting_since is not None and now - self._waiting_since > self.seconds

    def ping_due(self, now: float) -> bool:
        """Whether a ping must be sent now; the caller sends it."""
        if now - self._pinged < self.tick_s:
            return False
        self._pinged = now
        if self._waiting_since is None:
            self._waiting_since = now
        return True
