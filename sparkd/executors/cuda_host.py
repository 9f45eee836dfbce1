"""The CPU's part of a device's step: experts whose records are not on the device, computed in host memory.

    compute   route ── tell │ gate, up, down of what is here │ take ── sum
    a side                └─► the CPU: the others ────────────┘

The device writes into host memory what it misses, and the rows that want it; its driver calls `HostExperts`, which
computes as the native executor does; the device reads the results from host memory. What is missed, the device's own
table says (0: no record), which changes with its stream. The results of each (row, rank) are summed by the device, in
the one order of docs/arithmetic.md. The call is native from end to end: a thread that waits for the device may hold
the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from typing import Any

from sparkd.errors import DeviceError
from sparkd.executors.cuda_batch import MAX_ROWS
from sparkd.executors.device import ALIGNMENT, Device, HostCall
from sparkd.executors.weights import Weights
from sparkd.graph.program import Program
from sparkd.kernels import native


class HostExperts:
    """Computes experts of `program` with `threads` threads of the CPU; `weights` has all records in host memory."""

    def __init__(self, device: Device, program: Program, weights: Weights, threads: int, isa: str = "auto") -> None:
        module: Any = native(isa)
        layers = program.expert_layers
        pairs = MAX_ROWS * layers[0].top_k
        parts = (
            4 * (1 + pairs),
            4 * MAX_ROWS * max(layer.gate.columns for layer in layers),
            4 * pairs * max(layer.down.rows for layer in layers),
        )
        sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in parts]
        self._memory = device.pinned(sum(sizes))
        self._memory[:] = 0
        #: int32: rows, then of each (row, rank) the expert that is wanted, or -1; float32 rows; float32 results.
        self.told = self._memory.ctypes.data
        self.x = self.told + sizes[0]
        self.results = self.x + sizes[1]
        self._native = module.HostExperts(MAX_ROWS, threads, layers[0].top_k, self.told, self.x, self.results)
        #: What the host is to be called with between a layer's `tell` and its `take`.
        self.calls = tuple(
            HostCall(
                module.HostExperts.call,
                self._native.layer(
                    *(
                        module.Weight(piece.offset, piece.format.id, weight.rows, weight.columns)
                        for piece, weight in zip(
                            weights.pieces(number), (layer.gate, layer.up, layer.down), strict=True
                        )
                    ),
                    records.tolist(),
                ),
            )
            for number, (layer, records) in enumerate(zip(layers, weights.records(), strict=True))
        )

    def check(self) -> None:
        """DeviceError where a call has failed: what steps gave since is worth nothing. While no step runs."""
        if self._native.failure:
            raise DeviceError(f"the CPU's part of a step failed: {self._native.failure}")


def call_now(call: HostCall) -> None:
    """Call it here, without the interpreter's lock."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)(call.data)
