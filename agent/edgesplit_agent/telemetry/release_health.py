"""Health of each release on this device since its activation: the figures on which a rollout's gates decide.

No network, no clock. A request that failed by the application's fault is not counted; every other request without an
answer counts as failed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from edgesplit.mqtt.telemetry import ReleaseHealth
from edgesplit.oip.report import Report
from edgesplit_agent.releases.golden_result import GoldenResult
from edgesplit_agent.releases.output_drift import Drift
from edgesplit_agent.telemetry.request_record import RequestRecord
from edgesplit_agent.telemetry.windows import quantile

MAX_LATENCIES = 2_048
"""Number of newest latencies of a release that enter its percentile."""
Number = TypeVar("Number", int, float)


@dataclass
class _Record:
    """Figures of one release since it was activated."""

    release: str
    since: float
    drift: Drift | None = None
    golden: GoldenResult | None = None
    requests: int = 0
    failed: int = 0
    fallbacks: int = 0
    joules: float = 0.0
    measured_requests: int = 0
    basis: str = ""
    memory_bytes: int | None = None
    celsius: float | None = None
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))


class ReleaseHealthTracker:
    """Health records, by model: the release that was activated last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}

    def on_activated(
        self, model: str, release: str, now: float, drift: Drift | None = None, golden: GoldenResult | None = None
    ) -> None:
        """Start a new record for the release that answers from `now` (monotonic) on."""
        with self._lock:
            self._records[model] = _Record(release, now, drift, golden)

    def reconcile(self, releases: Mapping[str, str], now: float) -> None:
        """Reconcile the records with the served releases (digest by model): add missing, drop others."""
        with self._lock:
            records = self._records.items()
            current = {model: record for model, record in records if releases.get(model) == record.release}
            new = {model: _Record(release, now) for model, release in releases.items() if model not in current}
            self._records = {**current, **new}

    def finished(self, record: RequestRecord) -> None:
        """Count a request for the release with which it began; not one that failed by the application's fault."""
        outcome = record.outcome
        if outcome is None or record.is_application_error:
            return
        with self._lock:
            health = self._records.get(record.model)
            if health is None or health.release != record.release.digest:
                return
            if not isinstance(outcome, Report):
                health.failed += 1
                return
            health.requests += 1
            health.fallbacks += outcome.fallback
            health.latencies_s.append(outcome.latency_s)
            if outcome.joules_basis:
                health.joules += outcome.joules
                health.measured_requests += 1
                health.basis = outcome.joules_basis

    def on_readings(self, model: str, memory_bytes: int | None, celsius: float | None) -> None:
        """Record the memory of the release's process and the device's temperature; the maximum of each is kept."""
        with self._lock:
            record = self._records.get(model)
            if record is not None:
                record.memory_bytes = _max_known(record.memory_bytes, memory_bytes)
                record.celsius = _max_known(record.celsius, celsius)

    def to_telemetry(self, now: float) -> tuple[ReleaseHealth, ...]:
        """All records as telemetry messages, sorted by model."""
        with self._lock:
            return tuple(_to_message(model, record, now) for model, record in sorted(self._records.items()))


def _max_known(known: Number | None, seen: Number | None) -> Number | None:
    """The larger of two values, ignoring None."""
    if known is None or seen is None:
        return seen if known is None else known
    return max(known, seen)


def _to_message(model: str, record: _Record, now: float) -> ReleaseHealth:
    drift, golden = record.drift, record.golden or GoldenResult()
    return ReleaseHealth(
        model=model, release=record.release, active_s=max(0.0, now - record.since), requests=record.requests,
        failed=record.failed, fallbacks=record.fallbacks,
        latency_p95_s=quantile(list(record.latencies_s), 0.95) if record.latencies_s else None,
        memory_bytes=record.memory_bytes, celsius=record.celsius,
        joules=record.joules / record.measured_requests if record.measured_requests else None,
        joules_basis=record.basis, drift=drift.largest if drift is not None else None,
        top1_agrees=drift.top_agrees if drift is not None else None,
        golden_ok=True if record.golden is not None else None,
        golden_labelled=golden.labelled, golden_right=golden.right, golden_compared=golden.compared,
        golden_agreeing=golden.agreeing,
    )  # fmt: skip
