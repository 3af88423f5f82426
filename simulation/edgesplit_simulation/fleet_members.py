"""What every simulated fleet has, in virtual or real time: devices, their disks, the behaviour of each release, and
applications that send requests."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from edgesplit.plan import Link
from edgesplit.testing.in_memory_broker import NetworkPath
from edgesplit.testing.virtual_time import Hub
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_simulation.device.device import CuttableConnection, DeviceEnvironment, SimulatedDevice
from edgesplit_simulation.device.disks import Disks
from edgesplit_simulation.device.engine import SimulatedOffloadServer
from edgesplit_simulation.invariants.checker import InvariantChecker
from edgesplit_simulation.releases import HEALTHY, Behaviour

LINK = Link(up_bytes_per_s=2_360_000.0, down_bytes_per_s=6_870_000.0, rtt_s=0.02)


class BaseFleet(ABC):
    """Base class of a simulated fleet: its devices and what surrounds them."""

    def __init__(
        self, folder: Path, hub: Hub, *, seed: int, classes: Mapping[str, float] | None,
        telemetry_schedule: TelemetrySchedule, request_every_s: float, health_s: float, link: Link = LINK,
        telemetry_backlog_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`classes` maps device classes to their shares; `request_every_s` 0 means no requests;
        `telemetry_backlog_bytes` limits the telemetry backlog of each device while it has no link."""
        self.folder = folder
        self.hub = hub
        self.seed = seed
        self.rng = random.Random(f"fleet {seed}")
        self.checker = InvariantChecker()
        self.disks = Disks(folder / "devices")
        self.offload_server_up = True
        """True while the offload server answers."""
        self.revoked: set[str] = set()
        self.devices: dict[str, SimulatedDevice] = {}
        self.classes = dict(classes or {"raspberrypi4": 1.0})
        self._telemetry_schedule = telemetry_schedule
        self._request_every_s = request_every_s
        self._health_s = health_s
        self._link = link
        self._telemetry_backlog_bytes = telemetry_backlog_bytes
        self._behaviours: dict[str, tuple[Behaviour, float]] = {}
        self._began_at = hub.monotonic()
        self._installed = ExitStack()

    @abstractmethod
    def connect(self, link: NetworkPath) -> Callable[..., CuttableConnection]:
        """A function that opens the MQTT session of a device with that link."""

    @property
    def elapsed_s(self) -> float:
        """Seconds of the fleet's own time since it was created."""
        return self.hub.monotonic() - self._began_at

    @property
    def names(self) -> list[str]:
        """Names of all devices."""
        return list(self.devices)

    def count_serving(self, model: str, release: str) -> int:
        """Number of devices that answer requests for `model` by this release."""
        return sum(device.running.get(model) == release for device in self.devices.values())

    def misbehaves(self, device: str, release: str) -> bool:
        """True where that release behaves badly on that device."""
        mood, share = self._behaviours.get(release, (HEALTHY, 0.0))
        return mood is not HEALTHY and self._random_fraction(device, release) < share

    def clone(self, device: SimulatedDevice, folder: Path) -> SimulatedDevice:
        """A device on a copy of that device's card, hence with the same identity; not switched on."""
        copy = SimulatedDevice(
            DataFolder(folder), device.identity, self._environment(NetworkPath(device.environment.broker_link.delay_s))
        )
        copy.card_name = folder.name
        if device.damage:
            copy.mark_damaged(device.damage)  # the damage was copied with the card
        return copy

    def check(self) -> None:
        """Check the invariants of every device and every open request now."""
        for device in self.devices.values():
            device.check_serving()
        self.checker.check_overdue(self.hub.monotonic())

    # For subclasses

    def _begin(self) -> None:
        self._installed.enter_context(self.disks.installed())

    def _finish(self) -> None:
        self.hub.close()
        self._installed.close()

    def _register(self, device: SimulatedDevice, *, on: bool) -> None:
        """Add a device; with `on`, switch it on. Applications on it start to send requests."""
        self.devices[device.name] = device
        if on:
            device.power_on()
        if self._request_every_s:
            self._schedule_request(device)

    def _environment(self, link: NetworkPath) -> DeviceEnvironment:
        return DeviceEnvironment(
            hub=self.hub,
            connect=self.connect(link),
            checker=self.checker,
            offload_server=SimulatedOffloadServer(
                self._link, is_up=lambda: self.offload_server_up, is_reachable=lambda: not link.cut
            ),
            behaviour_of=self._behaviour_of,
            telemetry_schedule=self._telemetry_schedule,
            health_s=self._health_s,
            slowdown=self.rng.uniform(0.9, 1.3),
            broker_link=link,
            telemetry_backlog_bytes=self._telemetry_backlog_bytes,
        )

    def _behaviour_of(self, device: str, release: str) -> Behaviour:
        return self._behaviours[release][0] if self.misbehaves(device, release) else HEALTHY

    def _random_fraction(self, device: str, release: str) -> float:
        """A pseudo-random number in [0, 1), fixed for a seed, device and release."""
        index = list(self._behaviours).index(release)
        return int(hashlib.sha256(f"{self.seed} {device} {index}".encode()).hexdigest()[:8], 16) / 2**32

    def _draw_class(self) -> str:
        return self.rng.choices(list(self.classes), list(self.classes.values()))[0]

    def _schedule_request(self, device: SimulatedDevice) -> None:
        def ask() -> None:
            for model in sorted(device.running) or [""]:
                if device.is_on and model:
                    device.request(model)
            self._schedule_request(device)

        self.hub.call_later(self.rng.expovariate(1.0 / self._request_every_s), ask)
