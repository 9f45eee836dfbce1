"""What a profile is worth, and whether the traffic is still the one it was made from. Pure.

The test for drift: take the hottest quarter of all records by the profile, in which a row of a tag counts half after
`HALF_LIFE` more. See how much of the work they did in the profile, and how much lately (half after `RECENT` rows);
the profile is taken without what is counted as of late. Traffic has drifted when lately they did `DRIFT` of all work
less than before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkd.calibration.counts import RoutingCounts

#: Shares of the records for which it is told how much work they do.
SHARES = (0.25, 0.4, 0.6)
#: Part of all work by which traffic and profile may differ, and the decode rows of late without which nothing is said.
DRIFT = 0.05
ENOUGH_ROWS = 256.0
#: A hot set that does this much more of the work than its share of the records is worth having.
WORTH_HAVING = 0.05

Table = NDArray[np.float64]


class Drift(enum.Enum):
    """What the test says."""

    UNKNOWN = "too little traffic to tell"
    NONE = "traffic is as the profile says"
    DRIFTED = "traffic has drifted away from the profile"


@dataclass(frozen=True, slots=True)
class Worth:
    """`profile`: part of all work that the hottest `SHARES` of the records do; `recent`: of that of late.

    For `recent` the hottest are those of before.
    """

    profile: tuple[float, ...]
    recent: tuple[float, ...]
    drift: Drift
    having: bool


def coverage(choice: Table, work: Table, share: float) -> float:
    """Part of the uses in `work` that the hottest `share` of the records by `choice` had; 0 without any.

    Tables are [layers, experts]; records that a layer does not have were never used.
    """
    total = float(work.sum())
    hottest = np.argsort(-choice.ravel(), kind="stable")[: round(choice.size * share)]
    return float(work.ravel()[hottest].sum()) / total if total else 0.0


def worth(counts: RoutingCounts) -> Worth:
    """Of the decode counts as they are blended now."""
    table, late = counts.blended(), counts.recent.table
    before = np.maximum(table - late, 0.0)
    known = tuple(coverage(table, table, share) for share in SHARES)
    recent = tuple(coverage(before, late, share) for share in SHARES)
    if min(counts.blended_rows - counts.recent.rows, counts.recent.rows) < ENOUGH_ROWS:
        drift = Drift.UNKNOWN
    else:
        drift = Drift.DRIFTED if recent[0] < coverage(before, before, SHARES[0]) - DRIFT else Drift.NONE
    return Worth(known, recent, drift, known[0] > SHARES[0] + WORTH_HAVING)


def describe(counts: RoutingCounts) -> dict[str, Any]:
    """What status document and `sparkctl profile` tell (docs/status.md)."""
    found = worth(counts)
    recent = sum(traffic.recent for traffic in counts.tags.values())
    tags: dict[str, Any] = {}
    for tag, traffic in sorted(counts.tags.items()):
        table = traffic.decode.table
        tags[tag] = {
            "rows": traffic.decode.rows,
            "recent": traffic.recent / recent if recent else 0.0,
            "hottest": [coverage(table, table, share) for share in SHARES],
        }
    return {
        "shares": list(SHARES),
        "hottest": list(found.profile),
        "hottest_recent": list(found.recent),
        "recent_rows": counts.recent.rows,
        "drift": found.drift.value,
        "drifted": found.drift is Drift.DRIFTED,
        "worth_having": found.having,
        "tags": tags,
    }
