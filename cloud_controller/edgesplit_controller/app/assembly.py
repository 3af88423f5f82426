"""Connects the parts of a controller; starts nothing. Parts receive what they depend on as arguments here.

Delivery, director and rollouts depend on each other in a circle: a message of a device may end a rollout step, and a
rollout publishes statements. The circle is closed by callbacks that look up `delivery` when they are called.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from edgesplit.observability.registry import MetricRegistry
from edgesplit_controller.app.offload_process import OFFLOAD, REVOKED
from edgesplit_controller.components.overview import HealthOverview
from edgesplit_controller.controller import Addresses, Controller
from edgesplit_controller.fleet.device_events import DeviceEvents
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.fleet.listing import Listing
from edgesplit_controller.fleet.log_bundles import LogBundleStore
from edgesplit_controller.fleet.overview import FleetOverview
from edgesplit_controller.fleet.remote_inference import RemoteInferences
from edgesplit_controller.history.rollup import RollUp
from edgesplit_controller.messaging.broker_traffic import TrafficMeter
from edgesplit_controller.messaging.delivery import Delivery, Sources
from edgesplit_controller.messaging.process_sharding import ProcessSharding, SingleProcess
from edgesplit_controller.messaging.statement_publisher import StatementPublisher
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.model_registry.sample_sets import SampleSets
from edgesplit_controller.model_registry.variants import Variants
from edgesplit_controller.observability import metrics
from edgesplit_controller.pki.authority import BROKER_LIST_LIFE, LIST_LIFE, Authority
from edgesplit_controller.pki.derived_secrets import DerivedSecrets
from edgesplit_controller.pki.revocation import Revocations
from edgesplit_controller.planning.planner_service import PlanningService
from edgesplit_controller.releases.agent_releases import AgentReleases
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.releases.bundle import ReleaseBundler
from edgesplit_controller.releases.content_keys import load_or_make_content_keys
from edgesplit_controller.releases.director import Director
from edgesplit_controller.releases.export import Exporter
from edgesplit_controller.releases.signing import KeyManagement
from edgesplit_controller.replan.replanner import Replanner
from edgesplit_controller.retention.collector import Collector
from edgesplit_controller.retention.removal import Removal
from edgesplit_controller.retention.rules import RetentionRules
from edgesplit_controller.rollout.engine import Rollouts
from edgesplit_controller.rollout.release_health import evidence_of_members
from edgesplit_controller.settings import Settings
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import Rotation


@dataclass(frozen=True, slots=True)
class Foundations:
    """What every part depends on."""

    settings: Settings
    database: Database
    blobs: Blobs
    authority: Authority
    derived_secrets: DerivedSecrets
    repository: Repository
    rotation: Rotation
    lease: Lease
    sharding: ProcessSharding = field(default_factory=SingleProcess)
    metric_registry: MetricRegistry = field(default_factory=MetricRegistry)


class Assembly:
    """The parts of a controller process: `controller`, and what the process starts around it."""

    controller: Controller
    delivery: Delivery

    def __init__(self, foundations: Foundations) -> None:
        self._foundations = foundations
        data, database = foundations.settings.data, foundations.database
        self._content_keys = load_or_make_content_keys(data / "keys" / "content.key")
        self._registry = Registry(database, foundations.blobs, now=time.time)
        self._sample_sets = SampleSets(database, foundations.blobs, now=time.time)
        self._planning = PlanningService(
            database, self._registry, now=time.time,
            at_work=lambda model, device_class: self.controller.replanner.inspector.times_at_work(model, device_class),
        )  # fmt: skip
        self._releasing = ReleaseBuilder(
            database, foundations.blobs, self._registry, self._planning, foundations.repository,
            offload_releases=data / OFFLOAD / "releases", content_keys=self._content_keys, now=time.time,
        )  # fmt: skip
        self._devices = Devices(
            database,
            stale_after_s=foundations.settings.effective_stale_after_s,
            telemetry_s=foundations.settings.telemetry_s,
            now=time.time,
        )
        lists = {data / "broker" / REVOKED: BROKER_LIST_LIFE, data / OFFLOAD / REVOKED: LIST_LIFE}
        self.revocations = Revocations(
            foundations.authority, self._devices.revoked_serials, lists, foundations.settings.broker_address
        )  # fmt: skip
        self._gateways = Gateways(database, now=time.time, model_if_split=self._releasing.split_by_gateway)
        self._director = Director(
            database, foundations.repository.sign_statement, statement_s=foundations.settings.statement_s,
            now=time.time, wrap=self._releasing.wrap_keys_for_device,
            wrap_for_gateway=self._releasing.wrap_keys_for_gateway, gateways=self._gateways,
        )  # fmt: skip
        self._rollouts = Rollouts(
            database, self._director, now=time.time,
            announce=lambda devices: self.delivery.publish_statements(self._director.with_gateways(devices)),
            fits=self._releasing.has_plan_for, evidences=evidence_of_members,
        )  # fmt: skip
        self._remote_inferences = RemoteInferences(
            database, foundations.repository.sign_inference_job,
            lambda device, message, wait_s: self.delivery.send_inference(device, message, wait_s),
            foundations.sharding.own_number, registry=foundations.metric_registry,
        )  # fmt: skip
        self.meter = TrafficMeter() if foundations.settings.runs_broker else None
        self.delivery = Delivery(self._delivery_sources(), sharding=foundations.sharding, meter=self.meter)
        self.controller = self._controller()

    def _delivery_sources(self) -> Sources:
        events = DeviceEvents(
            self._devices,
            acknowledge=lambda acks: self.delivery.acknowledge(acks),
            end_session=self.revocations.end_session,
            publish_revocations=self.revocations.publish,
            clear_retained=lambda devices: self.delivery.clear_retained(devices),
            on_reports=lambda: self.controller.on_reports(),
            on_ingested=partial(metrics.record_ingest, self._foundations.metric_registry),
        )
        return Sources(
            metadata=self._foundations.repository.read, chunk=self._foundations.blobs.get,
            release_chunks=self._releasing.chunks_of, ingest=events.on_messages, statements=self._director.statements,
            on_flood=events.on_flood, confirm=StatementPublisher(self._foundations.database).confirm,
            is_leader=self._foundations.lease.held, on_inference_reply=self._remote_inferences.on_reply,
        )  # fmt: skip

    def _controller(self) -> Controller:
        on, database, settings = self._foundations, self._foundations.database, self._foundations.settings
        rolling = RollUp(database, now=time.time)
        return Controller(
            database=database,
            blobs=on.blobs,
            registry=self._registry,
            sample_sets=self._sample_sets,
            variants=Variants(on.blobs, self._registry, self._sample_sets),
            planner=self._planning,
            release_builder=self._releasing,
            devices=self._devices,
            gateways=self._gateways,
            director=self._director,
            rollouts=self._rollouts,
            authority=on.authority,
            statements=self.delivery,
            revocations=self.revocations,
            addresses=Addresses(api_url(settings), *settings.device_broker, offload_url(settings)),
            signing=self._signing(),
            exporter=self._exporting(),
            listing=Listing(database, stale_after_s=settings.effective_stale_after_s, now=time.time),
            fleet_overview=FleetOverview(database, stale_after_s=settings.effective_stale_after_s, now=time.time),
            roll_up=rolling,
            log_bundle_store=LogBundleStore(database, self.delivery.send_job, now=time.time),
            remote_inferences=self._remote_inferences,
            release_bundles=ReleaseBundler(on.repository, self._director, self._releasing, on.blobs, time.time),
            agents=AgentReleases(database, on.blobs, self._releasing, now=time.time),
            removal=Removal(database, self._releasing, now=time.time),
            collector=Collector(
                database, on.blobs, self._releasing, on.repository, rules=retention_rules(settings), now=time.time,
                offload_releases=settings.data / OFFLOAD / "releases",
            ),
            replanner=self._replanner(),
            components=HealthOverview(
                database, settings.data, stale_after_s=settings.effective_stale_after_s, unaggregated=rolling.backlog,
                now=time.time,
            ),
        )  # fmt: skip

    def _signing(self) -> KeyManagement:
        on, root = self._foundations, self._foundations.settings.data / OFFLOAD / "root.json"
        return KeyManagement(
            on.repository, on.rotation, on.database, self._releasing, self._director, self.delivery,
            offload_root=root, now=time.time,
        )  # fmt: skip

    def _exporting(self) -> Exporter:
        on = self._foundations
        return Exporter(
            on.database, self._registry, self._releasing, on.repository, self._content_keys,
            offload_releases=on.settings.data / OFFLOAD / "releases", now=time.time,
        )  # fmt: skip

    def _replanner(self) -> Replanner:
        return Replanner(
            self._foundations.database, self._registry, self._planning, self._releasing, self._gateways,
            roll_out=self._rollouts.create, now=time.time,
        )  # fmt: skip


def retention_rules(settings: Settings) -> RetentionRules:
    """The retention rules in the settings."""
    return RetentionRules(
        settings.keep_releases, settings.keep_versions, settings.keep_history_s, settings.keep_unused_s
    )


def api_url(settings: Settings) -> str:
    """URL of the API that is given to devices."""
    return settings.api_url or f"https://{settings.url_host}:{settings.api_port}"


def offload_url(settings: Settings) -> str:
    """URL of the offload server that is given to devices."""
    return settings.offload_url or f"https://{settings.url_host}:{settings.offload_port}"
