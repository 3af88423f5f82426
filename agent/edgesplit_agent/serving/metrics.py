"""Prometheus metrics of the agent: counters of its requests and gauges that are read when it is scraped.

Counting happens once per request, after its answer is ready, and takes a few microseconds (docs/decisions/0024). The
metric names are in `edgesplit.observability.metrics`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    Dropped,
    EdgeError,
    LinkError,
    MalformedMessage,
    NotFound,
    Unsure,
    UsageError,
)
from edgesplit.observability import metrics
from edgesplit.observability.registry import Entry, MetricRegistry, Series, gauge_series
from edgesplit.oip.report import Report
from edgesplit_agent.power.sensors import Readings
from edgesplit_agent.serving.cascade import Cascades
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.telemetry.request_record import RequestRecord

UNKNOWN = ""
"""Row label of a failed request: it may not have had a row yet."""
HEDGE_COUNTS = ("hedges", "by_choice", "held_back", "device_won", "cloud_won", "cancelled")
"""Keys of `HedgeBudget.counts` that become label values."""
AUDIT_OUTCOMES = ("same", "changed", "unaudited")
"""Fields of `StillCounts` that become label values."""
CASCADE_OUTCOMES = ("sure", "escalated", "unsure")
"""Fields of `CascadeTotals` that become label values."""
_OUTCOMES: tuple[tuple[type[EdgeError], str], ...] = (
    (Busy, "busy"), (Dropped, "dropped"), (DeadlineExceeded, "deadline"), (LinkError, "link"), (UsageError, "rejected"),
    (MalformedMessage, "rejected"), (NotFound, "rejected"), (Unsure, "unsure"),
)  # fmt: skip


def outcome_label(result: Report | Exception) -> str:
    """The outcome label of a result; one of a few words."""
    if isinstance(result, Report):
        return "fallback" if result.fallback else "answered"
    return next((word for kind, word in _OUTCOMES if isinstance(result, kind)), "failed")


class RequestMetrics:
    """Counts each request of each model. Thread-safe."""

    def __init__(self) -> None:
        self.registry = MetricRegistry()
        self._lock = threading.Lock()
        self._rows: dict[str, str] = {}

    def finished(self, record: RequestRecord) -> None:
        """Count one request under its model's name and version."""
        model, result = record.release.manifest.model, record.outcome
        if result is None:
            return
        if not isinstance(result, Report):
            self.registry.count(metrics.AGENT_REQUESTS, model, UNKNOWN, outcome_label(result))
            return
        entries: list[Entry] = [
            (metrics.AGENT_REQUESTS, (model, result.row, outcome_label(result)), 1.0),
            (metrics.AGENT_REQUEST_S, (model, result.row), result.latency_s),
        ]
        entries += [(metrics.AGENT_PHASE_S, (model, name), spent) for name, spent in record.phases.items()]
        if result.up_bytes:
            entries.append((metrics.AGENT_UP_BYTES, (model,), result.up_bytes))
            entries.append((metrics.AGENT_DOWN_BYTES, (model,), result.down_bytes))
        if result.fallback:
            entries.append((metrics.AGENT_FALLBACKS, (model, result.cause), 1.0))
        if result.emulation_overrun:
            entries.append((metrics.AGENT_EMULATION_OVERRUNS, (model,), 1.0))
        with self._lock:
            before = self._rows.get(model, result.row)
            now = self._rows[model] = before if result.raced or result.escalated else result.row
        if before != now:
            entries.append((metrics.AGENT_SWITCHES, (model,), 1.0))
        self.registry.record(entries)

    def phase_statistics(self, model: str) -> dict[str, dict[str, float]]:
        """By phase since the start: number of requests, mean and 95th percentile in seconds; for the status page."""
        series = self.registry.series()
        phase_names = {entry.labels[1]: entry for entry in series if entry.family == metrics.AGENT_PHASE_S.name}
        histograms = {name: self.registry.histogram(metrics.AGENT_PHASE_S, model, name) for name in phase_names}
        return {
            name: {"requests": entry.count, "mean_s": entry.mean, "p95_s": entry.quantile(0.95)}
            for name, entry in histograms.items()
            if entry.count
        }


def engine_series(engine: Engine, connected: bool) -> Iterator[Series]:
    """Gauges and counters of the engine at this moment."""
    now, hedging = engine.conditions, engine.hedge_budget.counts
    yield gauge_series(metrics.AGENT_LINK_UP, now.link.up_bytes_per_s)
    yield gauge_series(metrics.AGENT_LINK_DOWN, now.link.down_bytes_per_s)
    yield gauge_series(metrics.AGENT_LINK_RTT, now.link.rtt_s)
    yield gauge_series(metrics.AGENT_REMOTE_OK, now.remote_usable)
    yield gauge_series(metrics.AGENT_SERVER_LOAD, now.server_load)
    yield gauge_series(metrics.AGENT_SLOWDOWN, now.device_slowdown)
    yield gauge_series(metrics.AGENT_CONNECTED, connected)
    for model, release in engine.serving.items():
        yield gauge_series(metrics.AGENT_SERVING, 1.0, release.manifest.model, engine.selector.row_of(model))
        yield gauge_series(metrics.AGENT_WORKERS_LOST, release.host.status().get("lost", 0), release.manifest.model)
    for hedge in HEDGE_COUNTS:
        yield gauge_series(metrics.AGENT_HEDGES, hedging[hedge], hedge)
    yield gauge_series(metrics.AGENT_WASTED_S, hedging["wasted_s"])
    yield gauge_series(metrics.AGENT_WASTED_J, hedging["wasted_j"])
    yield gauge_series(metrics.AGENT_STALE, engine.stale_answers.given)
    for model, counts in engine.still_frames.counts().items():
        yield gauge_series(metrics.AGENT_REPEATED, counts.repeated, model)
        yield gauge_series(metrics.AGENT_REPEAT_ALARMS, counts.alarms, model)
        for outcome in AUDIT_OUTCOMES:
            yield gauge_series(metrics.AGENT_REPEAT_AUDITS, getattr(counts, outcome), model, outcome)
    yield from _cascade_series(engine.cascades)
    yield gauge_series(metrics.AGENT_DROPPED_FRAMES, engine.queue.dropped)
    yield gauge_series(metrics.AGENT_DEDUPLICATED, engine.idempotency.joined)


def _cascade_series(cascades: Cascades) -> Iterator[Series]:
    """Who answered in each cascade, and what its audits found."""
    for model, totals in cascades.totals().items():
        for outcome in CASCADE_OUTCOMES:
            yield gauge_series(metrics.AGENT_CASCADE_ANSWERS, getattr(totals, outcome), model, outcome)
        audits = {"same": totals.audited - totals.changed, "changed": totals.changed, "unaudited": totals.unaudited}
        for outcome, count in audits.items():
            yield gauge_series(metrics.AGENT_CASCADE_AUDITS, count, model, outcome)
        yield gauge_series(metrics.AGENT_CASCADE_ALARMS, totals.alarms, model)
    for model, threshold in cascades.thresholds().items():
        yield gauge_series(metrics.AGENT_CASCADE_THRESHOLD, threshold, model)


def power_gauges(mode: str, readings: Readings) -> Iterator[Series]:
    """Gauges of the latest sensor readings; unknown ones are left out."""
    yield gauge_series(metrics.AGENT_POWER_MODE, 1.0, mode)
    gauges = (
        (metrics.AGENT_BATTERY, None if readings.battery_percent is None else readings.battery_percent / 100.0),
        (metrics.AGENT_WATTS, readings.watts),
        (metrics.AGENT_CELSIUS, readings.celsius),
        (metrics.AGENT_CLOCK, readings.clock_ratio),
        (metrics.AGENT_UNDER_VOLTAGE, readings.under_voltage),
    )
    yield from (gauge_series(family, value) for family, value in gauges if value is not None)


def emulated_label(emulated: bool) -> dict[str, Any]:
    """The label on every sample of an emulated device."""
    return {"emulated": "true"} if emulated else {}
