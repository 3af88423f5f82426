"""What happened to requests, gathered in windows, as the controller reads them. No network here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from edgesplit import plan
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import PhaseSeconds, PowerSeen, SliceSeconds, Telemetry, Window
from edgesplit.observability.histogram import Histogram
from edgesplit.oip.report import PHASES, Report, phases
from edgesplit.plan import Conditions
from edgesplit_agent.releases.loaded_release import ActiveRelease

KEPT = 4096
"""Latencies of one window and model; beyond, the window's later ones are counted but not ranked."""
LEARNT_RUNS = 5
"""A slice that ran less often is not told of: its first runs load caches and fill arenas."""
MOST_SLICES = 64


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
    joules: float = 0.0
    weighed: int = 0
    joules_basis: str = ""
    latencies_s: list[float] = field(default_factory=list)
    phases: dict[str, Histogram] = field(default_factory=dict)

    def answered(self, report: Report, split: Mapping[str, float]) -> None:
        """Count one answer, whose time went as `split` says."""
        if not (report.raced and self.row):  # whoever wins a race, the way was not changed
            self.switches += bool(self.row) and self.row != report.row
            self.row = report.row
        self.requests += 1
        self.fallbacks += report.fallback
        self.late += report.late
        self.up_bytes += report.up_bytes
        self.device_s += report.device_s
        self.link_s += report.link_s
        self.remote_s += report.remote_s
        if report.joules_basis:
            self.joules += report.joules
            self.weighed += 1
            self.joules_basis = report.joules_basis
        if len(self.latencies_s) < KEPT:
            self.latencies_s.append(report.latency_s)
        for name, seconds in split.items():
            self.phases.setdefault(name, Histogram()).observe(seconds)


class Windows:
    """Tallies by model. Thread-safe; `total` runs since the start, for people."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}
        self.total: dict[str, dict[str, int]] = {}

    def observe(self, model: str, report: Report | None, split: Mapping[str, float] | None = None) -> None:
        """A request was answered, or failed (None). `split`: its `phases`, where they are at hand."""
        if report is not None and split is None:
            split = phases(report)
        with self._lock:
            tally = self._tallies.setdefault(model, Tally())
            total = self.total.setdefault(model, {"requests": 0, "failed": 0, "fallbacks": 0, "switches": 0, "late": 0})
            before = tally.switches
            if report is None:
                tally.failed += 1
                total["failed"] += 1
                return
            tally.answered(report, split or {})
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
        phases=tuple(
            PhaseSeconds(name, tally.phases[name].total, tally.phases[name].sparse())
            for name in PHASES
            if name in tally.phases
        ),
        slices=learnt(release) if tally.requests else (),
        joules=tally.joules / max(1, tally.weighed),
        joules_basis=tally.joules_basis,
    )


def learnt(release: ActiveRelease) -> tuple[SliceSeconds, ...]:
    """What the release's slices take here, of those that ran often enough; the longest where they are too many."""
    known = [SliceSeconds(*one) for one in release.learnt() if one[2] >= LEARNT_RUNS]
    return tuple(sorted(known, key=lambda one: one.seconds, reverse=True)[:MOST_SLICES])


def quantile(values: list[float], part: float) -> float:
    """The smallest value that at least `part` of all values do not exceed; 0 of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))] if ranked else 0.0


def telemetry(
    session: int,
    sequence: int,
    emulated: bool,
    now: Conditions,
    windows: tuple[Window, ...],
    power: PowerSeen | None = None,
    **more: Any,
) -> Telemetry:
    """The whole message, no longer than a controller reads; `more` are further fields of it."""
    whole = Telemetry(
        session=session,
        sequence=sequence,
        emulated=emulated,
        up_bytes_per_s=now.link.up_bytes_per_s,
        down_bytes_per_s=now.link.down_bytes_per_s,
        rtt_s=now.link.rtt_s,
        remote_ok=now.remote_ok,
        models=windows,
        power=power,
        **more,
    )
    return fitting(whole)


def fitting(whole: Telemetry, most_bytes: int = LIMITS.telemetry_bytes) -> Telemetry:
    """The same, without the phases of as many models as must be, the least asked first, to fit into one message; then
    without the health of some."""
    excess = len(messages.encode(whole)) - most_bytes
    windows = list(whole.models)
    for place in sorted(range(len(windows)), key=lambda one: windows[one].requests):
        if excess <= 0:
            break
        excess -= len(messages.encode(windows[place])) - len(messages.encode(_bare(windows[place])))
        windows[place] = _bare(windows[place])
    fits = msgspec.structs.replace(whole, models=tuple(windows))
    while fits.health and len(messages.encode(fits)) > most_bytes:
        fits = msgspec.structs.replace(fits, health=fits.health[: len(fits.health) // 2])
    return fits


def _bare(one: Window) -> Window:
    return msgspec.structs.replace(one, phases=(), slices=())
