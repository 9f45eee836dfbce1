"""What must hold before a step, for every executor, and of the experts that a device chose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparkd.errors import RequestError
from sparkd.executors.base import Batch, Segment
from sparkd.graph.program import Program
from sparkd.graph.state import PAGE, StateLayout


def check_batch(
    batch: Batch, program: Program, layout: StateLayout, pages: Sequence[int], slots: int, max_rows: int
) -> None:
    """Raise unless `batch` can run: nothing has been touched then.

    `pages` counts the physical pages of each group, `slots` the state records. RequestError: a token id outside the
    vocabulary. ValueError: what only a mistaken caller can hand over (rows that no segment covers, a page table that
    misses a visible position, a sequence that is in the batch twice, ...).
    """
    rows = len(batch.tokens)
    if not 1 <= rows <= max_rows:
        raise ValueError(f"a step takes 1 to {max_rows} rows, not {rows}")
    if sum(s.length for s in batch.segments) != rows or any(s.length < 1 for s in batch.segments):
        raise ValueError(f"segments of {[s.length for s in batch.segments]} rows do not cover {rows} rows")
    wanted = batch.logits_rows.tolist()
    if wanted and not 0 <= min(wanted) <= max(wanted) < rows:
        raise ValueError(f"logits of rows {wanted} wanted, of {rows} rows")
    written = [_check_segment(segment, program, layout, pages, slots) for segment in batch.segments]
    _check_ownership(batch.segments, written, layout)
    tokens = batch.tokens.tolist()
    if not 0 <= min(tokens) <= max(tokens) < program.vocab:
        outside = next(token for token in tokens if not 0 <= token < program.vocab)
        raise RequestError(f"token id {outside} is outside the vocabulary of {program.vocab}")


def _check_segment(
    segment: Segment, program: Program, layout: StateLayout, pages: Sequence[int], slots: int
) -> list[list[int]]:
    """The physical pages of each group that the segment writes, in order."""
    end = segment.start + segment.length
    if not 0 <= segment.start < end <= program.context:
        raise ValueError(f"positions {segment.start} to {end - 1} lie outside the context of {program.context}")
    if layout.record_bytes and not 0 <= segment.state < slots:
        raise ValueError(f"state slot {segment.state} does not exist, there are {slots}")
    if len(segment.pages) != len(layout.groups):
        raise ValueError(f"{len(segment.pages)} page tables for {len(layout.groups)} page groups")
    written = []
    for group, table, count in zip(layout.groups, segment.pages, pages, strict=True):
        first, last = group.first_page(segment.start), (end - 1) // PAGE
        visible = table[first : last + 1].tolist()
        if len(visible) != last + 1 - first or min(visible) < 0 or max(visible) >= count:
            raise ValueError(
                f"positions {segment.start} to {end - 1} (window {group.window}) need logical pages {first} to {last}"
                f" among {count} physical ones, the table maps them to {visible}"
            )
        written.append(visible[segment.start // PAGE - first :])
    return written


def _check_ownership(segments: Sequence[Segment], written: Sequence[list[list[int]]], layout: StateLayout) -> None:
    """No two segments may write the same page or the same record; `written`: pages by segment and group."""
    if layout.record_bytes:
        states = [s.state for s in segments]
        if len(set(states)) != len(states):
            raise ValueError(f"a sequence is in the batch twice: state slots {states}")
    for number in range(len(layout.groups)):
        taken: set[int] = set()
        for groups in written:
            mine = set(groups[number])
            if len(mine) != len(groups[number]) or mine & taken:
                raise ValueError(f"two places of the batch write page {min(mine & taken or mine)} of group {number}")
            taken |= mine


def check_experts(ids: NDArray[np.int16], experts: Sequence[int]) -> None:
    """Raise ValueError unless ids [layers, rows, top_k] are in range and different within each row."""
    if not ids.size:
        return
    ordered = np.sort(ids, axis=-1)
    outside = (ordered[:, :, 0] < 0) | (ordered[:, :, -1] >= np.asarray(experts)[:, None])
    if outside.any():
        layer = int(outside.any(axis=1).argmax())
        raise ValueError(f"expert layer {layer} chose an expert outside 0 to {experts[layer] - 1}")
    twice = ordered[:, :, 1:] == ordered[:, :, :-1]
    if twice.any():
        raise ValueError(f"expert layer {int(twice.any(axis=(1, 2)).argmax())} chose one expert twice for a row")
