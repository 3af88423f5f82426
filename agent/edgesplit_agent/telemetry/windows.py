"""Telemetry windows: statistics of requests per model between two telemetry messages. No network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from edgesplit import plan
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import (
    CascadeCounts,
    PhaseSeconds,
    PowerState,
    SliceSeconds,
    StillCounts,
    Telemetry,
    TelemetryWindow,
)
from edgesplit.mqtt.telemetry import ROW_NAME_CHARS
from edgesplit.observability.histogram import Histogram
from edgesplit.oip.report import PHASES, Report
from edgesplit.plan import Conditions
from edgesplit.terminal_text import shorten
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.telemetry.request_record import RequestRecord

MAX_LATENCIES = 4096
"""Maximum number of latencies of one window and model; later requests are counted but not ranked."""
MIN_SLICE_RUNS = 5
"""A slice that ran less often is not reported: its first runs load caches and fill arenas."""
MAX_SLICES = 64
"""Maximum number of slices reported per model."""


@dataclass
class Tally:
    """Statistics of one model in the current telemetry window."""

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
    measured_requests: int = 0
    joules_basis: str = ""
    latencies_s: list[float] = field(default_factory=list)
    phases: dict[str, Histogram] = field(default_factory=dict)

    def add_answer(self, report: Report, phases: Mapping[str, float]) -> None:
        """Count one answer, whose phases took the seconds in `phases`."""
        # A race counts as no switch, whichever side won, nor does an answer that a cascade escalated.
        if not ((report.raced or report.escalated) and self.row):
            self.switches += bool(self.row) and self.row != report.row
            self.row = report.row
        self.requests += 1
        self.fallbacks += report.fallback
        self.late += report.emulation_overrun
        self.up_bytes += report.up_bytes
        self.device_s += report.device_s
        self.link_s += report.link_s
        self.remote_s += report.remote_s
        if report.joules_basis:
            self.joules += report.joules
            self.measured_requests += 1
            self.joules_basis = report.joules_basis
        if len(self.latencies_s) < MAX_LATENCIES:
            self.latencies_s.append(report.latency_s)
        for name, seconds in phases.items():
            self.phases.setdefault(name, Histogram()).observe(seconds)


class TelemetryWindows:
    """Tallies by model. `total` counts since the start, for the status page. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}
        self.total: dict[str, dict[str, int]] = {}

    def finished(self, record: RequestRecord) -> None:
        """Count a request, answered or failed; not one that failed by the application's fault, which only the agent's
        own metrics count, as rejected or dropped."""
        model, report = record.model, record.outcome
        if report is None or record.is_application_error:
            return
        with self._lock:
            tally = self._tallies.setdefault(model, Tally())
            total = self.total.setdefault(
                model, {"requests": 0, "failed": 0, "fallbacks": 0, "switches": 0, "emulation_overruns": 0}
            )
            before = tally.switches
            if not isinstance(report, Report):
                tally.failed += 1
                total["failed"] += 1
                return
            tally.add_answer(report, record.phases)
            total["requests"] += 1
            total["fallbacks"] += report.fallback
            total["emulation_overruns"] += report.emulation_overrun
            total["switches"] += tally.switches - before

    def close_windows(
        self, serving: Mapping[str, LoadedRelease], now: Conditions, reason_of: Callable[[str], str] = lambda model: "",
        still: Mapping[str, StillCounts] = MappingProxyType({}),
    ) -> tuple[TelemetryWindow, ...]:  # fmt: skip
        """The telemetry windows of all served models; new ones begin. `reason_of` tells why a model's row was
        chosen; `still` is what streams with repeated answers counted in the window, by model."""
        with self._lock:
            tallies = {model: self._tallies.get(model, Tally()) for model in serving}
            self._tallies = {model: Tally(row=tally.row) for model, tally in tallies.items()}
        models = sorted(serving.items())
        return tuple(
            to_telemetry_window(model, release, tallies[model], now, reason_of(model), still.get(model))
            for model, release in models
        )


def to_telemetry_window(
    model: str,
    release: LoadedRelease,
    tally: Tally,
    now: Conditions,
    reason: str = "",
    still: StillCounts | None = None,
) -> TelemetryWindow:
    """One model's tally as a telemetry message."""
    row_in_use = next((row for row in release.plan.rows if row.name == tally.row), None)
    row = row_in_use or plan.best_row(release.plan.rows, now)
    answered = max(1, tally.requests)
    return TelemetryWindow(
        model=model,
        release=release.digest,
        row=shorten(row.name, ROW_NAME_CHARS) if row is not None else "",
        requests=tally.requests,
        failed=tally.failed,
        fallbacks=tally.fallbacks,
        switches=tally.switches,
        emulation_overruns=tally.late,
        up_bytes=tally.up_bytes,
        latency_p50_s=quantile(tally.latencies_s, 0.5),
        latency_p95_s=quantile(tally.latencies_s, 0.95),
        predicted_s=plan.latency_s(row, now) if row is not None else 0.0,
        device_s=tally.device_s / answered,
        link_s=tally.link_s / answered,
        remote_s=tally.remote_s / answered,
        problem=release.trouble[:400],
        reason=reason,
        phases=tuple(
            PhaseSeconds(name, tally.phases[name].total, tally.phases[name].sparse())
            for name in PHASES
            if name in tally.phases
        ),
        slices=measured_slices(release) if tally.requests else (),
        joules=tally.joules / max(1, tally.measured_requests),
        joules_basis=tally.joules_basis,
        still=still,
    )


def with_cascades(
    windows: Iterable[TelemetryWindow], counts: Mapping[str, CascadeCounts]
) -> tuple[TelemetryWindow, ...]:
    """The windows with what cascades counted in them, by model."""
    return tuple(msgspec.structs.replace(window, cascade=counts.get(window.model)) for window in windows)


def measured_slices(release: LoadedRelease) -> tuple[SliceSeconds, ...]:
    """Measured seconds of the release's slices that ran often enough; the longest if there are too many."""
    known = [SliceSeconds(*entry) for entry in release.learned() if entry[2] >= MIN_SLICE_RUNS]
    return tuple(sorted(known, key=lambda entry: entry.seconds, reverse=True)[:MAX_SLICES])


def quantile(values: list[float], ratio: float) -> float:
    """The smallest value that at least the fraction `ratio` of all values does not exceed; 0 without values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(ratio * len(ranked)))] if ranked else 0.0


def build_telemetry(
    session: int,
    sequence: int,
    emulated: bool,
    now: Conditions,
    windows: tuple[TelemetryWindow, ...],
    power: PowerState | None = None,
    **more: Any,
) -> Telemetry:
    """The telemetry message, shortened to the size that a controller accepts; `more` are further fields of it."""
    whole = Telemetry(
        session=session, sequence=sequence, emulated=emulated, up_bytes_per_s=now.link.up_bytes_per_s,
        down_bytes_per_s=now.link.down_bytes_per_s, rtt_s=now.link.rtt_s, remote_usable=now.remote_usable,
        models=windows, power=power, **more,
    )  # fmt: skip
    return shorten_to_fit(whole)


def shorten_to_fit(whole: Telemetry, max_bytes: int = LIMITS.telemetry_bytes) -> Telemetry:
    """The message within `max_bytes`: without the phases of as many models as necessary, those with the fewest
    requests first, then without part of the health records."""
    excess = len(messages.encode(whole)) - max_bytes
    windows = list(whole.models)
    for index in sorted(range(len(windows)), key=lambda position: windows[position].requests):
        if excess <= 0:
            break
        excess -= len(messages.encode(windows[index])) - len(messages.encode(_without_details(windows[index])))
        windows[index] = _without_details(windows[index])
    fits = msgspec.structs.replace(whole, models=tuple(windows))
    while fits.health and len(messages.encode(fits)) > max_bytes:
        fits = msgspec.structs.replace(fits, health=fits.health[: len(fits.health) // 2])
    return fits


def _without_details(telemetry_window: TelemetryWindow) -> TelemetryWindow:
    """The window without phases and slices."""
    return msgspec.structs.replace(telemetry_window, phases=(), slices=())
