"""Simulated devices at a real controller and its real broker, in real time: each with its own key, certificate and MQTT
session over mutual TLS. One process holds thousands.

Devices enrol once, with real claims; a data folder that is kept is reused by the next run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import LinkError
from edgesplit.links import parse_link
from edgesplit.testing.in_memory_broker import NetworkPath
from edgesplit.testing.mqtt_reactor import Reactor, ReactorSession
from edgesplit.trust.identity import Claim, decode_document
from edgesplit_agent.control.certificate_renewal import certificate_in_use
from edgesplit_agent.control.enrolment import credentials, enrol_with_retries
from edgesplit_agent.control.mqtt_uplink import TelemetrySchedule
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_simulation.device.device import SimulatedDevice
from edgesplit_simulation.fleet_members import BaseFleet
from edgesplit_simulation.releases import Behaviour

ENROL_AT_ONCE = 8


class RealFleet(BaseFleet):
    """Devices named PREFIX-NUMBER at a real controller: `enrol`, `start`, `run`, and `stop` at the end."""

    def __init__(
        self, folder: Path, api: ControllerClient, *, devices: int, first: int = 1, prefix: str = "sim", seed: int = 1,
        classes: Mapping[str, float] | None = None, telemetry_schedule: TelemetrySchedule, request_every_s: float = 0.0,
        health_s: float = 10.0, link: str = "wifi", group: str = "simulated", telemetry_backlog_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`link` is written into the claims, and emulated between each device and its simulated offload server."""
        self.reactor = Reactor()
        super().__init__(
            folder, self.reactor.hub, seed=seed, classes=classes, telemetry_schedule=telemetry_schedule,
            request_every_s=request_every_s, health_s=health_s, link=parse_link(link),
            telemetry_backlog_bytes=telemetry_backlog_bytes,
        )  # fmt: skip
        self.checker.signed_files = None  # the controller is external: which files it signed is not known here
        self.next_behaviour: tuple[Behaviour, float] | None = None
        """How the next release that devices receive behaves, and on what fraction of them."""
        self._api = api
        self._device_names = [f"{prefix}-{number:05}" for number in range(first, first + devices)]
        self._link_name = link
        self._group = group
        self._identities: dict[str, Identity] = {}
        self._stopping = threading.Event()

    def __enter__(self) -> RealFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def enrol(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Enrol every device that is not enrolled yet, `ENROL_AT_ONCE` at a time; `progress` receives the count and the
        total."""
        self._begin()
        new = []
        for name in self._device_names:
            identity_on_disk = DataFolder(self.folder / "devices" / name).read_identity()
            if identity_on_disk is None:
                new.append(name)
            else:
                self._identities[name] = identity_on_disk
        claim_requests = [
            {"device": name, "device_class": self._draw_class(), "link": self._link_name, "group": self._group}
            for name in new
        ]
        with ThreadPoolExecutor(ENROL_AT_ONCE) as pool:
            for done, identity in enumerate(pool.map(self._enrol_one, claim_requests), 1):
                self._identities[identity.device] = identity
                progress(done, len(new))

    def start(self, per_s: float = float("inf")) -> None:
        """Switch on every device, `per_s` of them per second."""
        for number, name in enumerate(self._device_names):
            self.hub.call_later(number / per_s, lambda name=name: self._switch_on(name))  # type: ignore[misc]

    def stop(self) -> None:
        """Stop every device in order and close the reactor."""
        self._stopping.set()
        for device in self.devices.values():
            device.stop()
        self._finish()
        self.reactor.close()

    @property
    def connected(self) -> int:
        """Number of devices with an accepted session."""
        return sum(device.is_connected for device in self.devices.values())

    def connect(self, link: NetworkPath) -> Callable[..., ReactorSession]:
        """A function that opens a session at the real broker."""
        return self.reactor.session

    def _switch_on(self, name: str) -> None:
        folder = DataFolder(self.folder / "devices" / name)
        environment = self._environment(NetworkPath())
        environment.tls = lambda folder: credentials(folder).client_context()
        environment.certificate = lambda folder: str(certificate_in_use(folder).serial_number)
        self._register(SimulatedDevice(folder, self._identities[name], environment), on=True)

    def _behaviour_of(self, device: str, release: str) -> Behaviour:
        if release not in self._behaviours:
            self._behaviours[release], self.next_behaviour = self.next_behaviour or (Behaviour(), 0.0), None
        return super()._behaviour_of(device, release)

    def _enrol_one(self, claim_request: Mapping[str, Any]) -> Identity:
        claim = decode_document(msgspec.json.encode(self._api.post("/v1/devices/claims", claim_request)), Claim)
        folder = DataFolder(self.folder / "devices" / claim.device)
        identity = enrol_with_retries(folder, claim, None, self._stopping.wait)
        if identity is None:
            raise LinkError("stopped while devices were enrolled")
        return identity
