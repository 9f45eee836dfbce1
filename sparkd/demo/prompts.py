"""What the demo asks: the domains the built-in model was trained on (MODEL_CARD.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question (`chat`) or the beginning of a text to continue."""

    domain: str
    text: str
    chat: bool


PROMPTS = (
    Prompt("about itself", "Who are you?", chat=True),
    Prompt("about itself", "What is expert residency?", chat=True),
    Prompt("dictionary", "Define lantern.", chat=True),
    Prompt("python", "Write Python: Return the sum of two numbers.", chat=True),
    Prompt("c", "/*\n** Return the number of", chat=False),
    Prompt("manual", "SELECT — retrieve rows", chat=False),
    Prompt("scripture", "And the LORD spake unto Moses, saying,", chat=False),
    Prompt("prose", "Elizabeth was much surprised when Mr. Darcy", chat=False),
    Prompt("speech", "The Secretary of the Treasury reports that", chat=False),
)
