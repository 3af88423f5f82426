"""A fleet of simulated devices, its controller and its broker, in virtual time: everything depends on the seed alone.

    with SimulatedFleet(folder, devices=200, seed=1) as fleet:
        first = fleet.release(1)
        fleet.deploy(first)
        fleet.run(60)                                        # virtual seconds; `until=` ends it sooner
        bad = fleet.release(2, Mood(crash=True), share=0.05) # behaves so on that share of the devices
        fleet.deploy(bad, asked=Asked(stages=("10%", "100%")))
        fleet.run(600)
        fleet.devices["sim-0001"].running                    # {"sim": digest}
        fleet.cloud.kill(); fleet.cloud.start()              # also backup(), restore(); every(s, act) for tasks
        assert not fleet.witness.broken

`cloud` has the real parts: `rollouts`, `director`, `devices`, `delivery`, `database`, `repository`, `releasing`. They
may be called between two `run`s, or from `fleet.hub.call_later`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from edgesplit.plan import Link
from edgesplit.testing.in_memory_broker import LocalBroker, LocalSession, Way
from edgesplit.testing.virtual_time import Hub
from edgesplit_agent.control.enrolment import enrol
from edgesplit_agent.control.mqtt_uplink import Rhythm
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_controller.fleet.devices import ClaimWish
from edgesplit_controller.rollout.request import PLAIN, Asked
from edgesplit_simulation.controller import SimulatedController
from edgesplit_simulation.device.device import SimulatedDevice
from edgesplit_simulation.fleet_members import LINK, Members
from edgesplit_simulation.releases import WELL, Mood, SimulatedRelease, make_release

START = 1_767_225_600.0
"""2026-01-01: where a virtual fleet's time begins."""
MODEL = "sim"


@dataclass(frozen=True)
class Rates:
    """How often things happen that cost time to simulate."""

    telemetry_every_s: float = 60.0
    request_every_s: float = 0.0
    """Mean time between two requests of a device; 0: applications ask nothing."""
    stale_after_s: float = 180.0
    tend_every_s: float = 600.0
    """How often the controller looks for what grows old."""
    step_every_s: float = 2.0
    """How often it looks at its rollouts, where no device said anything new."""


SLOWLY = Rates(telemetry_every_s=600, request_every_s=120, stale_after_s=1_800, step_every_s=60)
"""For days and months."""


class SimulatedFleet(Members):
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
        link: Link = LINK,
        group: Callable[[int], str] = lambda number: "",
        keeps_bytes: int = 0,
    ) -> None:
        """`classes`: device classes with their shares; `group`: of the device of that number, from 1."""
        rates = rates or Rates()
        super().__init__(
            folder, Hub(START, seed=seed), seed=seed, classes=classes, health_s=health_s, link=link,
            rhythm=Rhythm(rates.telemetry_every_s, rates.telemetry_every_s), request_every_s=rates.request_every_s,
            keeps_bytes=keeps_bytes,
        )  # fmt: skip
        self.broker = LocalBroker(self.hub)
        self.broker.watch = lambda topic, payload: self.witness.passed(topic, payload, self.hub.monotonic())
        self.cloud = SimulatedController(
            folder / "cloud", self.hub, self.broker, url=database_url, stale_after_s=rates.stale_after_s,
            tend_s=rates.tend_every_s, step_s=rates.step_every_s,
            keeps=bool(keeps_bytes),
        )  # fmt: skip
        self.releases: dict[str, SimulatedRelease] = {}
        self._wanted = devices
        self._group = group

    def __enter__(self) -> SimulatedFleet:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the controller, enrol every device, switch it on."""
        self._begin()
        self.cloud.start()
        for number in range(1, self._wanted + 1):
            self.add(f"sim-{number:04}", number)

    def stop(self) -> None:
        """Switch everything off."""
        for device in self.devices.values():
            device.power_cut()
        self.cloud.kill()
        self._finish()

    def add(self, name: str, number: int = 0, *, on: bool = True) -> SimulatedDevice:
        """Claim and enrol one more device, and switch it on."""
        wish = ClaimWish(device=name, device_class=self._class_of(), group=self._group(number))
        folder = DataFolder(self.folder / "devices" / name)
        identity = enrol(folder, self.cloud.claim(wish), ask=self.cloud.enrol)
        way = Way(delay_s=self.dice.uniform(0.005, 0.08))
        device = SimulatedDevice(folder, identity, self._around(way))
        self._join(device, on=on)
        return device

    def release(
        self, version: int, mood: Mood = WELL, share: float = 1.0, *, model: str = MODEL, size: int = 2_000,
        drift: float = 0.0,
    ) -> SimulatedRelease:  # fmt: skip
        """Sign another version; on that share of the devices it behaves so."""
        made = make_release(model, version, self.classes, size=size, at=self.hub.time(), drift=drift)
        signed = self.witness.signed or set()
        self.witness.signed = signed | made.files
        self.releases[made.digest] = made
        self._moods[made.digest] = mood, share
        self.cloud.publish(made)
        return made

    def deploy(self, release: SimulatedRelease, devices: Collection[str] | None = None, asked: Asked = PLAIN) -> int:
        """Begin to bring it to these devices (all that are not revoked), as `edgectl deploy` does; the rollout's
        number. `fleet.cloud.rollouts` commands and shows it."""
        chosen = [name for name in self.names if name not in self.revoked] if devices is None else devices
        return self.cloud.deploy(release, chosen, asked)

    def run(self, seconds: float, until: Callable[[], object] | None = None) -> bool:
        """Let so much virtual time pass, or less: until that holds; did it hold?"""
        return self.hub.run(seconds, until)

    def running(self, release: SimulatedRelease) -> int:
        """How many devices answer by it."""
        return self.runs(release.model, release.digest)

    def revoke(self, device: str) -> None:
        """Take its right away."""
        self.cloud.revoke(device)
        self.revoked.add(device)

    def connect(self, way: Way) -> Callable[..., LocalSession]:
        """To the broker in this process."""

        def session(host: str, port: int, client_id: str, tls: object, **callbacks: object) -> LocalSession:
            return self.broker.session(client_id, way=way, **callbacks)  # type: ignore[arg-type]

        return session
