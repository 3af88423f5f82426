"""How each release has done here since it was activated: what the gates of a rollout judge. No network, no clock.

What an application did wrong is no fault of a release's and is not counted; all else that was not an answer is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from edgesplit.errors import Dropped, UsageError
from edgesplit.mqtt.telemetry import ReleaseHealth
from edgesplit.oip.report import Report
from edgesplit_agent.releases.output_drift import Drift
from edgesplit_agent.telemetry.windows import quantile

RANKED = 2_048
"""The newest latencies of a release that are ranked."""
NOT_ITS_FAULT = (UsageError, Dropped)
Number = TypeVar("Number", int, float)


@dataclass
class _Record:
    """One release since it was activated."""

    release: str
    since: float
    drift: Drift | None = None
    golden_ok: bool | None = None
    requests: int = 0
    failed: int = 0
    fallbacks: int = 0
    joules: float = 0.0
    weighed: int = 0
    basis: str = ""
    memory_bytes: int | None = None
    celsius: float | None = None
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=RANKED))


class HealthLedger:
    """Records by model, one release each: the one that was activated last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}

    def activated(
        self, model: str, release: str, now: float, drift: Drift | None = None, golden_ok: bool | None = None
    ) -> None:
        """A release answers from `now` (monotonic) on; the count begins anew."""
        with self._lock:
            self._records[model] = _Record(release, now, drift, golden_ok)

    def serving(self, releases: Mapping[str, str], now: float) -> None:
        """What is served (release by model), however it came to be: the rest is forgotten."""
        with self._lock:
            kept = {model: one for model, one in self._records.items() if releases.get(model) == one.release}
            new = {model: _Record(release, now) for model, release in releases.items() if model not in kept}
            self._records = {**kept, **new}

    def answered(self, model: str, report: Report) -> None:
        """A request was answered, by the release that the report names."""
        with self._lock:
            record = self._of(model, report.release)
            if record is None:
                return
            record.requests += 1
            record.fallbacks += report.fallback
            record.latencies_s.append(report.latency_s)
            if report.joules_basis:
                record.joules += report.joules
                record.weighed += 1
                record.basis = report.joules_basis

    def failed(self, model: str, release: str, error: Exception) -> None:
        """A request that this release should have answered was not."""
        if isinstance(error, NOT_ITS_FAULT):
            return
        with self._lock:
            record = self._of(model, release)
            if record is not None:
                record.failed += 1

    def saw(self, model: str, memory_bytes: int | None, celsius: float | None) -> None:
        """What the release's process takes, and how hot the device is."""
        with self._lock:
            record = self._records.get(model)
            if record is not None:
                record.memory_bytes = _most(record.memory_bytes, memory_bytes)
                record.celsius = _most(record.celsius, celsius)

    def told(self, now: float) -> tuple[ReleaseHealth, ...]:
        """All of them, as telemetry tells it."""
        with self._lock:
            return tuple(_told(model, record, now) for model, record in sorted(self._records.items()))

    def _of(self, model: str, release: str) -> _Record | None:
        record = self._records.get(model)
        return record if record is not None and record.release == release else None


def _most(known: Number | None, seen: Number | None) -> Number | None:
    if known is None or seen is None:
        return seen if known is None else known
    return max(known, seen)


def _told(model: str, record: _Record, now: float) -> ReleaseHealth:
    drift = record.drift
    return ReleaseHealth(
        model=model,
        release=record.release,
        since_s=max(0.0, now - record.since),
        requests=record.requests,
        failed=record.failed,
        fallbacks=record.fallbacks,
        latency_p95_s=quantile(list(record.latencies_s), 0.95) if record.latencies_s else None,
        memory_bytes=record.memory_bytes,
        celsius=record.celsius,
        joules=record.joules / record.weighed if record.weighed else None,
        joules_basis=record.basis,
        drift=drift.largest if drift is not None else None,
        top_agrees=drift.top_agrees if drift is not None else None,
        golden_ok=record.golden_ok,
    )
