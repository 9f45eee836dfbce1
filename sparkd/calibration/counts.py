"""How often each expert was routed to, decode and prefill apart. Pure: ids in, counts out; nothing else is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Words of one table of counts (layers x experts) at most: 32 MiB.
MAX_WORDS = 1 << 22


class RoutingError(ValueError):
    """Routed ids that cannot be: one line that says what is wrong with them."""


class RoutingCounts:
    """Counts per (expert layer, expert) of one model.

    `decode` and `prefill` are uint64 [layers, experts]; `decode_rows` and `prefill_rows` count token rows.
    """

    def __init__(self, layers: int, experts: int) -> None:
        if not (layers > 0 and experts > 0 and layers * experts <= MAX_WORDS):
            raise RoutingError(f"{layers} layers of {experts} experts: at most {MAX_WORDS} records can be counted")
        self.decode: NDArray[np.uint64] = np.zeros((layers, experts), np.uint64)
        self.prefill: NDArray[np.uint64] = np.zeros((layers, experts), np.uint64)
        self.decode_rows = 0
        self.prefill_rows = 0

    def add(self, ids: NDArray[np.int16], is_decode: NDArray[np.bool_]) -> None:
        """Count one step: `ids` [layers, rows, top_k], `is_decode` [rows].

        RoutingError, and nothing is counted, when a shape is wrong, an id is no expert, or a row names one twice.
        """
        layers, experts = self.decode.shape
        if ids.ndim != 3 or ids.shape[0] != layers or is_decode.shape != ids.shape[1:2]:
            raise RoutingError(f"ids {ids.shape} for {is_decode.shape} rows do not fit {layers} layers")
        if ids.size and not (ids.min() >= 0 and ids.max() < experts):
            raise RoutingError(f"expert ids from {ids.min()} to {ids.max()}, the model has {experts}")
        ordered = np.sort(ids, axis=2)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RoutingError("a row names an expert twice")
        self.decode += _histogram(ids[:, is_decode], experts)
        self.prefill += _histogram(ids[:, ~is_decode], experts)
        decode_rows = int(is_decode.sum())
        self.decode_rows += decode_rows
        self.prefill_rows += len(is_decode) - decode_rows


def busiest_share(counts: NDArray[np.uint64], share: float = 0.25) -> list[float]:
    """For each layer the part of all its work that its busiest `share` of experts did; 0 without any work."""
    experts = counts.shape[1]
    ordered = np.sort(counts, axis=1)[:, ::-1]
    top = ordered[:, : max(1, round(experts * share))].sum(axis=1).astype(np.float64)
    total = counts.sum(axis=1).astype(np.float64)
    return [float(t / n) if n else 0.0 for t, n in zip(top, total, strict=True)]


def _histogram(ids: NDArray[np.int16], experts: int) -> NDArray[np.uint64]:
    layers = len(ids)
    flat = ids.reshape(layers, -1).astype(np.int64) + np.arange(layers)[:, None] * experts
    return np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts).astype(np.uint64)
