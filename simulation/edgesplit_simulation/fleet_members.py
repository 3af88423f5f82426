"""What every simulated fleet has, in virtual time or in real: devices, their disks, how releases behave on them, and
applications that ask."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from edgesplit.plan import Link
from edgesplit.testing.in_memory_broker import Way
from edgesplit.testing.virtual_time import Hub
from edgesplit_agent.control.mqtt_uplink import Rhythm
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_simulation.device.device import SimulatedDevice, Surroundings, Vanishing
from edgesplit_simulation.device.disks import Disks
from edgesplit_simulation.device.engine import Sky
from edgesplit_simulation.invariants.checker import Witness
from edgesplit_simulation.releases import WELL, Mood

LINK = Link(up_bytes_per_s=2_360_000.0, down_bytes_per_s=6_870_000.0, rtt_s=0.02)


class Members(ABC):
    """The devices of one fleet."""

    def __init__(
        self,
        folder: Path,
        hub: Hub,
        *,
        seed: int,
        classes: Mapping[str, float] | None,
        rhythm: Rhythm,
        request_every_s: float,
        health_s: float,
        link: Link = LINK,
        keeps_bytes: int = 0,
    ) -> None:
        """`classes`: device classes with their shares; `request_every_s` 0: applications ask nothing; `keeps_bytes`:
        telemetry that each device keeps while it has no link."""
        self.folder = folder
        self.hub = hub
        self.seed = seed
        self.dice = random.Random(f"fleet {seed}")
        self.witness = Witness()
        self.disks = Disks(folder / "devices")
        self.sky_up = True
        """The offload server answers."""
        self.revoked: set[str] = set()
        self.devices: dict[str, SimulatedDevice] = {}
        self.classes = dict(classes or {"raspberrypi4": 1.0})
        self._rhythm = rhythm
        self._request_every_s = request_every_s
        self._health_s = health_s
        self._link = link
        self._keeps_bytes = keeps_bytes
        self._moods: dict[str, tuple[Mood, float]] = {}
        self._began = hub.monotonic()
        self._mounted = ExitStack()

    @abstractmethod
    def connect(self, way: Way) -> Callable[..., Vanishing]:
        """How a device with that way makes its session."""

    @property
    def passed_s(self) -> float:
        """Of the fleet's own time."""
        return self.hub.monotonic() - self._began

    @property
    def names(self) -> list[str]:
        """Of all devices."""
        return list(self.devices)

    def runs(self, model: str, release: str) -> int:
        """How many devices answer by it."""
        return sum(one.running.get(model) == release for one in self.devices.values())

    def is_ill_with(self, device: str, release: str) -> bool:
        """Does that release behave badly on that device?"""
        mood, share = self._moods.get(release, (WELL, 0.0))
        return mood is not WELL and self._part(device, release) < share

    def twin(self, device: SimulatedDevice, folder: Path) -> SimulatedDevice:
        """A second card with the identity of that device, still without power."""
        copy = SimulatedDevice(DataFolder(folder), device.identity, self._around(Way(device.around.way.delay_s)))
        copy.card = folder.name
        if device.trouble:
            copy.damaged(device.trouble)  # what was wrong with the card was copied too
        return copy

    def check(self) -> None:
        """Look at every device and request now."""
        for device in self.devices.values():
            device.check()
        self.witness.overdue(self.hub.monotonic())

    # For those that are made of this

    def _begin(self) -> None:
        self._mounted.enter_context(self.disks.mounted())

    def _finish(self) -> None:
        self.hub.close()
        self._mounted.close()

    def _join(self, device: SimulatedDevice, *, on: bool) -> None:
        """One more device; applications on it begin to ask."""
        self.devices[device.name] = device
        if on:
            device.power_on()
        if self._request_every_s:
            self._ask_later(device)

    def _around(self, way: Way) -> Surroundings:
        return Surroundings(
            hub=self.hub,
            connect=self.connect(way),
            witness=self.witness,
            sky=Sky(self._link, up=lambda: self.sky_up, reachable=lambda: not way.cut),
            mood=self._mood,
            rhythm=self._rhythm,
            health_s=self._health_s,
            slowdown=self.dice.uniform(0.9, 1.3),
            way=way,
            keeps_bytes=self._keeps_bytes,
        )

    def _mood(self, device: str, release: str) -> Mood:
        return self._moods[release][0] if self.is_ill_with(device, release) else WELL

    def _part(self, device: str, release: str) -> float:
        """In [0, 1), by chance, always the same."""
        place = list(self._moods).index(release)
        return int(hashlib.sha256(f"{self.seed} {device} {place}".encode()).hexdigest()[:8], 16) / 2**32

    def _class_of(self) -> str:
        return self.dice.choices(list(self.classes), list(self.classes.values()))[0]

    def _ask_later(self, device: SimulatedDevice) -> None:
        def ask() -> None:
            for model in sorted(device.running) or [""]:
                if device.is_on and model:
                    device.ask(model)
            self._ask_later(device)

        self.hub.call_later(self.dice.expovariate(1.0 / self._request_every_s), ask)
