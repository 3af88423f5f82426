"""What the agent counts of its requests, and reads of itself when Prometheus asks.

Counting happens once per request, after its answer is ready: a few microseconds (docs/decisions/0024). The names are in
`edgesplit.observability.metrics`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    Dropped,
    EdgeError,
    LinkError,
    MalformedMessage,
    NotFound,
    UsageError,
)
from edgesplit.observability import metrics
from edgesplit.observability.registry import Entry, Ledger, Series, gauge
from edgesplit.oip.report import Report, phases
from edgesplit_agent.power.sensors import Readings
from edgesplit_agent.serving.engine import Engine

UNKNOWN = ""
"""Row of a request that failed: it may have had none yet."""
HEDGES = ("hedges", "by_choice", "held_back", "device_won", "cloud_won", "cancelled")
"""Of `Engine.hedging`."""
_OUTCOMES: tuple[tuple[type[EdgeError], str], ...] = (
    (Busy, "busy"),
    (Dropped, "dropped"),
    (DeadlineExceeded, "deadline"),
    (LinkError, "link"),
    (UsageError, "rejected"),
    (MalformedMessage, "rejected"),
    (NotFound, "rejected"),
)


def outcome(result: Report | Exception) -> str:
    """One word of the few that a label may hold."""
    if isinstance(result, Report):
        return "fallback" if result.fallback else "answered"
    return next((word for kind, word in _OUTCOMES if isinstance(result, kind)), "failed")


class RequestMetrics:
    """Counts each request of each model. Thread-safe."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._lock = threading.Lock()
        self._rows: dict[str, str] = {}

    def observe(self, model: str, result: Report | Exception, split: Mapping[str, float] | None = None) -> None:
        """A request for `model` (name@version) came to its end. `split`: its `phases`, where they are at hand."""
        if not isinstance(result, Report):
            self.ledger.count(metrics.AGENT_REQUESTS, model, UNKNOWN, outcome(result))
            return
        entries: list[Entry] = [
            (metrics.AGENT_REQUESTS, (model, result.row, outcome(result)), 1.0),
            (metrics.AGENT_REQUEST_S, (model, result.row), result.latency_s),
        ]
        entries += [(metrics.AGENT_PHASE_S, (model, name), spent) for name, spent in (split or phases(result)).items()]
        if result.up_bytes:
            entries.append((metrics.AGENT_UP_BYTES, (model,), result.up_bytes))
            entries.append((metrics.AGENT_DOWN_BYTES, (model,), result.down_bytes))
        if result.fallback:
            entries.append((metrics.AGENT_FALLBACKS, (model, result.cause), 1.0))
        if result.late:
            entries.append((metrics.AGENT_LATE, (model,), 1.0))
        with self._lock:
            before = self._rows.get(model, result.row)
            now = self._rows[model] = before if result.raced else result.row
        if before != now:
            entries.append((metrics.AGENT_SWITCHES, (model,), 1.0))
        self.ledger.record(entries)

    def split(self, model: str) -> dict[str, dict[str, float]]:
        """Since the start, by phase: requests that had it, their mean and their 95th percentile; for people."""
        found = {one.labels[1]: one for one in self.ledger.series() if one.family == metrics.AGENT_PHASE_S.name}
        histograms = {name: self.ledger.histogram(metrics.AGENT_PHASE_S, model, name) for name in found}
        return {
            name: {"requests": one.count, "mean_s": one.mean, "p95_s": one.quantile(0.95)}
            for name, one in histograms.items()
            if one.count
        }


def readings(engine: Engine, connected: bool) -> Iterator[Series]:
    """What the engine counts itself, and how things are at this moment."""
    now, hedging = engine.conditions, engine.hedging
    yield gauge(metrics.AGENT_LINK_UP, now.link.up_bytes_per_s)
    yield gauge(metrics.AGENT_LINK_DOWN, now.link.down_bytes_per_s)
    yield gauge(metrics.AGENT_LINK_RTT, now.link.rtt_s)
    yield gauge(metrics.AGENT_REMOTE_OK, now.remote_ok)
    yield gauge(metrics.AGENT_SERVER_LOAD, now.server_load)
    yield gauge(metrics.AGENT_SLOWDOWN, now.device_slowdown)
    yield gauge(metrics.AGENT_CONNECTED, connected)
    for model, release in engine.serving.items():
        yield gauge(metrics.AGENT_SERVING, 1.0, release.manifest.model, engine.row_of(model))
        yield gauge(metrics.AGENT_WORKERS_LOST, release.host.status().get("lost", 0), release.manifest.model)
    for what in HEDGES:
        yield gauge(metrics.AGENT_HEDGES, hedging[what], what)
    yield gauge(metrics.AGENT_WASTED_S, hedging["wasted_s"])
    yield gauge(metrics.AGENT_WASTED_J, hedging["wasted_j"])
    yield gauge(metrics.AGENT_STALE, engine.stale)
    yield gauge(metrics.AGENT_GAVE_WAY, engine.dropped)
    yield gauge(metrics.AGENT_JOINED, engine.joined)


def power(mode: str, read: Readings) -> Iterator[Series]:
    """What the sensors read last; what none of them tells is left away."""
    yield gauge(metrics.AGENT_POWER_MODE, 1.0, mode)
    found = (
        (metrics.AGENT_BATTERY, None if read.battery_percent is None else read.battery_percent / 100.0),
        (metrics.AGENT_WATTS, read.watts),
        (metrics.AGENT_CELSIUS, read.celsius),
        (metrics.AGENT_CLOCK, read.speed),
        (metrics.AGENT_UNDER_VOLTAGE, read.under_voltage),
    )
    yield from (gauge(family, known) for family, known in found if known is not None)


def emulated_label(emulated: bool) -> dict[str, Any]:
    """What stands on every sample of an emulated device."""
    return {"emulated": "true"} if emulated else {}
