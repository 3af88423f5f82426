"""Whole runs: a fleet, its faults, and what is found in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit.process.lifecycle import open_as_many_files_as_allowed
from edgesplit_agent.control.mqtt_uplink import Rhythm
from edgesplit_simulation.faults.injector import Storm
from edgesplit_simulation.faults.schedule import IN_REAL_TIME, Fault
from edgesplit_simulation.fleet import Rates, SimulatedFleet
from edgesplit_simulation.real_controller import RealFleet
from edgesplit_simulation.summary import Summary

SETTLE_S = 6 * 3_600.0
"""After a storm in virtual time, every device must have come to the newest release within this."""
TELL_S = 2.0
GATHER_S = 30.0
"""In real time: how long devices may take to connect before the run counts as begun."""
SPARE_FILES = 100
Tell = Callable[[str], None]


def run_virtual(
    folder: Path,
    devices: int,
    *,
    seed: int,
    classes: Mapping[str, float],
    link: Link,
    faults: Sequence[Fault],
    lasts_s: float,
    request_every_s: float,
    telemetry_every_s: float,
    health_s: float,
    keeps_bytes: int = 0,
    tell: Tell = lambda line: None,
) -> Summary:
    """A fleet with its own controller and broker, in virtual time."""
    rates = Rates(
        telemetry_every_s=telemetry_every_s, request_every_s=request_every_s, stale_after_s=3 * telemetry_every_s,
        step_every_s=min(60.0, telemetry_every_s),
    )  # fmt: skip
    fleet = SimulatedFleet(
        folder, devices, seed=seed, classes=classes, rates=rates, health_s=health_s, link=link, keeps_bytes=keeps_bytes
    )
    with fleet:
        storm = Storm(fleet, faults)
        storm.begin()

        def now() -> Summary:
            return Summary.of(fleet, storm, virtual=True, messages=fleet.broker.counts.published)

        _told(fleet, lasts_s, tell, now)
        storm.end()
        if not fleet.run(SETTLE_S, lambda: storm.settled):
            late = [name for name, one in fleet.devices.items() if not storm.has_settled(one)]
            fleet.witness.complain(f"{len(late)} devices never came to the newest release, as {late[0]}")
        fleet.run(60.0)
        fleet.check()
        return now()


def run_real(
    folder: Path,
    api: ControllerClient,
    devices: int,
    *,
    first: int,
    prefix: str,
    group: str,
    seed: int,
    classes: Mapping[str, float],
    link: str,
    faults: Sequence[Fault],
    lasts_s: float,
    request_every_s: float,
    telemetry_every_s: float,
    health_s: float,
    keeps_bytes: int = 0,
    tell: Tell = lambda line: None,
) -> Summary:
    """Devices at that controller and its broker, in real time."""
    beyond = sorted({fault.what for fault in faults} - IN_REAL_TIME)
    if beyond:
        raise UsageError(f"{beyond[0]!r} is not ours to do to a controller that is real: leave it away, or --virtual")
    fleet = RealFleet(
        folder, api, devices=devices, first=first, prefix=prefix, group=group, seed=seed, classes=classes, link=link,
        rhythm=Rhythm(telemetry_every_s, min(1.0, telemetry_every_s)), request_every_s=request_every_s,
        health_s=health_s, keeps_bytes=keeps_bytes,
    )  # fmt: skip
    most = open_as_many_files_as_allowed()
    if devices > most - SPARE_FILES:
        raise UsageError(
            f"this process may open {most} files, and each device takes one: raise the limit (ulimit -n), or run"
            " several of these with --first"
        )
    with fleet:
        fleet.enrol(lambda done, of: tell(f"{done} of {of} devices enrolled") if done % 50 == 0 else None)
        fleet.start()
        storm = Storm(fleet, faults)

        def now() -> Summary:
            return Summary.of(fleet, storm, virtual=False)

        fleet.hub.run(GATHER_S, lambda: fleet.connected == devices)
        storm.begin()
        try:
            _told(fleet, lasts_s, tell, now)
            storm.end()
        except KeyboardInterrupt:
            tell("stopping")
        fleet.check()
        return now()


def _told(fleet: SimulatedFleet | RealFleet, lasts_s: float, tell: Tell, now: Callable[[], Summary]) -> None:
    """Let the time pass, and say now and then how it goes."""
    end, told_at = fleet.hub.monotonic() + lasts_s, 0.0

    def due() -> bool:
        return time.monotonic() - told_at >= TELL_S

    while fleet.hub.monotonic() < end:
        if not fleet.hub.run(end - fleet.hub.monotonic(), due):
            return
        told_at = time.monotonic()
        tell(now().line())
