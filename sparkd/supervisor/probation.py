"""Which request costs workers their lives: those that ran when one ended are suspects and have to prove themselves.

              a worker ended                      another ended
    clear ─────────────────────► suspect ──────────────────────────► accused ──► failed
      ▲   (beside others)           │        (this one was on trial)    │  (nothing else ran, MAX_CRASHES in all)
      └── enough tokens since ──────┴───────────────────────────────────┘

At most one suspect runs at a time, beside requests that are clear, so that the next crash has one cause. An accused
request runs with nothing beside it. So a request fails only after a worker ended while it ran alone, and an innocent
one waits at most while the suspects before it prove themselves. Texts that apps want tokenized are tried in the same
way; an answer clears them. Pure: entries of the journal in, decisions out.
"""

from __future__ import annotations

from collections.abc import Collection, Sized
from typing import Protocol, TypeVar

from sparkd.supervisor.journal import Standing

#: Workers that may end while they run one request before it counts as the cause.
MAX_CRASHES = 3
#: Output tokens that prove a suspect innocent after its first crash; each further one multiplies them by as many.
PROOF_TOKENS = 8


class Tried(Protocol):
    """What may be the cause: a request's entry in the journal, or a text that is to be tokenized."""

    crashes: int
    standing: Standing
    proof_at: int

    @property
    def produced(self) -> Sized:
        """Output so far."""
        ...


_Tried = TypeVar("_Tried", bound=Tried)


def may_start(entry: Tried, running: Collection[Tried]) -> bool:
    """Whether a request may join those that run."""
    if any(other.standing is not Standing.CLEAR for other in running):
        return False
    return entry.standing is not Standing.ACCUSED or not running


def produced(entry: Tried) -> None:
    """A request has one more output token: one on trial may be cleared by it."""
    if entry.standing is not Standing.CLEAR and len(entry.produced) >= entry.proof_at:
        entry.standing = Standing.CLEAR


def crashed(running: Collection[_Tried]) -> _Tried | None:
    """A worker ended while it ran these: note who may have been the cause; returns the request that fails for it."""
    alone = len(running) == 1
    blamed = [entry for entry in running if alone or entry.standing is not Standing.CLEAR]
    for entry in blamed or running:
        entry.crashes += 1
        entry.standing = Standing.ACCUSED if blamed else Standing.SUSPECT
        entry.proof_at = len(entry.produced) + PROOF_TOKENS**entry.crashes
    return next((entry for entry in blamed if alone and entry.crashes >= MAX_CRASHES), None)
