"""What Prometheus collects: the daemon's status document as gauges and counters, and the gateway's own traffic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("starting", "loading", "ready", "degraded", "stopping")


class Metrics:
    """The gateway's own figures."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "spark_gateway_requests", "HTTP requests by route and status", ["route", "status"], registry=self._registry
        )
        self.open = Gauge(
            "spark_gateway_open_requests", "HTTP requests that are being answered", registry=self._registry
        )
        self.first_byte = Histogram(
            "spark_gateway_answer_seconds", "Seconds until the first byte of an answer", registry=self._registry
        )

    def page(self, status: dict[str, Any] | None) -> bytes:
        """Everything in Prometheus's text format; without a status the daemon counts as down."""
        registry = CollectorRegistry()
        registry.register(_Daemon(status))
        return bytes(generate_latest(self._registry)) + bytes(generate_latest(registry))


class _Daemon(Collector):
    def __init__(self, status: dict[str, Any] | None) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield _gauge("spark_up", "Whether the daemon answers", 0 if status is None else 1)
        if status is None:
            return
        state = GaugeMetricFamily("spark_state", "The daemon's state", labels=["state"])
        for name in _STATES:
            state.add_metric([name], 1 if status["state"] == name else 0)
        yield state
        memory, residency, requests = status["memory"], status["residency"], status["requests"]
        tiers = GaugeMetricFamily("spark_memory_bytes", "Memory by what it holds", labels=["what"])
        for what in ("arena", "core", "records", "locked", "huge", "state", "state_used"):
            tiers.add_metric([what], memory[f"{what}_bytes"])
        yield tiers
        yield _gauge("spark_records", "Experts of all layers", residency["records"])
        resident = GaugeMetricFamily("spark_resident_records", "Experts in memory, by layer", labels=["layer"])
        for number, layer in enumerate(residency["layers"]):
            resident.add_metric([str(number)], layer["resident"])
        yield resident
        for name in ("running", "queued", "clients"):
            yield _gauge(f"spark_{name}", f"Requests {name}" if name != "clients" else "Connections", requests[name])
        for name in ("accepted", "finished", "refused", "failed", "cancelled"):
            yield _counter(f"spark_requests_{name}", f"Requests {name}", requests[name])
        yield _counter("spark_output_tokens", "Output tokens", requests["output_tokens"])
        speed = status["speed"]
        if speed:
            yield _gauge("spark_decode_tokens_per_second", "Recent steps, all requests", speed["decode_tokens_s"])
            yield _gauge("spark_prefill_tokens_per_second", "Recent steps, all requests", speed["prefill_tokens_s"])
            yield _counter("spark_steps", "Steps of the worker", speed["steps"])
        restarts = CounterMetricFamily("spark_restarts", "Restarts of a process", labels=["role"])
        rss = GaugeMetricFamily("spark_process_resident_bytes", "Resident memory, arena included", labels=["role"])
        for process in status["processes"]:
            restarts.add_metric([process["role"]], process["restarts"])
            rss.add_metric([process["role"]], process["rss_bytes"])
        yield restarts
        yield rss
        yield from _hit_rates(residency)


def _hit_rates(residency: dict[str, Any]) -> Iterable[Metric]:
    """Uses of experts by steps, and how many were not there: told where not all of them have room."""
    uses = CounterMetricFamily("spark_expert_uses", "Uses of experts by steps", labels=["phase"])
    misses = CounterMetricFamily("spark_expert_misses", "Uses of experts that were not in memory", labels=["phase"])
    for phase, told in residency.get("uses", {}).items():
        uses.add_metric([phase], told["uses"])
        misses.add_metric([phase], told["misses"])
    yield uses
    yield misses


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
