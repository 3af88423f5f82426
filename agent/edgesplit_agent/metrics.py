"""What the agent counts of its requests, and reads of itself when Prometheus asks.

Counting happens once per request, after its answer is ready: a few microseconds (docs/decisions/0024). The names are in
`edgesplit.seen.families`.
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
from edgesplit.report import Report, phases
from edgesplit.seen import families
from edgesplit.seen.ledger import Entry, Ledger, Series, gauge
from edgesplit_agent.engine import Engine
from edgesplit_agent.sensors import Readings

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
            self.ledger.count(families.AGENT_REQUESTS, model, UNKNOWN, outcome(result))
            return
        entries: list[Entry] = [
            (families.AGENT_REQUESTS, (model, result.row, outcome(result)), 1.0),
            (families.AGENT_REQUEST_S, (model, result.row), result.latency_s),
        ]
        entries += [(families.AGENT_PHASE_S, (model, name), spent) for name, spent in (split or phases(result)).items()]
        if result.up_bytes:
            entries.append((families.AGENT_UP_BYTES, (model,), result.up_bytes))
            entries.append((families.AGENT_DOWN_BYTES, (model,), result.down_bytes))
        if result.fallback:
            entries.append((families.AGENT_FALLBACKS, (model, result.cause), 1.0))
        if result.late:
            entries.append((families.AGENT_LATE, (model,), 1.0))
        with self._lock:
            before = self._rows.get(model, result.row)
            now = self._rows[model] = before if result.raced else result.row
        if before != now:
            entries.append((families.AGENT_SWITCHES, (model,), 1.0))
        self.ledger.record(entries)

    def split(self, model: str) -> dict[str, dict[str, float]]:
        """Since the start, by phase: requests that had it, their mean and their 95th percentile; for people."""
        found = {one.labels[1]: one for one in self.ledger.series() if one.family == families.AGENT_PHASE_S.name}
        histograms = {name: self.ledger.histogram(families.AGENT_PHASE_S, model, name) for name in found}
        return {
            name: {"requests": one.count, "mean_s": one.mean, "p95_s": one.quantile(0.95)}
            for name, one in histograms.items()
            if one.count
        }


def readings(engine: Engine, connected: bool) -> Iterator[Series]:
    """What the engine counts itself, and how things are at this moment."""
    now, hedging = engine.conditions, engine.hedging
    yield gauge(families.AGENT_LINK_UP, now.link.up_bytes_per_s)
    yield gauge(families.AGENT_LINK_DOWN, now.link.down_bytes_per_s)
    yield gauge(families.AGENT_LINK_RTT, now.link.rtt_s)
    yield gauge(families.AGENT_REMOTE_OK, now.remote_ok)
    yield gauge(families.AGENT_SERVER_LOAD, now.server_load)
    yield gauge(families.AGENT_SLOWDOWN, now.device_slowdown)
    yield gauge(families.AGENT_CONNECTED, connected)
    for model, release in engine.serving.items():
        yield gauge(families.AGENT_SERVING, 1.0, release.manifest.model, engine.row_of(model))
        yield gauge(families.AGENT_WORKERS_LOST, release.host.status().get("lost", 0), release.manifest.model)
    for what in HEDGES:
        yield gauge(families.AGENT_HEDGES, hedging[what], what)
    yield gauge(families.AGENT_WASTED_S, hedging["wasted_s"])
    yield gauge(families.AGENT_WASTED_J, hedging["wasted_j"])
    yield gauge(families.AGENT_STALE, engine.stale)
    yield gauge(families.AGENT_GAVE_WAY, engine.dropped)
    yield gauge(families.AGENT_JOINED, engine.joined)


def power(mode: str, read: Readings) -> Iterator[Series]:
    """What the sensors read last; what none of them tells is left away."""
    yield gauge(families.AGENT_POWER_MODE, 1.0, mode)
    found = (
        (families.AGENT_BATTERY, None if read.battery_percent is None else read.battery_percent / 100.0),
        (families.AGENT_WATTS, read.watts),
        (families.AGENT_CELSIUS, read.celsius),
        (families.AGENT_CLOCK, read.speed),
        (families.AGENT_UNDER_VOLTAGE, read.under_voltage),
    )
    yield from (gauge(family, known) for family, known in found if known is not None)


def emulated_label(emulated: bool) -> dict[str, Any]:
    """What stands on every sample of an emulated device."""
    return {"emulated": "true"} if emulated else {}
