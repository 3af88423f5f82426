"""What happened to requests, gathered in windows, as the controller reads them. No network here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgesplit import plan
from edgesplit.messages import Telemetry, Window
from edgesplit.plan import Conditions
from edgesplit.report import Report
from edgesplit_agent.active import ActiveRelease

KEPT = 4096
"""Latencies of one window and model; beyond, the window's later ones are counted but not ranked."""


@dataclass
class Tally:
    """One model's requests since the last window."""

    row: str = ""
    requests: int = 0
    failed: int = 0
    fallbacks: int = 0
    switches: int = 0
    late: int = 0
    up_bytes: int = 0
    device_s: float = 0.0
    link_s: float = 0.0
    remote_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    def answered(self, report: Report) -> None:
        """Count one answer."""
        self.switches += bool(self.row) and self.row != report.row
        self.row = report.row
        self.requests += 1
        self.fallbacks += report.fallback
        self.late += report.late
        self.up_bytes += report.up_bytes
        self.device_s += report.device_s
        self.link_s += report.link_s
        self.remote_s += report.remote_s
        if len(self.latencies_s) < KEPT:
            self.latencies_s.append(report.latency_s)


class Windows:
    """Tallies by model. Thread-safe; `total` runs since the start, for people."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}
        self.total: dict[str, dict[str, int]] = {}

    def observe(self, model: str, report: Report | None) -> None:
        """A request was answered, or failed (None)."""
        with self._lock:
            tally = self._tallies.setdefault(model, Tally())
            total = self.total.setdefault(model, {"requests": 0, "failed": 0, "fallbacks": 0, "switches": 0, "late": 0})
            before = tally.switches
            if report is None:
                tally.failed += 1
                total["failed"] += 1
                return
            tally.answered(report)
            for name, gained in (("requests", 1), ("fallbacks", report.fallback), ("late", report.late)):
                total[name] += int(gained)
            total["switches"] += tally.switches - before

    def take(self, serving: Mapping[str, ActiveRelease], now: Conditions) -> tuple[Window, ...]:
        """The windows of all models served, and begin new ones."""
        with self._lock:
            tallies = {model: self._tallies.get(model, Tally()) for model in serving}
            self._tallies = {model: Tally(row=tally.row) for model, tally in tallies.items()}
        return tuple(window(model, release, tallies[model], now) for model, release in sorted(serving.items()))


def window(model: str, release: ActiveRelease, tally: Tally, now: Conditions) -> Window:
    """One model's tally as a message."""
    used = next((row for row in release.plan.rows if row.name == tally.row), None)
    row = used or plan.best(release.plan.rows, now)
    answered = max(1, tally.requests)
    return Window(
        model=model,
        release=release.digest,
        row=row.name if row is not None else "",
        requests=tally.requests,
        failed=tally.failed,
        fallbacks=tally.fallbacks,
        switches=tally.switches,
        late=tally.late,
        up_bytes=tally.up_bytes,
        latency_p50_s=quantile(tally.latencies_s, 0.5),
        latency_p95_s=quantile(tally.latencies_s, 0.95),
        predicted_s=plan.latency_s(row, now) if row is not None else 0.0,
        device_s=tally.device_s / answered,
        link_s=tally.link_s / answered,
        remote_s=tally.remote_s / answered,
        trouble=release.trouble[:400],
    )


def quantile(values: list[float], part: float) -> float:
    """The smallest value that at least `part` of all values do not exceed; 0 of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))] if ranked else 0.0


def telemetry(session: int, sequence: int, emulated: bool, now: Conditions, windows: tuple[Window, ...]) -> Telemetry:
    """The whole message."""
    return Telemetry(
        session=session,
        sequence=sequence,
        emulated=emulated,
        up_bytes_per_s=now.link.up_bytes_per_s,
        rtt_s=now.link.rtt_s,
        remote_ok=now.remote_ok,
        models=windows,
    )
