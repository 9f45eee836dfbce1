"""Who computes what a card misses, as the setting says or as this machine measures, and why.

What is measured once, at the start, with the card's own link and the model's own experts: copies from pinned memory,
calls of the host between two small operations of a graph, and the CPU's products. What steps miss is counted all along.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Callable

import numpy as np

from sparkd.errors import DeviceError
from sparkd.executors.cuda_host import HostExperts, call_now
from sparkd.executors.device import Device, Stream
from sparkd.ipc.messages import Json
from sparkd.residency.misses import Chooser, Misses, Rates
from sparkd.store.arena import Arena
from sparkd.worker.device_staging import Staging

#: Calls of a graph that is measured, copies of a stream; the least of so many times counts.
_CALLS = 32
_COPIES = 8
_TIMES = 3


class MissPolicy:
    """What `worker.misses` has become."""

    def __init__(self, setting: str, rates: Rates | None, layers: int, note: str = "") -> None:
        """`rates` for "auto"; without any it stays with kernels that read in place, and `note` says why."""
        self._setting = setting
        self._rates = rates
        self._note = note
        self._chooser = None if rates is None else Chooser(rates, layers)
        self.misses = Misses(setting) if setting != "auto" else Misses.IN_PLACE

    def saw(self, missed_bytes: int, readable: bool) -> Misses:
        """A step has missed so many bytes of experts. `readable`: kernels can read all of host memory."""
        if self._chooser is not None:
            self.misses = self._chooser.saw(missed_bytes, readable)
        return self.misses

    def why(self) -> str:
        """The reason, in a line."""
        rates, chooser = self._rates, self._chooser
        if rates is None or chooser is None:
            return self._note or "worker.misses says so"
        if math.isinf(chooser.worth_bytes):
            return f"the CPU computes {rates.host / 1e9:.1f} GB/s of experts, the link brings {rates.link / 1e9:.1f}"
        missed = 0.0 if chooser.missed_bytes is None else chooser.missed_bytes
        return (
            f"a step misses {missed / 1e6:.1f} MB; the CPU ({rates.host / 1e9:.1f} GB/s, {rates.call_s * 1e6:.0f} µs a"
            f" call) is sooner done than the link ({rates.link / 1e9:.1f} GB/s) from {chooser.worth_bytes / 1e6:.1f} on"
        )

    def status(self) -> dict[str, Json]:
        """The member `misses` of the status document."""
        rates, chooser = self._rates, self._chooser
        worth = None if chooser is None or math.isinf(chooser.worth_bytes) else chooser.worth_bytes
        return {
            "setting": self._setting,
            "policy": self.misses.value,
            "why": self.why(),
            "link_bytes_s": None if rates is None else rates.link,
            "host_bytes_s": None if rates is None else rates.host,
            "call_s": None if rates is None else rates.call_s,
            "missed_bytes": None if chooser is None else chooser.missed_bytes,
            "worth_bytes": worth,
        }


def measured(setting: str, device: Device, stream: Stream, staging: Staging, arena: Arena,
             host: HostExperts | None) -> MissPolicy:  # fmt: skip
    """The policy of this machine. What the device refuses meanwhile is the reason for reading in place."""
    layers = len(arena.layout.layers)
    if setting != "auto" or host is None:
        return MissPolicy(setting, None, layers)
    try:
        link, call_s = _link(device, stream, staging), _call_s(device, stream, staging, host)
        return MissPolicy(setting, Rates(link, _host(host, arena), call_s), layers)
    except DeviceError as error:
        return MissPolicy(setting, None, layers, f"the rates of this machine cannot be measured: {error}")


def _link(device: Device, stream: Stream, staging: Staging) -> float:
    """Bytes per second of copies from pinned memory, as large as a staging buffer."""
    target, size = staging.buffer
    source = device.pinned(size)
    source[:] = 0  # pages that were never touched take longer

    def copy() -> None:
        for _ in range(_COPIES):
            device.copy(stream, target, source.ctypes.data, size)

    return _COPIES * size / _seconds(stream, copy)


def _call_s(device: Device, stream: Stream, staging: Staging, host: HostExperts) -> float:
    """Seconds of a call that has nothing to do, with the two small launches that belong to it, in a graph."""
    target, _ = staging.buffer
    side = device.stream()
    ctypes.c_int32.from_address(host.told).value = 0

    def alone(captured: Stream) -> None:
        for _ in range(_CALLS):
            device.zero(captured, target, 4)

    def called(captured: Stream) -> None:
        for _ in range(_CALLS):
            device.zero(captured, target, 4)
            side.wait(captured.record())
            device.call(side, host.calls[0])
            device.zero(captured, target, 4)
            captured.wait(side.record())
            device.zero(captured, target, 4)

    least, most = (_seconds(stream, functools.partial(device.capture(work).replay, stream)) for work in (alone, called))
    host.check()
    return max(most - least, 1e-9) / _CALLS


def _host(host: HostExperts, arena: Arena) -> float:
    """Bytes per second of experts in the CPU's products with one row, each time others."""
    layers, top_k = arena.layout.layers, arena.program.expert_layers[0].top_k
    told = np.ctypeslib.as_array((ctypes.c_int32 * (1 + top_k)).from_address(host.told))
    width = arena.program.expert_layers[0].gate.columns
    np.ctypeslib.as_array((ctypes.c_float * width).from_address(host.x))[:] = 1.0
    told[0] = 1
    best = 0.0
    for turn in range(_TIMES):
        began = time.perf_counter()
        for layer, call in zip(layers, host.calls, strict=True):
            told[1:] = (turn * top_k + np.arange(top_k)) % layer.experts
            call_now(call)
        took = time.perf_counter() - began
        size = sum(top_k * arena.layout.slabs[layer.slab].record_bytes for layer in layers)
        best = max(best, size / took)
    told[0] = 0
    host.check()
    return best


def _seconds(stream: Stream, work: Callable[[], None]) -> float:
    """The least of some runs that are waited for, after one that is not counted."""
    found = []
    for _ in range(1 + _TIMES):
        stream.synchronize()
        began = time.perf_counter()
        work()
        stream.synchronize()
        found.append(time.perf_counter() - began)
    return max(min(found[1:]), 1e-9)
