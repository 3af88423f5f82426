"""The controller's operations as plain calls: everything that the API offers, without HTTP. Connects the parts and
holds no state of its own.

Calls marked "Heavy." measure, plan, slice or sign; the API runs them one at a time on a thread of their own
(`api.dispatch`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from mmap import mmap
from pathlib import Path
from time import time
from typing import Any, Protocol

import msgspec
from cryptography import x509
from sqlalchemy import select

from edgesplit.device_profile import list_profiles
from edgesplit.errors import NotFound, TrustError, UsageError
from edgesplit.identifiers import ModelRef
from edgesplit.links import parse_host_and_port
from edgesplit.plan import Link
from edgesplit.release.manifest import Manifest
from edgesplit.trust.identity import Claim, Enrolled, Renewal, check_renewal
from edgesplit_controller.caller import current_operator
from edgesplit_controller.components.overview import HealthOverview
from edgesplit_controller.errors import Conflict, Unauthenticated
from edgesplit_controller.fleet.audits import with_running_shares
from edgesplit_controller.fleet.connection_state import offline_devices
from edgesplit_controller.fleet.device_view import device_to_dict
from edgesplit_controller.fleet.devices import ClaimRequest, Devices, Enrolment
from edgesplit_controller.fleet.gateways import Gateways, gateway_tier_by_class
from edgesplit_controller.fleet.listing import Listing, ListingQuery
from edgesplit_controller.fleet.log_bundles import LogBundleStore
from edgesplit_controller.fleet.overview import FleetOverview
from edgesplit_controller.fleet.remote_inference import RemoteInferences
from edgesplit_controller.fleet.rows import (
    claim_to_dict,
    deployment_to_dict,
    event_to_dict,
    limit_deployment,
    model_to_dict,
)
from edgesplit_controller.history.buckets import Span
from edgesplit_controller.history.rollup import RollUp
from edgesplit_controller.model_registry.families import Families, VariantRequest, family_of, family_to_dict
from edgesplit_controller.model_registry.family_answers import Truth
from edgesplit_controller.model_registry.interface import NOTHING_SAID, InterfaceRequest, store_names, stored_names
from edgesplit_controller.model_registry.registry import Registry, read_tensors, refuse_family
from edgesplit_controller.model_registry.sample_sets import SampleSets
from edgesplit_controller.model_registry.variants import GateRequest, StoredVariant, Variants
from edgesplit_controller.planning.planner_service import (
    OWN_CLASS,
    PlanningService,
    PlanOptions,
    check_for_model,
    device_profile,
    link_of,
    slowest_link,
)
from edgesplit_controller.releases.agent_releases import AgentReleases
from edgesplit_controller.releases.agent_versions import check_agents
from edgesplit_controller.releases.build import ReleaseBuilder, signature_view
from edgesplit_controller.releases.bundle import ReleaseBundler
from edgesplit_controller.releases.content_keys import check_can_decrypt, check_key_ownership
from edgesplit_controller.releases.director import Director
from edgesplit_controller.releases.export import Exporter
from edgesplit_controller.releases.signing import KeyManagement
from edgesplit_controller.replan.replanner import Replanner
from edgesplit_controller.retention.collector import Collector
from edgesplit_controller.retention.removal import Removal
from edgesplit_controller.rollout.audits import check_audited
from edgesplit_controller.rollout.commands import Verb
from edgesplit_controller.rollout.engine import Rollouts, RolloutSpec
from edgesplit_controller.rollout.gates import Gates, gate_of_audits, gates_of_answers
from edgesplit_controller.rollout.request import ALL_AT_ONCE, RolloutRequest
from edgesplit_controller.rollout.states import NOTHING
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device, Event, Model
from edgesplit_partitioner.compression.recipe import Method
from edgesplit_partitioner.proposals import propose


class Authority(Protocol):
    """The part of the certificate authority that the controller uses."""

    @property
    def ca_pem(self) -> str:
        """The authority's own certificate (PEM)."""
        ...

    def sign_request(self, csr_pem: bytes, name: str) -> bytes:
        """A client certificate (PEM) for the device of this name."""
        ...

    def sign_gateway(self, csr_pem: bytes, name: str) -> bytes:
        """A server certificate (PEM) for the gateway of this name."""
        ...

    def revocation_list(self, serials: Iterable[int]) -> bytes:
        """A signed certificate revocation list (PEM) with these serial numbers."""
        ...

    def parse_device_certificate(self, certificate_pem: bytes) -> x509.Certificate:
        """The certificate, if this authority once issued it to a device, expired or not."""
        ...


class StatementNotifier(Protocol):
    """Publishes desired state to devices."""

    def publish_statements(self, devices: Sequence[str]) -> None:
        """Queue publication of the current statement (desired state) of these devices."""
        ...

    def clear_retained(self, devices: Sequence[str]) -> None:
        """Queue removal of the messages that the broker retains for these devices."""
        ...


class RevocationPublisher(Protocol):
    """Makes revocations effective."""

    def publish(self) -> None:
        """Publish the current certificate revocation list."""
        ...

    def end_session(self, device: str) -> None:
        """Queue disconnection of the device's MQTT session."""
        ...


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses at which devices reach the installation."""

    api_url: str
    mqtt_host: str
    mqtt_port: int
    offload_url: str


@dataclass(frozen=True, slots=True)
class Controller:
    """The parts of one running controller, and the operations over them."""

    database: Database
    blobs: Blobs
    registry: Registry
    sample_sets: SampleSets
    variants: Variants
    planner: PlanningService
    release_builder: ReleaseBuilder
    devices: Devices
    gateways: Gateways
    director: Director
    rollouts: Rollouts
    authority: Authority
    statements: StatementNotifier
    revocations: RevocationPublisher
    addresses: Addresses
    signing: KeyManagement
    exporter: Exporter
    listing: Listing
    fleet_overview: FleetOverview
    roll_up: RollUp
    log_bundle_store: LogBundleStore
    remote_inferences: RemoteInferences
    release_bundles: ReleaseBundler
    replanner: Replanner
    agents: AgentReleases
    components: HealthOverview
    removal: Removal
    collector: Collector

    def scoped_to(self, groups: frozenset[str] | None) -> Controller:
        """This controller limited to the devices of these groups; None: all devices. Devices of other groups do not
        exist for its calls."""
        return replace(
            self,
            devices=self.devices.scoped_to(groups),
            rollouts=self.rollouts.scoped_to(groups),
            replanner=self.replanner.scoped_to(groups),
        )

    # ---- models -----------------------------------------------------------------------------------------------

    def push_model(
        self, part: Path, name: str, bindings: Mapping[str, int], interface: InterfaceRequest = NOTHING_SAID
    ) -> dict[str, Any]:
        """Heavy. Store a model file and return the model; `created` is false if the same file was stored before. With
        nothing said of its input, `proposal` is what it most likely takes and gives."""
        known_ids = {model.id for model in self.registry.all()}
        model = self.registry.push(part, name, bindings=bindings, interface=interface)
        stored = {**model_to_dict(model), "created": model.id not in known_ids}
        if model.input_text:
            return stored
        return {**stored, "proposal": msgspec.to_builtins(propose(self.registry.load(model).prepared))}

    def store_class_names(self, names: Sequence[str]) -> dict[str, Any]:
        """Store names of classes, which a push then refers to."""
        return {"names": store_names(self.blobs, names)}

    def class_names(self, digest: str) -> tuple[str, ...]:
        """The names that were stored under this digest; none for an empty one."""
        return stored_names(self.blobs, digest) if digest else ()

    def push_variant(
        self, part: Path, name: str, input_text: str, bindings: Mapping[str, int], variant_of: str,
        request: GateRequest,
    ) -> dict[str, Any]:  # fmt: skip
        """Heavy. Store a model file that stands in for another model, if it passes the gate; else nothing is stored."""
        base, known_ids = self.registry.get(variant_of), {model.id for model in self.registry.all()}
        stored = self.variants.push(base, part, name or base.name, input_text, bindings, request)
        return _variant_to_dict(stored, known_ids)

    def compress_model(self, reference: str, method: Method, request: GateRequest) -> dict[str, Any]:
        """Heavy. Make and store a compressed version of a model, if one passes the gate; else nothing is stored."""
        known_ids = {model.id for model in self.registry.all()}
        return _variant_to_dict(self.variants.compress(self.registry.get(reference), method, request), known_ids)

    def make_sample_set(self, reference: str, digests: Sequence[str]) -> dict[str, Any]:
        """Name a set of stored samples with their labels."""
        model = self.registry.get(reference)
        made = self.sample_sets.create(model, digests)
        return {"model": model.ref, "set": made.sha256, "samples": len(made.content), "labelled": made.labelled}

    def models(self) -> list[dict[str, Any]]:
        """Every model, with the number of its layers instead of the layers."""
        return [{**model_to_dict(model), "layers": len(model.shown["layers"])} for model in self.registry.all()]

    def model(self, reference: str) -> dict[str, Any]:
        """One model with its layers, and what is known of its times on this machine."""
        model = self.registry.get(reference)
        stored = self.planner.stored_layers(model)
        return {
            **model_to_dict(model), "variants": [variant.ref for variant in self.registry.variants_of(model.ref)],
            **({"measurement": stored.text} if stored is not None else {}),
        }  # fmt: skip

    def model_file(self, reference: str, *, optimised: bool) -> bytes | mmap:
        """A model's file, verified: as it was pushed or, with `optimised`, as it is sliced."""
        model = self.registry.get(reference)
        return self.blobs.mapped(model.optimised_sha256 if optimised else model.sha256)

    def add_samples(
        self, reference: str, frames: Sequence[bytes], tensors: Sequence[bytes], labels: Mapping[bytes, int]
    ) -> dict[str, Any]:
        """Heavy. Store sample inputs of a model; returns how many it has then."""
        model = self.registry.get(reference)
        return {"model": model.ref, "samples": self.registry.add_samples(model, frames, tensors, labels=labels)}

    def create_family(
        self, name: str, variants: Sequence[VariantRequest], samples: Sequence[tuple[bool, bytes, Truth]], *,
        answer: str = "", reference: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """Heavy. Run models of one task on samples and store them as a family (`Families.create`). Each sample is a
        frame (True) or an archive of tensors, with what it shows."""
        read = [(data if is_frame else read_tensors(data), truth) for is_frame, data, truth in samples]
        families = Families(self.database, self.blobs, self.registry, now=time)
        return family_to_dict(families.create(name, variants, read, answer=answer, reference=reference))

    def families(self) -> list[dict[str, Any]]:
        """Every family."""
        return [family_to_dict(model) for model in self.registry.all() if family_of(model) is not None]

    def family(self, reference: str) -> dict[str, Any]:
        """One family; UsageError for a model."""
        return family_to_dict(self.registry.get(reference))

    def family_answers(self, reference: str) -> dict[str, Any]:
        """What a family's variants answer to its samples; UsageError for a model."""
        families = Families(self.database, self.blobs, self.registry, now=time)
        answers: dict[str, Any] = msgspec.to_builtins(families.answers(self.registry.get(reference)))
        return answers

    def profile(self, reference: str, codecs: bool = False, device_class: str = OWN_CLASS) -> dict[str, Any]:
        """Heavy. Measure a model's layers on this machine; with `codecs` also the effect of each lossy codec on the
        results for the model's samples."""
        self._refuse_device(device_class)
        return self.planner.profile(self.registry.get(reference), device_class=device_class, codecs=codecs)

    def profile_from_device(self, reference: str, device: str) -> dict[str, Any]:
        """Heavy, if the model was not measured here yet. The costs file of a model that a device runs, from that
        device's measurements."""
        return self.replanner.costs_measured_on(reference, self.devices.get(device))

    def costs(
        self, reference: str, device_class: str, lossy: bool = False, tiers: Mapping[str, str] | None = None,
        confirm: Sequence[str] = (), options: PlanOptions | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Heavy, if the model was not measured yet. The costs file of a model for a device class; where the options
        limit changed answers, with those on the tensors `confirm`."""
        model, options = self.registry.get(reference), options or PlanOptions()
        self._refuse_device(device_class)
        costs = self.planner.costs(model, device_class, lossy=lossy or options.lossy, tiers=tiers, whole=True)
        if options.max_changed:
            costs = self.planner.with_changed_answers(model, costs, confirm, options)
        result: dict[str, Any] = msgspec.to_builtins(costs)
        return result

    def exit_answers(self, reference: str, exit_output: str) -> dict[str, Any]:
        """Heavy, if it was not asked for since samples were added. What a model answers to its samples by an early exit
        and by its final output; UsageError for a family."""
        model = self.registry.get(reference)
        refuse_family(model)
        answers: dict[str, Any] = msgspec.to_builtins(self.planner.exit_answers(model, exit_output))
        return answers

    def _refuse_device(self, device_class: str) -> None:
        """UsageError where a device's name stands for that of its profile."""
        if device_class in list_profiles():
            return
        try:
            profile = self.devices.get(device_class).device_class
        except (NotFound, Conflict):
            return
        raise UsageError(f"{device_class} is a device and no device profile; its profile is {profile}")

    # ---- plans and deployments --------------------------------------------------------------------------------

    def plan(self, reference: str, device_class: str, link: str, options: PlanOptions) -> dict[str, Any]:
        """Heavy. A plan with its explanation; nothing is deployed. UsageError for a family, whose variants' costs are
        planned together where they are asked for."""
        model = self.registry.get(reference)
        check_for_model(model.ref, options)
        self._refuse_device(device_class)
        return self.planner.describe(model, device_class, link, options)

    def deploy(
        self, reference: str, targets: Sequence[str], link: str, plan_options: PlanOptions, *, recut: bool = False,
        elsewhere: bool = False, now: bool = False, asked: RolloutRequest = ALL_AT_ONCE,
    ) -> dict[str, Any]:  # fmt: skip
        """Heavy. Plan, slice and sign a release and begin its rollout on the terms in `asked`; with `now` devices fetch
        it outside of their fetch hours too.

        With `recut`, and where the release key is not on this machine, the planner's key signs another cut of an
        existing release. With `elsewhere` the result is what the release key must sign on another machine, and nothing
        is published yet. `prices` in the result are the release's cascades by device class, each beside the row
        without it, as a plan tells them.
        """
        model = self.registry.get(reference)
        devices = self.devices.select(targets)
        gates = self.rollouts.checked_terms(asked, len(devices)).gates
        judged = gates_of_answers(gates)
        check_agents(model, devices, judged=bool(judged))
        gateways = self.gateways.by_device([device.name for device in devices])
        through = gateway_tier_by_class(devices, gateways)
        if plan_options.encrypt:
            check_can_decrypt([*devices, *gateways.values()])
        by_planner = recut or not (elsewhere or self.signing.signs_releases)
        links = links_by_class(devices, link)
        prices: dict[str, Any] = {}
        digest, manifest = self.release_builder.prepare(
            model, links, plan_options, recut=by_planner, gateways=through, judged=judged,
            on_priced=lambda device_class, planned: prices.update({device_class: msgspec.to_builtins(planned)}),
        )  # fmt: skip
        _check_audited(gates, manifest, devices)
        signed_here = by_planner or self.signing.signs_releases or digest in self.signing.releases()
        if elsewhere and not signed_here:
            return {**self._to_sign(digest, model, devices, manifest), "prices": prices}
        self.release_builder.publish(model, digest, plan_options)
        options = {**plan_options.as_options(), "now": now}
        rolled_out = self._roll_out(digest, model, devices, manifest, targets, options, asked)
        return {**rolled_out, "prices": prices}

    def deploy_signed(
        self, reference: str, targets: Sequence[str], plan_options: PlanOptions, release: str, signed: bytes, *,
        now: bool = False, asked: RolloutRequest = ALL_AT_ONCE,
    ) -> dict[str, Any]:  # fmt: skip
        """Heavy. Publish a release that `deploy` prepared and that was signed on another machine, and begin its
        rollout.

        Conflict if devices of a class without a plan in the release joined the targets meanwhile.
        """
        model = self.registry.get(reference)
        manifest = self.release_builder.prepared(model, release)
        devices = self.devices.select(targets)
        if missing := sorted({device.device_class for device in devices} - set(manifest.plans)):
            raise Conflict(f"the release has no plan for {', '.join(missing)}, which joined meanwhile: deploy again")
        gates = self.rollouts.checked_terms(asked, len(devices)).gates
        check_agents(model, devices, judged=bool(gates_of_answers(gates)))
        _check_audited(gates, manifest, devices)
        self.release_builder.publish(model, release, plan_options, signed)
        options = {**plan_options.as_options(), "now": now}
        return self._roll_out(release, model, devices, manifest, targets, options, asked)

    def deploy_agent(
        self, version: str, targets: Sequence[str], *, elsewhere: bool = False, signed: tuple[str, bytes] | None = None,
        now: bool = False, asked: RolloutRequest = ALL_AT_ONCE,
    ) -> dict[str, Any]:  # fmt: skip
        """Heavy. Sign a version of the agent as a release and begin its rollout on the terms in `asked`.

        With `elsewhere` the result is what the release key must sign on another machine, and nothing is published yet;
        `signed` (digest of the release, signed targets metadata with it) is the result of that signing.
        """
        model = self.agents.get(version)
        devices = self.devices.select(targets)
        gates = self.rollouts.checked_terms(asked, len(devices)).gates
        if gates_of_answers(gates) or gate_of_audits(gates):
            raise UsageError(
                "an agent has no answers of its own: gates of accuracy, agreement and changed answers are for models"
            )
        digest, manifest = self.agents.prepare(model)
        self.agents.check_fit(manifest, devices)
        if signed is not None and signed[0] != digest:
            raise Conflict(f"agent {version} got another build meanwhile: deploy it again, and sign that")
        known = signed is not None or self.signing.signs_releases or digest in self.signing.releases()
        if elsewhere and not known:
            return self._to_sign(digest, model, devices, manifest)
        options_for_agent = PlanOptions(partition="device")
        self.release_builder.publish(model, digest, options_for_agent, signed[1] if signed is not None else None)
        options = {**options_for_agent.as_options(), "now": now, "agent": version}
        return self._roll_out(digest, model, devices, manifest, targets, options, asked)

    def undeploy(
        self, reference: str, targets: Sequence[str], asked: RolloutRequest = ALL_AT_ONCE, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Begin a rollout that removes a model, or one version of it, from those of the devices that run it or shall
        run it; with `dry_run` only return what would be done. Conflict if none of them does."""
        if asked.gates or asked.gate_after or asked.follow:
            raise UsageError("gates judge a release that runs, and there is nothing to follow: leave both out")
        model, version = self.registry.get(reference), ModelRef.parse(reference).version
        found = {device.name: device for device in self.devices.select(targets)}
        models = {release["release"]: release["model"] for release in self.releases()}
        releases = self.rollouts.assigned_devices(model.name, list(found))
        if version is not None:
            releases = {name: release for name, release in releases.items() if models.get(release) == model.ref}
        if not releases:
            raise Conflict(
                f"{reference} runs on none of these devices, and none shall run it: `edgectl device list` shows what"
                " each runs"
            )
        self.rollouts.checked_terms(asked, len(releases))
        ref = model.name if version is None else model.ref
        summary = {
            "model": ref, "devices": [
                {"device": name, "release": release, "model": models.get(release, model.name),
                 "state": self.devices.state(found[name])}
                for name, release in sorted(releases.items())
            ],
        }  # fmt: skip
        if dry_run:
            return {"rollout": None, "supersedes": _superseded(self.rollouts.overlapping(model.name, list(releases))),
                    **summary}  # fmt: skip
        options: dict[str, Any] = {"partition": "undeployed"}
        if self.devices.groups is not None:
            options["groups"] = sorted(self.devices.groups)
        devices = [found[name] for name in sorted(releases)]
        rollout = self.rollouts.create(RolloutSpec(NOTHING, ref, devices, targets, options, asked, current_operator()))
        return {"rollout": rollout.number, "supersedes": _superseded(rollout.supersedes), **summary}

    def _to_sign(self, release: str, model: Model, devices: Sequence[Device], manifest: Manifest) -> dict[str, Any]:
        """What the release key must sign on another machine."""
        to_sign = self.signing.to_sign(self.release_builder.raw(release))
        return {**_deployment_summary(release, model, devices, manifest), **to_sign}

    def _roll_out(
        self, release: str, model: Model, devices: Sequence[Device], manifest: Manifest, targets: Sequence[str],
        options: dict[str, Any], asked: RolloutRequest,
    ) -> dict[str, Any]:  # fmt: skip
        if self.devices.groups is not None:
            options["groups"] = sorted(self.devices.groups)
        spec = RolloutSpec(release, model.ref, devices, targets, options, asked, current_operator())
        rollout = self.rollouts.create(spec)
        superseded = _superseded(rollout.supersedes)
        summary = {"deployment": rollout.number, "rollout": rollout.number, "supersedes": superseded}
        return {**summary, **_deployment_summary(release, model, devices, manifest)}

    def command_rollout(self, number: int, verb: Verb) -> dict[str, Any]:
        """Apply an operator's command to a rollout: pause, resume, approve the next stage, abort or roll back."""
        self.rollouts.command(number, verb, current_operator())
        return self.rollouts.view(number)

    def deployments(self) -> list[dict[str, Any]]:
        """Every deployment, oldest first, limited to the devices that are visible to the caller."""
        visible = self._visible_names()
        rows = [deployment_to_dict(row) for row in self.director.deployments()]
        return rows if visible is None else [limited for row in rows if (limited := limit_deployment(row, visible))]

    def releases(self) -> list[dict[str, Any]]:
        """Every release of a model, oldest first."""
        models: dict[int, Model] = {model.id: model for model in self.registry.all()}
        return [
            {"release": row.digest, "model": models[row.model_id].ref, "created": row.created, **row.options}
            for row in self.release_builder.all()
            if row.model_id in models  # releases of the agent have no model
        ]

    # ---- removal and garbage collection -----------------------------------------------------------------------

    def remove_model(self, reference: str) -> dict[str, Any]:
        """Remove a model, or one version of it, with its releases. Conflict if one of them is in use."""
        return self.removal.remove_model(reference)

    def remove_release(self, reference: str) -> dict[str, Any]:
        """Remove a release that nothing uses, by its digest or the begin of it."""
        return self.removal.remove_release(reference)

    def collect_garbage(self, *, dry_run: bool, unused_s: float | None = None) -> dict[str, Any]:
        """Delete what the retention rules let go and nothing uses; with `dry_run` only return what that would be.
        `unused_s` replaces the rule for files that nothing refers to."""
        rules = self.collector.rules
        collector = self.collector.with_rules(rules if unused_s is None else replace(rules, unused_s=unused_s))
        result = collector.preview() if dry_run else collector.collect()
        return {"dry_run": dry_run, "rules": asdict(collector.rules), **asdict(result)}

    # ---- devices ----------------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest, gateway: str = "") -> dict[str, Any]:
        """A one-time claim with which a device can enrol, as an operator carries it there. With `gateway` (HOST:PORT)
        the device is a gateway, which others reach at that address."""
        device_profile(request.device_class)
        link_of(request.link)
        if gateway:
            parse_host_and_port(gateway, "gateway")
        token, expires = self.devices.claim(request)
        if gateway:
            self.gateways.register(request.device, gateway)
            self.restate_gateways()
        claim = Claim(
            device=request.device, device_class=request.device_class, token=token,
            controller_url=self.addresses.api_url, ca_pem=self.authority.ca_pem, tuf_root=self.signing.root_text,
            expires=expires,
        )  # fmt: skip
        result: dict[str, Any] = msgspec.to_builtins(claim)
        return result

    def enrol(
        self, token: str, csr_pem: str, encryption_key: bytes = b"", encryption_signature: bytes = b""
    ) -> dict[str, Any]:
        """Exchange a claim token and a certificate request for a certificate and the installation's addresses.

        If the name was taken from other hardware, that hardware's certificates are revoked and its session is ended. If
        the key is new for this name, the messages that the broker retains for it are cleared.
        """
        if encryption_key:
            check_key_ownership(csr_pem, encryption_key, encryption_signature)
        enrolment = self.devices.enrol(token, csr_pem.encode(), self.authority.sign_request, encryption_key)
        self.director.rewrap_keys(enrolment.device)
        self.restate_gateways()
        if enrolment.replaced:
            self.revocations.publish()
            self.revocations.end_session(enrolment.device)
        if enrolment.fresh:
            self.statements.clear_retained([enrolment.device])
        self.statements.publish_statements([enrolment.device])
        return self._enrolled(enrolment)

    def release_bundle_index(self, targets: Sequence[str], models: Sequence[str], valid_s: int) -> dict[str, Any]:
        """Content of a release bundle for these devices, without the chunks. Conflict if `targets` match no device."""
        devices = self.devices.select(targets)
        if not devices:
            raise Conflict(f"no device matches {', '.join(targets)[:200]}")
        return self.release_bundles.metadata_for(devices, models, valid_s)

    def renew(self, renewal: Renewal, *, shown_serial: int | None) -> dict[str, Any]:
        """A new certificate for a device that holds the private key of one of ours, also of an expired one.

        `shown_serial` is the serial number of the client certificate of this connection: of the same certificate, or
        None if that has expired. Unauthenticated otherwise.
        """
        old = self.authority.parse_device_certificate(renewal.certificate_pem.encode())
        expired = old.not_valid_after_utc.timestamp() <= time()
        if shown_serial != old.serial_number and not (expired and shown_serial is None):
            raise Unauthenticated("a certificate is renewed over a connection that presents it, before it expires")
        try:
            check_renewal(renewal, old)
        except TrustError as error:
            raise Unauthenticated(str(error)) from error
        return self._enrolled(self.devices.renew(old, renewal.csr_pem.encode(), self.authority.sign_request))

    def _enrolled(self, enrolment: Enrolment) -> dict[str, Any]:
        enrolled = Enrolled(
            device=enrolment.device, certificate_pem=enrolment.certificate.decode(), ca_pem=self.authority.ca_pem,
            broker_host=self.addresses.mqtt_host, broker_port=self.addresses.mqtt_port,
            offload_url=self.addresses.offload_url,
        )  # fmt: skip
        result: dict[str, Any] = msgspec.to_builtins(enrolled)
        return result

    def update_device(self, name: str, group: str | None, labels: Mapping[str, str | None]) -> dict[str, Any]:
        """Change a device's group or labels. What it runs stays; later deployments select by the new values."""
        device = self.devices.update(name, group, labels)
        return {"device": name, "group": device.group, "labels": device.labels}

    def revoke(self, name: str) -> dict[str, Any]:
        """Revoke a device: its certificates, its desired state and its session."""
        self.devices.revoke(name)
        self.revocations.publish()
        self.revocations.end_session(name)
        self.statements.publish_statements([name])
        self.restate_gateways()
        return {"device": name, "state": "revoked"}

    def remove_device(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Remove a device that is revoked or never enrolled, with everything that is stored of it; with `force` also
        one that is not revoked. The broker's retained messages are cleared."""
        removed = self.devices.remove(name, force=force)
        if removed.revoked_now:
            self.revocations.publish()
            self.revocations.end_session(name)
        if removed.was_enrolled:
            self.statements.publish_statements([name])
        self.release_builder.permitted_devices.forget(name)
        self.restate_gateways()
        return {"device": name, "state": "removed"}

    # ---- gateways ---------------------------------------------------------------------------------------------

    def assign_gateway(self, targets: Sequence[str], gateway: str, link: str = "") -> dict[str, Any]:
        """Set the gateway that devices offload through; `none` means the cloud."""
        if gateway != "none" and self.devices.groups is not None and self.devices.open_claim(gateway) is None:
            self.devices.get(gateway)
        devices = self.devices.select(targets)
        names = self.gateways.assign(devices, gateway, link)
        self.restate_gateways()
        summary = {"devices": names, "offline": offline_devices(devices)}
        return {**summary, "gateway": None if gateway == "none" else gateway}

    def gateway_certificate(self, name: str, serial: int, csr_pem: str) -> dict[str, Any]:
        """A server certificate for the gateway `name`, whose client certificate has this serial number."""
        self._check_gateway(name, serial)
        return {"certificate_pem": self.authority.sign_gateway(csr_pem.encode(), name).decode()}

    def revocation_list_for(self, name: str, serial: int) -> bytes:
        """The certificate revocation list (PEM) for the gateway `name`."""
        self._check_gateway(name, serial)
        return self.authority.revocation_list(self.devices.revoked_serials())

    def _check_gateway(self, name: str, serial: int) -> None:
        self.gateways.check_is_gateway(name)
        if serial in self.devices.revoked_serials():
            raise Unauthenticated("this certificate was revoked")

    def restate_gateways(self) -> None:
        """Publish new statements to gateways whose releases to keep have changed, and to devices whose gateway has
        changed."""
        if changed := self.director.refresh_gateway_statements():
            self.statements.publish_statements(changed)

    def on_reports(self) -> None:
        """Devices reported what they run: a gateway may drop what its devices stopped running, and rollouts go on."""
        self.restate_gateways()
        self.rollouts.has_new_reports.set()

    def list_devices(self, query: ListingQuery | None = None) -> tuple[list[dict[str, Any]], str]:
        """A page of devices and of open claims, by name, and the name after which the next page begins (empty on the
        last page)."""
        limited = replace(query or ListingQuery(), groups=self.devices.groups)
        page, now = self.listing.page(limited), time()
        gateways = self.gateways.by_device([device.name for device in page.devices])
        enrolled = [
            device_to_dict(device, self.devices.state(device), page, now)
            | {"gateway": gateways[device.name].name if device.name in gateways else None}
            for device in page.devices
        ]
        entries = [*enrolled, *(claim_to_dict(claim) for claim in page.claims)]
        return sorted(entries, key=lambda device: str(device["name"])), page.after

    def overview(self) -> dict[str, Any]:
        """Counts over the fleet."""
        return self.fleet_overview.overview(self.devices.groups)

    def component_status(self) -> list[dict[str, Any]]:
        """Status of broker, offload server, database, disk, controller processes and gateways."""
        return self.components.to_dicts(self.devices.groups)

    def history(self, name: str, span: Span, since: float, until: float) -> dict[str, Any]:
        """A device's telemetry aggregated by minutes, hours, days or months, from `since` to `until` (Unix seconds)."""
        self.devices.get(name)
        return {"device": name, "span": span, "buckets": self.roll_up.device_history(name, span, since, until)}

    def model_history(self, reference: str, span: Span, since: float, until: float) -> dict[str, Any]:
        """Telemetry of a model, of all versions, on all devices that are visible to the caller, aggregated by minutes,
        hours, days or months."""
        name = self.registry.get(reference).name
        buckets = self.roll_up.model_history(name, span, since, until, self.devices.groups)
        return {"model": name, "span": span, "buckets": with_running_shares(buckets)}

    def request_log_bundle(self, name: str) -> dict[str, Any]:
        """Request a log bundle from a device."""
        self.devices.get(name)
        return self.log_bundle_store.request(name, current_operator())

    def log_bundles(self, name: str) -> list[dict[str, Any]]:
        """The log bundles of a device, newest first."""
        self.devices.get(name)
        return self.log_bundle_store.of_device(name)

    def log_bundle(self, name: str, number: str) -> dict[str, Any]:
        """One log bundle, with its content once all pieces have arrived."""
        self.devices.get(name)
        return self.log_bundle_store.get(name, number)

    def device(self, name: str) -> dict[str, Any]:
        """One device: desired state, reported state and the plans in use; or the open claim of that name."""
        claim = self.devices.open_claim(name)
        if claim is not None:
            return claim_to_dict(claim)
        device = self.devices.get(name)
        view = device_to_dict(device, self.devices.state(device), self.listing.page_of_device(device), time())
        gateways = self.gateways.by_device([name])
        gateway, serves_at = gateways[name].name if name in gateways else None, self.gateways.address_of(name) or None
        return {**view, "gateway": gateway, "serves_at": serves_at, "plans": self._plans_in_use(device)}

    def _plans_in_use(self, device: Device) -> dict[str, Any]:
        """The switching table (plan) in use on the device, by model."""
        running = {
            entry["model"]: entry["release"] for entry in (device.reported or {}).get("models", []) if entry["release"]
        }
        manifests = {model: self.release_builder.find(release) for model, release in running.items()}
        return {
            model: msgspec.to_builtins(manifest.plans[device.device_class])
            for model, manifest in manifests.items()
            if manifest is not None and device.device_class in manifest.plans
        }

    def telemetry(self, name: str, newest: int) -> list[dict[str, Any]]:
        """The newest telemetry messages of a device, oldest first."""
        return self.devices.history(name, newest)

    def events(self, newest: int) -> list[dict[str, Any]]:
        """The newest events, oldest first. A caller of some groups gets those about its own devices only."""
        visible = self._visible_names()
        query = select(Event).order_by(Event.id.desc()).limit(newest)
        if visible is not None:
            query = query.where(Event.what.like("device.%"), Event.subject.in_(visible))
        with self.database.read() as session:
            rows = session.scalars(query).all()
        return [event_to_dict(row) for row in reversed(rows)]

    def _visible_names(self) -> frozenset[str] | None:
        """Names of the devices that are visible to the caller; None: all, also those that were deleted."""
        return None if self.devices.groups is None else frozenset(device.name for device in self.devices.all())


def _check_audited(gates: Gates, manifest: Manifest, devices: Sequence[Device]) -> None:
    """UsageError for a gate of changed answers where none is audited."""
    if (gate := gate_of_audits(gates)) is not None:
        check_audited(gate.text, manifest, (device.telemetry for device in devices))


def _superseded(supersedes: Mapping[int, int]) -> list[dict[str, int]]:
    """The rollouts that lose devices to another one."""
    return [{"rollout": number, "devices": count} for number, count in sorted(supersedes.items())]


def links_by_class(devices: Sequence[Device], link: str) -> dict[str, Link]:
    """The link that each device class is planned for: `link` if given, else the slowest link of the class's devices."""
    by_class: dict[str, list[Link]] = {}
    for device in devices:
        by_class.setdefault(device.device_class, []).append(link_of(link, device.link))
    return {device_class: slowest_link(links) for device_class, links in sorted(by_class.items())}


def _deployment_summary(digest: str, model: Model, devices: Sequence[Device], manifest: Manifest) -> dict[str, Any]:
    plans = [msgspec.to_builtins(plan) for plan in manifest.plans.values()]
    names = sorted(device.name for device in devices)
    summary = {"release": digest, "model": model.ref, "devices": names, "encrypted": manifest.is_encrypted}
    return {**summary, "offline": offline_devices(devices), "plans": plans, **signature_view(manifest)}


def _variant_to_dict(stored: StoredVariant, known_ids: Collection[int]) -> dict[str, Any]:
    """A version that passed the gate, with the verdict."""
    created = stored.model.id not in known_ids
    return {**model_to_dict(stored.model), "created": created, "verdict": stored.verdict.sentence}
