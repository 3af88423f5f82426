"""Simulated devices at a real controller and its real broker, in real time: each with a key, a certificate and an MQTT
session of its own, by mutual TLS. One process holds thousands.

Devices enrol once, by real claims; a folder that is kept is found again by the next run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import LinkError
from edgesplit.testing.in_memory_broker import Way
from edgesplit.testing.mqtt_reactor import Reactor, ReactorSession
from edgesplit.trust.identity import Claim, decode_document
from edgesplit_agent.control.certificate_renewal import certificate_in_use
from edgesplit_agent.control.enrolment import credentials, enrol_patiently
from edgesplit_agent.control.mqtt_uplink import Rhythm
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_simulation.device.device import SimulatedDevice
from edgesplit_simulation.fleet_members import Members
from edgesplit_simulation.releases import Mood

ENROL_AT_ONCE = 8


class RealFleet(Members):
    """Devices `PREFIX-FIRST` and on. `enrol`, then `start`, then `run`; `stop` in the end."""

    def __init__(
        self,
        folder: Path,
        api: ControllerClient,
        *,
        devices: int,
        first: int = 1,
        prefix: str = "sim",
        seed: int = 1,
        classes: Mapping[str, float] | None = None,
        rhythm: Rhythm,
        request_every_s: float = 0.0,
        health_s: float = 10.0,
        link: str = "wifi",
        group: str = "simulated",
        keeps_bytes: int = 0,
    ) -> None:
        self.reactor = Reactor()
        super().__init__(
            folder, self.reactor.hub, seed=seed, classes=classes, rhythm=rhythm,
            request_every_s=request_every_s, health_s=health_s, keeps_bytes=keeps_bytes,
        )  # fmt: skip
        self.witness.signed = None  # the controller is another's: what it signed is not ours to list
        self.next_mood: tuple[Mood, float] | None = None
        """How the next release that devices see behaves, and on what share of them."""
        self._api = api
        self._wanted = [f"{prefix}-{number:05}" for number in range(first, first + devices)]
        self._links = link
        self._group = group
        self._identities: dict[str, Identity] = {}
        self._ending = threading.Event()

    def __enter__(self) -> RealFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def enrol(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Every device that is not enrolled yet, a few at a time."""
        self._begin()
        new = []
        for name in self._wanted:
            known = DataFolder(self.folder / "devices" / name).enrolled()
            if known is None:
                new.append(name)
            else:
                self._identities[name] = known
        wishes = [
            {"device": name, "device_class": self._class_of(), "link": self._links, "group": self._group}
            for name in new
        ]
        with ThreadPoolExecutor(ENROL_AT_ONCE) as pool:
            for done, identity in enumerate(pool.map(self._enrol_one, wishes), 1):
                self._identities[identity.device] = identity
                progress(done, len(new))

    def start(self, per_s: float = float("inf")) -> None:
        """Switch every device on, so many a second."""
        for number, name in enumerate(self._wanted):
            self.hub.call_later(number / per_s, lambda name=name: self._switch_on(name))  # type: ignore[misc]

    def stop(self) -> None:
        """Every device says goodbye and goes."""
        self._ending.set()
        for device in self.devices.values():
            device.stop()
        self._finish()
        self.reactor.close()

    @property
    def connected(self) -> int:
        """How many devices the broker has let in."""
        return sum(one.is_connected for one in self.devices.values())

    def connect(self, way: Way) -> Callable[..., ReactorSession]:
        """To the real broker."""
        return self.reactor.session

    def _switch_on(self, name: str) -> None:
        folder = DataFolder(self.folder / "devices" / name)
        around = self._around(Way())
        around.tls = lambda folder: credentials(folder).client_context()
        around.certificate = lambda folder: str(certificate_in_use(folder).serial_number)
        self._join(SimulatedDevice(folder, self._identities[name], around), on=True)

    def _mood(self, device: str, release: str) -> Mood:
        if release not in self._moods:
            self._moods[release], self.next_mood = self.next_mood or (Mood(), 0.0), None
        return super()._mood(device, release)

    def _enrol_one(self, wish: Mapping[str, Any]) -> Identity:
        claim = decode_document(msgspec.json.encode(self._api.post("/v1/devices/claims", wish)), Claim)
        folder = DataFolder(self.folder / "devices" / claim.device)
        identity = enrol_patiently(folder, claim, None, self._ending.wait)
        if identity is None:
            raise LinkError("stopped while devices were enrolled")
        return identity
