"""The outcome of a plan, apart from what it takes to make one: the supervisor knows no model files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Rows of the largest step, which decides how many pages a sliding window spans.
STEP_ROWS = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """The arena to make, what else is needed, and the limit that leaves least; sizes in bytes.

    `context` are the positions one request may have, `model_context` those of the model itself, `notes` what a reader
    of the log should know about the model.
    `slots` are there for `records`; fewer than these: they come and go (`partial`).
    `vocab` counts the ids that mean something; one token is at most `longest_token` bytes of text (0: not known).
    `device`: what computes, "cpu" or "cuda".
    `expert_layers` have at most `experts` each. `arena` names the arena's contents and layout: an arena of this name
    may be used as it is.
    """

    model: str
    path: str
    fingerprint: str
    architecture: str
    context: int
    model_context: int
    vocab: int
    longest_token: int
    expert_layers: int
    experts: int
    notes: list[str]
    arena: str
    arena_bytes: int
    core_bytes: int
    records_bytes: int
    records: int
    slots: int
    partial: bool
    device: Literal["cpu", "cuda"]
    state_bytes: int
    need_bytes: int
    limit: str
    limit_bytes: int
