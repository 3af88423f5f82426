"""Whole simulation runs: a fleet, its faults, and the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit.process.lifecycle import raise_open_file_limit
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule
from edgesplit_simulation.faults.injector import FaultInjector
from edgesplit_simulation.faults.schedule import REAL_TIME_FAULTS, Fault
from edgesplit_simulation.fleet import EventIntervals, SimulatedFleet
from edgesplit_simulation.real_controller import RealFleet
from edgesplit_simulation.summary import Summary

CONVERGENCE_TIMEOUT_S = 6 * 3_600.0
"""Virtual seconds after the last fault within which every device must run the newest release."""
PROGRESS_INTERVAL_S = 2.0
"""Real seconds between two progress lines."""
CONNECT_TIMEOUT_S = 30.0
"""Real seconds that devices may take to connect before the run counts as begun."""
RESERVED_FILES = 100
"""File descriptors that are left to the rest of the process."""
OnProgress = Callable[[str], None]


def run_virtual(
    folder: Path, devices: int, *, seed: int, classes: Mapping[str, float], link: Link, faults: Sequence[Fault],
    duration_s: float, request_every_s: float, telemetry_every_s: float, health_s: float,
    telemetry_backlog_bytes: int = 0, on_progress: OnProgress = lambda line: None,
) -> Summary:  # fmt: skip
    """Run a fleet with its own controller and broker in virtual time; `on_progress` receives progress lines."""
    rates = EventIntervals(
        telemetry_every_s=telemetry_every_s, request_every_s=request_every_s, stale_after_s=3 * telemetry_every_s,
        step_every_s=min(60.0, telemetry_every_s),
    )  # fmt: skip
    fleet = SimulatedFleet(
        folder, devices, seed=seed, classes=classes, intervals=rates, health_s=health_s, link=link,
        telemetry_backlog_bytes=telemetry_backlog_bytes,
    )  # fmt: skip
    with fleet:
        injector = FaultInjector(fleet, faults)
        injector.begin()

        def now() -> Summary:
            return Summary.from_fleet(fleet, injector, virtual=True, messages=fleet.broker.counts.published)

        _run_with_progress(fleet, duration_s, on_progress, now)
        injector.end()
        if not fleet.run(CONVERGENCE_TIMEOUT_S, lambda: injector.is_converged):
            lagging = [name for name, device in fleet.devices.items() if not injector.has_converged(device)]
            fleet.checker.add_violation(
                f"{len(lagging)} devices never ran the newest release, for example {lagging[0]}"
            )
        fleet.run(60.0)
        fleet.check()
        return now()


def run_real(
    folder: Path, api: ControllerClient, devices: int, *, first: int, prefix: str, group: str, seed: int,
    classes: Mapping[str, float], link: str, faults: Sequence[Fault], duration_s: float, request_every_s: float,
    telemetry_every_s: float, health_s: float, telemetry_backlog_bytes: int = 0,
    on_progress: OnProgress = lambda line: None,
) -> Summary:  # fmt: skip
    """Run devices at that controller and its broker in real time; `on_progress` receives progress lines. UsageError
    where a fault cannot be applied there, or where the process may not open enough files."""
    unsupported = sorted({fault.kind for fault in faults} - REAL_TIME_FAULTS)
    if unsupported:
        raise UsageError(
            f"{unsupported[0]!r} cannot be applied to a real controller: remove it from the file, or add --virtual"
        )
    fleet = RealFleet(
        folder, api, devices=devices, first=first, prefix=prefix, group=group, seed=seed, classes=classes, link=link,
        telemetry_schedule=TelemetrySchedule(telemetry_every_s, min(1.0, telemetry_every_s)),
        request_every_s=request_every_s, health_s=health_s, telemetry_backlog_bytes=telemetry_backlog_bytes,
    )  # fmt: skip
    max_files = raise_open_file_limit()
    if devices > max_files - RESERVED_FILES:
        raise UsageError(
            f"this process may open {max_files} files, and each device takes one: raise the limit (ulimit -n), or run"
            " several of these with --first"
        )
    with fleet:
        fleet.enrol(lambda done, of: on_progress(f"{done} of {of} devices enrolled") if done % 50 == 0 else None)
        fleet.start()
        injector = FaultInjector(fleet, faults)

        def now() -> Summary:
            return Summary.from_fleet(fleet, injector, virtual=False)

        fleet.hub.run(CONNECT_TIMEOUT_S, lambda: fleet.connected == devices)
        injector.begin()
        try:
            _run_with_progress(fleet, duration_s, on_progress, now)
            injector.end()
        except KeyboardInterrupt:
            on_progress("stopping")
        fleet.check()
        return now()


def _run_with_progress(
    fleet: SimulatedFleet | RealFleet, duration_s: float, on_progress: OnProgress, summarise: Callable[[], Summary]
) -> None:
    """Let `duration_s` of the fleet's time pass and pass a progress line to `on_progress` every `PROGRESS_INTERVAL_S`
    seconds."""
    end, told_at = fleet.hub.monotonic() + duration_s, 0.0

    def due() -> bool:
        return time.monotonic() - told_at >= PROGRESS_INTERVAL_S

    while fleet.hub.monotonic() < end:
        if not fleet.hub.run(end - fleet.hub.monotonic(), due):
            return
        told_at = time.monotonic()
        on_progress(summarise().progress_line())
