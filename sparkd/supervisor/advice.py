"""What the owner of a tier and the calibrator have for each other, kept for whichever of them begins again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.ipc.internal import Placement, Tier
from sparkd.ipc.messages import Message

#: Whose each tier is: there is one at a time that does not hold everything.
_OWNERS = {"host": "store", "device": "worker"}


@dataclass(slots=True)
class Advice:
    """The last words of a tier's owner and of the calibrator.

    Their receiver is told when they come, and again when it is new.
    """

    tier: Tier | None = None
    placement: Placement | None = None

    def take(self, msg: Tier | Placement) -> str:
        """Note what has come; the role of whom it is for."""
        if isinstance(msg, Tier):
            self.tier = msg
            return "calibrator"
        self.placement = msg
        return _OWNERS.get(msg.tier, "store")

    def for_new(self, role: str) -> list[Message]:
        """What a process of this role that has just begun should know, in order."""
        if role == "calibrator":
            return [msg for msg in (self.placement, self.tier) if msg is not None]
        return [] if self.placement is None or _OWNERS.get(self.placement.tier) != role else [self.placement]
