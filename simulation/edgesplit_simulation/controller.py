"""The controller of a simulated fleet: the controller's own classes over a real database and a real TUF repository, on
virtual time, connected to an in-process broker.

What `edgectl up` adds around them is left out: no HTTP, no mosquitto, no processes. `kill` acts as SIGKILL: nothing
more is written, and the next `start` finds what is on disk. `backup` and `restore` copy the whole folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from edgesplit.errors import EdgeError
from edgesplit.mqtt import messages
from edgesplit.testing.in_memory_broker import InMemoryBroker, InMemorySession
from edgesplit.testing.virtual_time import Hub
from edgesplit.trust.identity import Claim, Enrolled, EnrolmentRequest, decode_document, encode_document
from edgesplit_controller.fleet.device_events import DeviceEvents
from edgesplit_controller.fleet.devices import ClaimRequest, Devices
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.messaging.broker import CONTROLLER
from edgesplit_controller.messaging.delivery import SUBSCRIPTIONS, Delivery, Sources
from edgesplit_controller.messaging.statement_publisher import StatementPublisher
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.planning.planner_service import PlanningService, PlanOptions
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.releases.content_keys import load_or_make_content_keys
from edgesplit_controller.releases.director import Director
from edgesplit_controller.rollout.engine import Rollouts, RolloutSpec
from edgesplit_controller.rollout.release_health import evidence_of_members
from edgesplit_controller.rollout.request import ALL_AT_ONCE, RolloutRequest
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Model
from edgesplit_controller.tuf.repository import Repository
from edgesplit_simulation.releases import SimulatedRelease

HOUSEKEEPING_S = 60.0
STEP_S = 2.0
"""Seconds between two rollout steps while devices report nothing new."""
STEP_AFTER_REPORT_S = 0.5
"""Seconds from a device's report to the next rollout step."""
FOLLOW_UP_STEPS = 30
"""Every so many rollout steps, devices that came back are followed up and late ones are caught up."""
WAKE_DELAY_S = 0.2
"""Seconds until the controller's worker threads wake; messages that arrive within this time are ingested in one batch.
"""
STATEMENT_S = 30 * 86_400


class SimulatedController:
    """One controller on one data folder; call `start` first."""

    def __init__(
        self, folder: Path, hub: Hub, broker: InMemoryBroker, *, url: str = "", stale_after_s: float = 10.0,
        housekeeping_s: float = HOUSEKEEPING_S, step_s: float = STEP_S, wake_delay_s: float = WAKE_DELAY_S,
        acknowledges: bool = False,
    ) -> None:  # fmt: skip
        """`url` is the database URL; empty means SQLite in `folder`. `acknowledges`: acknowledge stored telemetry to
        devices, which devices with a telemetry backlog wait for."""
        self.folder = folder
        self.acknowledges = acknowledges
        self.hub = hub
        self.broker = broker
        self.url = url
        self.starts = 0
        self._stale_after_s = stale_after_s
        self._housekeeping_s = housekeeping_s
        self._step_s = step_s
        self._wake_delay_s = wake_delay_s
        self._steps = 0
        self._restored = False
        self._session: InMemorySession | None = None
        self._tasks: list[tuple[float, Callable[[SimulatedController], None]]] = []
        broker.refusal_reason = self._refusal_reason

    @property
    def is_running(self) -> bool:
        """True from `start` until `kill`."""
        return self._session is not None

    def start(self) -> None:
        """Assemble the controller's classes over the folder, as `edgectl up` does, and connect to the broker."""
        now, folder = self.hub.time, self.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        self.authority = Authority(folder / "keys")
        self.repository = Repository(folder / "tuf", now=now)
        self.repository.renew()
        self.database = Database(self.url or f"sqlite:///{folder / 'controller.db'}")
        self.blobs = BlobStore(folder / "blobs")
        self.registry = Registry(self.database, self.blobs, now=now)
        self.devices = Devices(self.database, stale_after_s=self._stale_after_s, now=now)
        self.release_builder = ReleaseBuilder(
            self.database, self.blobs, self.registry, PlanningService(self.database, self.registry, now=now),
            self.repository, offload_releases=folder / "offload" / "releases",
            content_keys=load_or_make_content_keys(folder / "keys" / "content.key"), now=now,
        )  # fmt: skip
        gateways = Gateways(self.database, now=now, model_if_split=self.release_builder.split_by_gateway)
        self.director = Director(
            self.database, self.repository.sign_statement, statement_s=STATEMENT_S, now=now, gateways=gateways
        )
        self.rollouts = Rollouts(
            self.database, self.director, now=now, evidences=evidence_of_members,
            announce=lambda devices: self.delivery.publish_statements(devices),
        )  # fmt: skip
        events = DeviceEvents(
            self.devices, acknowledge=self._acknowledge, end_session=self.broker.disconnect,
            publish_revocations=lambda: None, clear_retained=lambda devices: self.delivery.clear_retained(devices),
            on_reports=self._on_reports,
        )  # fmt: skip
        sources = Sources(
            metadata=self.repository.read, chunk=self.blobs.get, release_chunks=self.release_builder.chunks_of,
            ingest=events.on_messages, statements=self.director.statements, on_flood=events.on_flood,
            confirm=StatementPublisher(self.database).confirm,
        )  # fmt: skip
        self.delivery = Delivery(sources, self.hub.with_wakeup_delay(self._wake_delay_s))
        if self._restored:  # statements sent since the backup are lost: publish all again, with newer counters
            self.director.resign_all()
            self._restored = False
        self._connect()
        self.rollouts.extend_timeouts_after_outage()
        self._repeat(self._step_s, self._step)
        self._repeat(self._housekeeping_s, self._run_housekeeping)
        for seconds, act in self._tasks:
            self._repeat(seconds, lambda act=act: act(self))  # type: ignore[misc]

    def add_periodic_task(self, seconds: float, act: Callable[[SimulatedController], None]) -> None:
        """Call `act` every `seconds` while the controller runs, again after each restart. `act` must not block."""
        self._tasks.append((seconds, act))
        if self.is_running:
            self._repeat(seconds, lambda: act(self))

    def kill(self) -> None:
        """End the controller as SIGKILL does: nothing is written and its session ends without a goodbye."""
        session, self._session = self._session, None
        if session is None:
            return
        session.vanish()
        self.broker.remove_session(session, will=False)
        self.delivery.stop()
        self.database.close()

    def backup(self, to: Path) -> None:
        """Copy the whole data folder to `to`. The controller must be stopped or idle."""
        shutil.copytree(self.folder, to, dirs_exist_ok=False)

    def restore(self, backup: Path, *, restate: bool = True) -> None:
        """Replace the data folder by `backup`; the controller must be stopped. With `restate`, the next `start`
        publishes every statement again under new counters; without, the controller does not learn that it was restored.
        """
        shutil.rmtree(self.folder)
        shutil.copytree(backup, self.folder)
        self._restored = restate

    # Requests of operators and devices

    def claim(self, request: ClaimRequest) -> Claim:
        """Create a one-time enrolment claim."""
        token, expires = self.devices.claim(request)
        return Claim(
            device=request.device, device_class=request.device_class, token=token, controller_url="https://simulated",
            ca_pem=self.authority.ca_pem, tuf_root=self.repository.root_bytes.decode(), expires=expires,
        )  # fmt: skip

    def enrol(self, request: bytes) -> bytes:
        """Answer a device's encoded `EnrolmentRequest` with an encoded `Enrolled`, as the HTTP API does."""
        document = decode_document(request, EnrolmentRequest)
        admitted = self.devices.enrol(
            document.token, document.csr_pem.encode(), self.authority.sign_request, document.encryption_key
        )
        if admitted.fresh:
            self.delivery.clear_retained([admitted.device])
        enrolled = Enrolled(
            device=admitted.device, certificate_pem=admitted.certificate.decode(), ca_pem=self.authority.ca_pem,
            broker_host="simulated", broker_port=1, offload_url="https://simulated",
        )  # fmt: skip
        return encode_document(enrolled)

    def publish(self, release: SimulatedRelease) -> str:
        """Sign a release and register it; returns its digest."""
        model = self._insert_model_row(release)
        self.blobs.put_all(release.chunks.values())
        self.release_builder.publish(model, self.blobs.put(release.raw), PlanOptions())
        return release.digest

    def deploy(self, release: SimulatedRelease, devices: Collection[str], request: RolloutRequest = ALL_AT_ONCE) -> int:
        """Start a rollout of the release to these devices; returns the rollout's number."""
        chosen = [device for device in self.devices.all() if device.name in set(devices)]
        model = f"{release.model}@{release.version}"
        wanted = RolloutSpec(release.digest, model, chosen, targets=sorted(devices), request=request)
        return self.rollouts.create(wanted).number

    def revoke(self, device: str) -> None:
        """Revoke a device's certificate and end its broker session."""
        self.devices.revoke(device)
        self.delivery.publish_statements([device])
        self.broker.disconnect(device)

    # Internals

    def _connect(self) -> None:
        session = self._session = self.broker.session(
            CONTROLLER, on_message=self.delivery.on_message, on_connect=self.delivery.on_connect
        )
        self.broker.on_client = self.delivery.on_client_connected
        session.subscribe(SUBSCRIPTIONS, qos=1)
        self.delivery.start(session)
        session.start()

    def _repeat(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self._repeat(seconds, act)

        self._call_later(seconds, again)

    def _call_later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`, unless the controller was killed in the meantime."""
        started = self.starts

        def begin() -> None:
            if self.is_running and self.starts == started:
                act()

        self.hub.call_later(seconds, begin)

    def _step(self) -> None:
        """Run rollout steps until none is due, as `RolloutJob` does; every `FOLLOW_UP_STEPS` calls also follow up
        devices that came back."""
        while self.rollouts.step_all():
            pass
        self._steps += 1
        if self._steps % FOLLOW_UP_STEPS == 0:
            self.rollouts.add_matching_devices()
            self.rollouts.overtake_reported_counters()

    def _run_housekeeping(self) -> None:
        self.repository.refresh_timestamp()
        if renewed := self.director.renew():
            self.delivery.publish_statements(renewed)
        self.devices.release_quarantined()

    def _acknowledge(self, acks: Collection[tuple[str, messages.Ack]]) -> None:
        if self.acknowledges:
            self.delivery.acknowledge(acks)

    def _on_reports(self) -> None:
        self.delivery.publish_statements(self.director.refresh_gateway_statements())
        self._call_later(STEP_AFTER_REPORT_S, self._step)

    def _refusal_reason(self, client: str) -> str:
        """The reason to refuse a client, empty to admit it; stands in for the broker's revocation list."""
        if client == CONTROLLER or not self.is_running:
            return ""
        try:
            return "certificate revoked" if self.devices.get(client).revoked else ""
        except EdgeError:
            return "unknown certificate"

    def _insert_model_row(self, release: SimulatedRelease) -> Model:
        """Insert the database row of a model that cannot be executed."""
        with self.database.write() as session:
            model = Model(
                name=release.model, version=release.version, sha256=release.digest, optimised_sha256=release.digest,
                bytes=sum(map(len, release.chunks.values())), input_text="", bindings={},
                shown={"inputs": [], "outputs": [], "layers": [], "format": "simulated"}, created=self.hub.time(),
            )  # fmt: skip
            session.add(model)
            session.flush()
            return model
