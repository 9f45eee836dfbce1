"""Does what a model needs in a tier fit into what there is? Pure: numbers in, answer or refusal out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sparkd.errors import BudgetError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes a daemon takes in host memory. `slack` is what the processes themselves need."""

    core: int
    records: int
    headers: int
    directory: int
    state: int
    slack: int

    @property
    def arena(self) -> int:
        """The shared region: weights and what finds them."""
        return self.core + self.records + self.headers + self.directory

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


def check_fit(needs: Needs, limits: Sequence[Limit], where: str) -> Limit:
    """The limit that leaves least, when `needs` fit all. BudgetError names need, limit and what would fit otherwise.

    A limit below zero (more in use than allowed) counts as zero.
    """
    wanted = {Scope.ARENA: needs.arena, Scope.ALL: needs.total}
    limits = [Limit(limit.name, max(limit.size, 0), limit.scope) for limit in limits]
    tightest = min(limits, key=lambda limit: limit.size - wanted[limit.scope])
    need = wanted[tightest.scope]
    if need <= tightest.size:
        return tightest
    parts = [f"{needs.records / GIB:.2f} experts", f"{needs.core / GIB:.2f} core"]
    if tightest.scope is Scope.ALL:
        parts += [f"{needs.state / GIB:.2f} sequences", f"{needs.slack / GIB:.2f} processes"]
    weights = max(tightest.size - (need - needs.core - needs.records), 0)
    raise BudgetError(
        f"needs {_gib(need)} of {tightest.scope.value} ({', '.join(parts)} ...), "
        f"but {tightest.name} allows {_gib(tightest.size)}",
        where=where,
        fix=f"{weights / GIB:.2f} GiB of weights would fit: choose a smaller model or raise the limit by "
        f"{_gib(need - tightest.size)}",
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB ({size} bytes)"
