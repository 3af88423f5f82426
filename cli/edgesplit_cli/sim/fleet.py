"""A fleet of simulated devices, its controller and its broker, in virtual time: everything depends on the seed alone.

    with SimulatedFleet(folder, devices=200, seed=1) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)
        fleet.run(60)                                        # virtual seconds; `until=` ends it sooner
        bad = fleet.release(2, Mood(crash=True), share=0.05) # behaves so on that share of the devices
        fleet.deploy(bad, fleet.names[:20])
        fleet.run(600)
        fleet.devices["sim-0001"].running                    # {"sim": digest}
        fleet.cloud.kill(); fleet.cloud.start()              # also backup(), restore(); every(s, act) for tasks
        assert not fleet.witness.broken

`cloud` has the real parts: `director`, `devices`, `delivery`, `database`, `repository`, `releasing`. They may be called
between two `run`s, or from `fleet.hub.call_later`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from edgesplit.plan import Link
from edgesplit.testing.broker import LocalBroker, LocalSession, Way
from edgesplit.testing.hub import Hub
from edgesplit_agent.enrolment import enrol
from edgesplit_agent.folder import DataFolder
from edgesplit_agent.uplink import Rhythm
from edgesplit_cli.sim.cloud import SimulatedController
from edgesplit_cli.sim.device import SimulatedDevice, Surroundings
from edgesplit_cli.sim.disks import Disks
from edgesplit_cli.sim.engine import Sky
from edgesplit_cli.sim.releases import WELL, Mood, SimulatedRelease, make_release
from edgesplit_cli.sim.witness import Witness
from edgesplit_controller.devices import ClaimWish

START = 1_767_225_600.0
"""2026-01-01: where a virtual fleet's time begins."""
MODEL = "sim"
LINK = Link(up_bytes_per_s=2_360_000.0, down_bytes_per_s=6_870_000.0, rtt_s=0.02)


@dataclass(frozen=True)
class Rates:
    """How often things happen that cost time to simulate."""

    telemetry_every_s: float = 60.0
    request_every_s: float = 0.0
    """Mean time between two requests of a device; 0: applications ask nothing."""
    stale_after_s: float = 180.0
    tend_every_s: float = 600.0
    """How often the controller looks for what grows old."""


class SimulatedFleet:
    """See the module. `folder` is best in memory."""

    def __init__(
        self,
        folder: Path,
        devices: int = 10,
        *,
        seed: int = 1,
        classes: Mapping[str, float] | None = None,
        rates: Rates | None = None,
        database_url: str = "",
        health_s: float = 10.0,
        group: Callable[[int], str] = lambda number: "",
    ) -> None:
        """`classes`: device classes with their shares; `group`: of the device of that number, from 1."""
        self.folder = folder
        self.seed = seed
        self.dice = random.Random(f"fleet {seed}")
        self.rates = rates or Rates()
        self.hub = Hub(START)
        self.broker = LocalBroker(self.hub)
        self.cloud = SimulatedController(
            folder / "cloud",
            self.hub,
            self.broker,
            url=database_url,
            stale_after_s=self.rates.stale_after_s,
            tend_s=self.rates.tend_every_s,
        )
        self.witness = Witness()
        self.disks = Disks(folder / "devices")
        self.sky_up = True
        """The offload server answers."""
        self.revoked: set[str] = set()
        self.devices: dict[str, SimulatedDevice] = {}
        self.releases: dict[str, SimulatedRelease] = {}
        self._wanted = devices
        self._classes = dict(classes or {"raspberrypi4": 1.0})
        self._moods: dict[str, tuple[Mood, float]] = {}
        self._health_s = health_s
        self._group = group
        self._state_before: object = None
        self._mounted = ExitStack()
        self.broker.watch = lambda topic, payload: self.witness.passed(topic, payload, self.hub.monotonic())

    def __enter__(self) -> SimulatedFleet:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the controller, enrol every device, switch it on."""
        self._mounted.enter_context(self.disks.mounted())
        self._state_before = random.getstate()
        random.seed(self.seed)  # the agent's own jitter comes from there
        self.cloud.start()
        for number in range(1, self._wanted + 1):
            self.add(f"sim-{number:04}", number)

    def stop(self) -> None:
        """Switch everything off."""
        for device in self.devices.values():
            device.power_cut()
        self.cloud.kill()
        self.hub.close()
        self._mounted.close()
        random.setstate(self._state_before)  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        """Of all devices."""
        return list(self.devices)

    def add(self, name: str, number: int = 0, *, on: bool = True) -> SimulatedDevice:
        """Claim and enrol one more device, and switch it on."""
        device_class = self._class_of(name)
        claim = self.cloud.claim(ClaimWish(device=name, device_class=device_class, group=self._group(number)))
        folder = DataFolder(self.folder / "devices" / name)
        identity = enrol(folder, claim, ask=self.cloud.enrol)
        way = Way(delay_s=self.dice.uniform(0.005, 0.08))
        device = SimulatedDevice(folder, identity, self._around(name, way))
        self.devices[name] = device
        if on:
            device.power_on()
        if self.rates.request_every_s:
            self._ask_later(device)
        return device

    def release(
        self, version: int, mood: Mood = WELL, share: float = 1.0, *, model: str = MODEL, size: int = 2_000,
        drift: float = 0.0,
    ) -> SimulatedRelease:  # fmt: skip
        """Sign another version; on that share of the devices it behaves so."""
        made = make_release(model, version, self._classes, size=size, at=self.hub.time(), drift=drift)
        self.witness.signed |= made.files
        self.releases[made.digest] = made
        self._moods[made.digest] = mood, share
        self.cloud.publish(made)
        return made

    def deploy(self, release: SimulatedRelease, devices: Collection[str] | None = None) -> int:
        """Tell these devices (all that are not revoked) to run it."""
        return self.cloud.deploy(release, self.names if devices is None else devices)

    def run(self, seconds: float, until: Callable[[], object] | None = None) -> bool:
        """Let so much virtual time pass, or less: until that holds; did it hold?"""
        return self.hub.run(seconds, until)

    def revoke(self, device: str) -> None:
        """Take its right away."""
        self.cloud.revoke(device)
        self.revoked.add(device)

    def twin(self, device: SimulatedDevice, folder: Path) -> SimulatedDevice:
        """A second card with the identity of that device, still without power."""
        way = Way(delay_s=device.around.way.delay_s)
        around = replace(self._around(device.name, way), sky=Sky(LINK, lambda: self.sky_up, lambda: not way.cut))
        copy = SimulatedDevice(DataFolder(folder), device.identity, around)
        copy.card = folder.name
        return copy

    def runs(self, release: SimulatedRelease, devices: Collection[str] | None = None) -> int:
        """How many of these devices answer by it."""
        chosen = self.names if devices is None else devices
        return sum(self.devices[name].running.get(release.model) == release.digest for name in chosen)

    def is_ill_with(self, device: str, release: str) -> bool:
        """Does that release behave badly on that device?"""
        mood, share = self._moods.get(release, (WELL, 0.0))
        return mood is not WELL and self._part(device, release) < share

    def check(self) -> None:
        """Look at every device and request now."""
        for device in self.devices.values():
            device.check()
        self.witness.overdue(self.hub.monotonic())

    # Inside

    def _around(self, name: str, way: Way) -> Surroundings:
        def connect(host: str, port: int, client_id: str, tls: object, **callbacks: object) -> LocalSession:
            return self.broker.session(client_id, way=way, **callbacks)  # type: ignore[arg-type]

        return Surroundings(
            hub=self.hub,
            connect=connect,
            witness=self.witness,
            sky=Sky(LINK, up=lambda: self.sky_up, reachable=lambda: not way.cut),
            mood=self._mood,
            rhythm=Rhythm(self.rates.telemetry_every_s, self.rates.telemetry_every_s),
            health_s=self._health_s,
            slowdown=self.dice.uniform(0.9, 1.3),
            way=way,
        )

    def _mood(self, device: str, release: str) -> Mood:
        return self._moods[release][0] if self.is_ill_with(device, release) else WELL

    def _part(self, device: str, release: str) -> float:
        """In [0, 1), by chance, always the same."""
        return int(hashlib.sha256(f"{self.seed} {device} {self._place(release)}".encode()).hexdigest()[:8], 16) / 2**32

    def _place(self, release: str) -> int:
        return list(self.releases).index(release) if release in self.releases else -1

    def _class_of(self, name: str) -> str:
        return self.dice.choices(list(self._classes), list(self._classes.values()))[0]

    def _ask_later(self, device: SimulatedDevice) -> None:
        def ask() -> None:
            if device.is_on:
                device.ask(MODEL)
            self._ask_later(device)

        self.hub.call_later(self.dice.expovariate(1.0 / self.rates.request_every_s), ask)
