"""A fleet of simulated devices with its controller and its broker, in virtual time; every run is determined by its
seed.

    with SimulatedFleet(folder, devices=200, seed=1) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)
        fleet.run(60)                                        # virtual seconds; `until=` ends it sooner
        bad = fleet.release(2, Behaviour(crashes=True), share=0.05)  # crashes on 5% of the devices
        fleet.deploy(bad, request=RolloutRequest(stages=("10%", "100%")))
        fleet.run(600)
        fleet.devices["sim-0001"].running                    # {"sim": digest}
        fleet.controller.kill(); fleet.controller.start()    # also backup(), restore(), add_periodic_task()
        assert not fleet.checker.violations

`controller` has the real parts: `rollouts`, `director`, `devices`, `delivery`, `database`, `repository`,
`release_builder`. They may be called between two `run`s, or from `fleet.hub.call_later`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgesplit.plan import Link
from edgesplit.testing.in_memory_broker import InMemoryBroker, InMemorySession, NetworkPath
from edgesplit.testing.virtual_time import Hub
from edgesplit_agent.control.enrolment import enrol
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_controller.fleet.devices import ClaimRequest
from edgesplit_controller.rollout.request import ALL_AT_ONCE, RolloutRequest
from edgesplit_simulation.controller import SimulatedController
from edgesplit_simulation.device.device import SimulatedDevice
from edgesplit_simulation.fleet_members import LINK, BaseFleet
from edgesplit_simulation.releases import HEALTHY, Behaviour, SimulatedRelease, make_release

START = 1_767_225_600.0
"""2026-01-01 as a Unix time: where a virtual fleet's clock starts."""
MODEL = "sim"
"""Name of the model that `SimulatedFleet.release` makes releases of."""


@dataclass(frozen=True)
class EventIntervals:
    """Intervals of the events that dominate the cost of a simulation."""

    telemetry_every_s: float = 60.0
    request_every_s: float = 0.0
    """Mean time between two requests of a device; 0: no requests."""
    stale_after_s: float = 180.0
    """Time without a message after which the controller counts a device as stale."""
    housekeeping_every_s: float = 600.0
    """Interval of the controller's housekeeping (renewal of metadata and statements)."""
    step_every_s: float = 2.0
    """Interval of rollout steps while no device reports anything new."""


LONG_RUN_INTERVALS = EventIntervals(telemetry_every_s=600, request_every_s=120, stale_after_s=1_800, step_every_s=60)
"""Longer intervals for simulations of days and months."""


class SimulatedFleet(BaseFleet):
    """A fleet in virtual time; the module's docstring shows its use. `folder` is best on a RAM disk."""

    def __init__(
        self, folder: Path, devices: int = 10, *, seed: int = 1, classes: Mapping[str, float] | None = None,
        intervals: EventIntervals | None = None, database_url: str = "", health_s: float = 10.0, link: Link = LINK,
        group: Callable[[int], str] = lambda number: "", telemetry_backlog_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`classes` maps device classes to their shares; `group` returns a device's group by its number, from 1."""
        intervals = intervals or EventIntervals()
        super().__init__(
            folder, Hub(START, seed=seed), seed=seed, classes=classes, health_s=health_s, link=link,
            telemetry_schedule=TelemetrySchedule(intervals.telemetry_every_s, intervals.telemetry_every_s),
            request_every_s=intervals.request_every_s, telemetry_backlog_bytes=telemetry_backlog_bytes,
        )  # fmt: skip
        self.broker = InMemoryBroker(self.hub)
        self.broker.on_publish = lambda topic, payload: self.checker.on_message(topic, payload, self.hub.monotonic())
        self.controller = SimulatedController(
            folder / "cloud", self.hub, self.broker, url=database_url, stale_after_s=intervals.stale_after_s,
            housekeeping_s=intervals.housekeeping_every_s, step_s=intervals.step_every_s,
            acknowledges=bool(telemetry_backlog_bytes),
        )  # fmt: skip
        self.releases: dict[str, SimulatedRelease] = {}
        self._device_count = devices
        self._group = group

    def __enter__(self) -> SimulatedFleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the controller, then enrol every device and switch it on."""
        self._begin()
        self.controller.start()
        for number in range(1, self._device_count + 1):
            self.add(f"sim-{number:04}", number)

    def stop(self) -> None:
        """Cut the power of every device and kill the controller."""
        for device in self.devices.values():
            device.power_cut()
        self.controller.kill()
        self._finish()

    def add(self, name: str, number: int = 0, *, on: bool = True) -> SimulatedDevice:
        """Claim and enrol one more device; with `on`, switch it on."""
        request = ClaimRequest(device=name, device_class=self._draw_class(), group=self._group(number))
        folder = DataFolder(self.folder / "devices" / name)
        identity = enrol(folder, self.controller.claim(request), post_enrolment=self.controller.enrol)
        link = NetworkPath(delay_s=self.rng.uniform(0.005, 0.08))
        device = SimulatedDevice(folder, identity, self._environment(link))
        self._register(device, on=on)
        return device

    def release(
        self, version: int, behaviour: Behaviour = HEALTHY, share: float = 1.0, *, model: str = MODEL, size: int =
        2_000, drift: float = 0.0,
    ) -> SimulatedRelease:  # fmt: skip
        """Sign and publish another version, which behaves as `behaviour` on a fraction `share` of the devices."""
        new_release = make_release(model, version, self.classes, size=size, at=self.hub.time(), drift=drift)
        self.checker.signed_files = (self.checker.signed_files or set()) | set(new_release.chunks)
        self.releases[new_release.digest] = new_release
        self._behaviours[new_release.digest] = behaviour, share
        self.controller.publish(new_release)
        return new_release

    def deploy(
        self, release: SimulatedRelease, devices: Collection[str] | None = None, request: RolloutRequest = ALL_AT_ONCE
    ) -> int:
        """Start a rollout to these devices (default: all that are not revoked), as `edgectl deploy` does; returns the
        rollout's number. `fleet.controller.rollouts` controls and shows it."""
        targets = [name for name in self.names if name not in self.revoked] if devices is None else devices
        return self.controller.deploy(release, targets, request)

    def run(self, seconds: float, until: Callable[[], object] | None = None) -> bool:
        """Let `seconds` of virtual time pass, or less if `until` holds earlier; returns whether it held."""
        return self.hub.run(seconds, until)

    def count_running(self, release: SimulatedRelease) -> int:
        """Number of devices that answer by this release."""
        return self.count_serving(release.model, release.digest)

    def revoke(self, device: str) -> None:
        """Revoke the device's certificate."""
        self.controller.revoke(device)
        self.revoked.add(device)

    def connect(self, link: NetworkPath) -> Callable[..., InMemorySession]:
        """A function that opens a session at the in-process broker."""

        def session(host: str, port: int, client_id: str, tls: object, **callbacks: object) -> InMemorySession:
            return self.broker.session(client_id, path=link, **callbacks)

        return session
