"""Signs of life of one child: pure, times in seconds of the supervisor's clock.

A child's heartbeats come from a thread of their own and tell whether its work goes on. So three things differ:

    silent      no heartbeats: the process is stopped (or the machine is); it is not relied on, and lost after a while
    busy        heartbeats, one long piece of work: nothing is wrong
    stuck       heartbeats, but the same piece of work for so long that it will not end
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds without a heartbeat (three are missing) after which a child that served is not relied on. The supervisor
#: looks at that moment: a child that stops is missed within two seconds, whatever it did last.
SILENT_S = 1.5
#: Seconds without a heartbeat after which a child is replaced, and how long the first one may take.
LOST_S = 10.0
FIRST_S = 60.0
#: Seconds one piece of work (a step, a part of loading) may take.
STUCK_S = 120.0


@dataclass(slots=True)
class Pulse:
    """When a child was `heard` last, and when its work was seen going on last (it `moved`)."""

    heard: float
    moved: float
    progress: int | None = None

    @staticmethod
    def since(now: float) -> Pulse:
        """Of a process that starts now."""
        return Pulse(now, now)

    def beat(self, progress: int, busy: bool, now: float) -> None:
        """A heartbeat has come."""
        self.heard = now
        if progress != self.progress or not busy:
            self.progress, self.moved = progress, now

    def overslept(self, seconds: float, now: float) -> None:
        """The supervisor itself did nothing for so long, and could not have heard anything."""
        self.heard = min(now, self.heard + seconds)
        self.moved = min(now, self.moved + seconds)

    @property
    def silent_at(self) -> float:
        """When it counts as silent unless it is heard before."""
        return self.heard + SILENT_S

    def silent(self, now: float) -> bool:
        """Whether nothing should be asked of it."""
        return now >= self.silent_at

    def lost(self, now: float) -> str:
        """Why it must be replaced, as the end of a sentence; empty while it need not."""
        patience = FIRST_S if self.progress is None else LOST_S
        if now - self.heard > patience:
            return f"showed no life for {patience:.0f} s and was killed"
        if now - self.moved > STUCK_S:
            return f"got no further for {STUCK_S:.0f} s and was killed"
        return ""
