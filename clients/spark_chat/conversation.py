"""What has been said, as the daemon wants it. No terminal, no connection."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Conversation:
    """A system message, if any, and turns of user and assistant."""

    system: str = ""
    _turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All of it, the system message first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self._turns]

    @property
    def turns(self) -> int:
        """How often the user has said something."""
        return sum(turn["role"] == "user" for turn in self._turns)

    def say(self, text: str) -> None:
        """The user's turn."""
        self._turns.append({"role": "user", "content": text})

    def hear(self, text: str) -> None:
        """The answer; of one that was cut short, what there is."""
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget the user's last turn, which got no answer."""
        self._turns.pop()

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self._turns.clear()
