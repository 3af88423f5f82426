"""Puts the parts of a controller together, with nothing started yet. Parts know each other by what they are given here.

Delivery, director and rollouts know each other in a ring: what a device says may end a rollout, and what a rollout says
is delivered. So their words to each other are methods of one `Assembly`, which has all three once it is made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgesplit.mqtt import messages
from edgesplit.observability.registry import Ledger
from edgesplit.release.agent_release import is_agent
from edgesplit_controller.app.offload_process import OFFLOAD, REVOKED
from edgesplit_controller.components.overview import Parts
from edgesplit_controller.controller import Addresses, Controller
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.fleet.listing import Listing
from edgesplit_controller.fleet.log_bundles import Bundles
from edgesplit_controller.fleet.overview import Fleet
from edgesplit_controller.history.rollup import Rolling
from edgesplit_controller.messaging.delivery import Delivery, Sources
from edgesplit_controller.messaging.process_sharding import Alone, Colleagues
from edgesplit_controller.messaging.statement_publisher import Stating
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.observability import metrics
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.revocation import Revocations
from edgesplit_controller.planning.planner_service import Planning
from edgesplit_controller.releases.agent_releases import AgentReleases
from edgesplit_controller.releases.build import Releasing
from edgesplit_controller.releases.bundle import Offline
from edgesplit_controller.releases.content_keys import load_or_make_content_keys
from edgesplit_controller.releases.director import Director
from edgesplit_controller.releases.export import Exporting
from edgesplit_controller.releases.signing import Signing
from edgesplit_controller.replan.replanner import Replanner
from edgesplit_controller.rollout.engine import Rollouts
from edgesplit_controller.rollout.release_health import of_members
from edgesplit_controller.settings import Settings
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database, Device
from edgesplit_controller.storage.leases import Lease
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import Rotation


@dataclass(frozen=True, slots=True)
class Foundations:
    """What every part stands on."""

    settings: Settings
    database: Database
    blobs: BlobStore
    authority: Authority
    repository: Repository
    rotation: Rotation
    lease: Lease
    colleagues: Colleagues = field(default_factory=Alone)
    ledger: Ledger = field(default_factory=Ledger)


class Assembly:
    """The parts that keep and decide: `controller`, and what is started around it."""

    def __init__(self, on: Foundations) -> None:
        self._on = on
        data, database = on.settings.data, on.database
        self._content_keys = load_or_make_content_keys(data / "keys" / "content.key")
        self._registry = Registry(database, on.blobs, now=time.time)
        self._planning = Planning(database, self._registry, now=time.time)
        self._releasing = Releasing(
            database, on.blobs, self._registry, self._planning, on.repository,
            offload_releases=data / OFFLOAD / "releases", content_keys=self._content_keys, now=time.time,
        )  # fmt: skip
        self._devices = Devices(
            database, stale_after_s=on.settings.silent_after_s, telemetry_s=on.settings.telemetry_s, now=time.time
        )
        lists = [data / "broker" / REVOKED, data / OFFLOAD / REVOKED]
        self.revocations = Revocations(
            on.authority, self._devices.revoked_serials, lists, on.settings.broker_address
        )  # fmt: skip
        self._gateways = Gateways(database, now=time.time, split_of=self._releasing.split_by_gateway)
        self._director = Director(
            database, on.repository.sign_statement, statement_s=on.settings.statement_s, now=time.time,
            wrap=self._wrapped, wrap_far=self._wrapped_far, tiers=self._gateways,
        )  # fmt: skip
        self._rollouts = Rollouts(
            database, self._director, now=time.time, announce=self._announce, fits=self._fits, evidences=of_members
        )
        self.delivery = Delivery(self._sources(), colleagues=on.colleagues)
        self.controller = self._controller()

    def _sources(self) -> Sources:
        return Sources(
            metadata=self._on.repository.read,
            chunk=self._on.blobs.get,
            release_chunks=self._releasing.chunks_of,
            hear=self._hear,
            statements=self._director.statements,
            flooding=self._flooding,
            confirm=Stating(self._on.database).confirm,
            leads=self._on.lease.held,
        )

    def _controller(self) -> Controller:
        on, database, settings = self._on, self._on.database, self._on.settings
        rolling = Rolling(database, now=time.time)
        return Controller(
            database=database,
            blobs=on.blobs,
            registry=self._registry,
            planning=self._planning,
            releasing=self._releasing,
            devices=self._devices,
            gateways=self._gateways,
            director=self._director,
            rollouts=self._rollouts,
            authority=on.authority,
            tell=self.delivery,
            revocations=self.revocations,
            addresses=Addresses(api_url(settings), *settings.told_broker, offload_url(settings)),
            signing=self._signing(),
            exporting=self._exporting(),
            listing=Listing(database, stale_after_s=settings.silent_after_s, now=time.time),
            fleet=Fleet(database, stale_after_s=settings.silent_after_s, now=time.time),
            rolling=rolling,
            bundles=Bundles(database, self.delivery.ask, now=time.time),
            offline=Offline(on.repository, self._director, self._releasing, on.blobs, time.time),
            agents=AgentReleases(database, on.blobs, self._releasing, now=time.time),
            replanner=self._replanner(),
            parts=Parts(
                database, settings.data, stale_after_s=settings.silent_after_s, behind=rolling.behind, now=time.time
            ),
        )

    def _signing(self) -> Signing:
        on, root = self._on, self._on.settings.data / OFFLOAD / "root.json"
        return Signing(
            on.repository, on.rotation, on.database, self._releasing, self._director, self.delivery,
            offload_root=root, now=time.time,
        )  # fmt: skip

    def _exporting(self) -> Exporting:
        on = self._on
        return Exporting(
            on.database, self._registry, self._releasing, on.repository, self._content_keys,
            offload_releases=on.settings.data / OFFLOAD / "releases", now=time.time,
        )  # fmt: skip

    def _replanner(self) -> Replanner:
        return Replanner(
            self._on.database, self._registry, self._planning, self._releasing, self._gateways,
            roll_out=self._rollouts.make, now=time.time,
        )  # fmt: skip

    # What the parts say to each other

    def _hear(self, said: list[tuple[str, messages.Message]]) -> None:
        began = time.perf_counter()
        taken = self._devices.hear(said)
        self.delivery.keep(taken.kept)
        metrics.heard(self._on.ledger, taken, time.perf_counter() - began)
        if taken.superseded:
            self.revocations.publish()
        for device in taken.intruders:
            self.revocations.cut(device)
        if any(isinstance(message, messages.Reported) for _, message in said):
            self.delivery.tell(self._director.settle())  # what a device runs no more, its gateway need not keep
            self._rollouts.news.set()

    def _flooding(self, device: str, dropped: int) -> None:
        if self._devices.hold(device, dropped):
            self.revocations.publish()
            self.revocations.cut(device)

    def _announce(self, told: Sequence[str]) -> None:
        self.delivery.tell(self._director.settle())  # gateways hear of it before the devices behind them
        self.delivery.tell(told)

    def _fits(self, release: str, device_class: str) -> bool:
        manifest = self._releasing.find(release)
        return manifest is not None and (is_agent(manifest) or device_class in manifest.plans)

    def _wrapped(self, device: Device, release: str) -> bytes:
        return self._content_keys.wrapped(device, release, self._releasing.manifest(release))

    def _wrapped_far(self, gateway: Device, release: str) -> bytes:
        return self._content_keys.wrapped_far(gateway, release, self._releasing.manifest(release))


def api_url(settings: Settings) -> str:
    """Where devices find the API."""
    return settings.api_url or f"https://{settings.url_host}:{settings.api_port}"


def offload_url(settings: Settings) -> str:
    """Where devices find the offload server."""
    return settings.offload_url or f"https://{settings.url_host}:{settings.offload_port}"
