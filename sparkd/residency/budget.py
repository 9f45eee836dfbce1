"""Does what a model needs in a tier fit into what there is? Pure: numbers in, answer out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes a daemon takes in host memory. `slack` is what the processes themselves need.

    `padding` lies between the parts of the arena, and up to its last whole page.
    """

    core: int
    records: int
    headers: int
    directory: int
    state: int
    slack: int
    padding: int = 0

    @property
    def arena(self) -> int:
        """The shared region: weights and what finds them."""
        return self.core + self.records + self.headers + self.directory + self.padding

    @property
    def total(self) -> int:
        """All of it."""
        return self.arena + self.state + self.slack


class Scope(Enum):
    """What a limit is about."""

    ARENA = "weights"
    ALL = "host memory"


@dataclass(frozen=True, slots=True)
class Limit:
    """`size` bytes may be used, says `name` (a setting, a cgroup file, the machine)."""

    name: str
    size: int
    scope: Scope = Scope.ALL


@dataclass(frozen=True, slots=True)
class Fit:
    """Needs against the limit that leaves least."""

    needs: Needs
    limit: Limit

    @property
    def need(self) -> int:
        """Bytes of the needs that the limit is about."""
        return self.needs.arena if self.limit.scope is Scope.ARENA else self.needs.total

    @property
    def missing(self) -> int:
        """Bytes by which the need exceeds the limit; 0: it fits."""
        return max(self.need - self.limit.size, 0)

    @property
    def weights(self) -> int:
        """Bytes of core and records together that would fit beside the other needs."""
        return max(self.limit.size - (self.need - self.needs.core - self.needs.records), 0)


def room(needs: Needs, limits: Sequence[Limit]) -> int:
    """Bytes that all limits leave for an arena of any size, beside the other needs; 0: none."""
    others = {Scope.ARENA: 0, Scope.ALL: needs.total - needs.arena}
    return max(min(limit.size - others[limit.scope] for limit in limits), 0)


def tightest(needs: Needs, limits: Sequence[Limit]) -> Fit:
    """How the needs stand against the limit that leaves least.

    A limit below zero (more in use than allowed) counts as zero.
    """
    fits = [Fit(needs, Limit(limit.name, max(limit.size, 0), limit.scope)) for limit in limits]
    return min(fits, key=lambda fit: fit.limit.size - fit.need)
