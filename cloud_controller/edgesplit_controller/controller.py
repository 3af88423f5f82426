"""The controller's work as plain calls: what the API offers, without HTTP. Holds the parts together and keeps no state.

Calls that measure, plan, cut or sign are marked heavy: the API runs them one at a time, away from everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import Any, Protocol

import msgspec
from cryptography import x509
from sqlalchemy import select

from edgesplit.errors import TrustError
from edgesplit.links import host_and_port
from edgesplit.plan import Link
from edgesplit.release.manifest import Manifest
from edgesplit.trust.identity import Claim, Enrolled, Renewal, check_renewal
from edgesplit_controller.caller import who_asks
from edgesplit_controller.components.overview import Parts
from edgesplit_controller.errors import Conflict, Forbidden
from edgesplit_controller.fleet.device_view import shown_device
from edgesplit_controller.fleet.devices import ClaimWish, Devices, Enrolment
from edgesplit_controller.fleet.gateways import Gateways, through_by_class
from edgesplit_controller.fleet.listing import Asked as AskedDevices
from edgesplit_controller.fleet.listing import Listing
from edgesplit_controller.fleet.log_bundles import Bundles
from edgesplit_controller.fleet.overview import Fleet
from edgesplit_controller.fleet.rows import narrowed, shown_claim, shown_deployment, shown_event, shown_model
from edgesplit_controller.history.buckets import Span
from edgesplit_controller.history.rollup import Rolling
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.planning.planner_service import OWN_CLASS, Planning, Wish, device_profile, link_of, slowest
from edgesplit_controller.releases.agent_releases import AgentReleases
from edgesplit_controller.releases.build import Releasing, signature
from edgesplit_controller.releases.bundle import Offline
from edgesplit_controller.releases.content_keys import check_can_decrypt, check_introduced
from edgesplit_controller.releases.director import Director
from edgesplit_controller.releases.export import Exporting
from edgesplit_controller.releases.signing import Signing
from edgesplit_controller.replan.replanner import Replanner
from edgesplit_controller.rollout.commands import Verb
from edgesplit_controller.rollout.engine import Rollouts, Wanted
from edgesplit_controller.rollout.request import PLAIN, Asked
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database, Device, Event, Model


class Authority(Protocol):
    """What is needed of the certificate authority."""

    @property
    def ca_pem(self) -> str:
        """Its certificate."""
        ...

    def sign_request(self, csr_pem: bytes, name: str) -> bytes:
        """A device's certificate."""
        ...

    def sign_gateway(self, csr_pem: bytes, name: str) -> bytes:
        """The certificate of a gateway's server."""
        ...

    def revocation_list(self, serials: Iterable[int]) -> bytes:
        """Its word on who is not to be believed any more."""
        ...

    def recognise(self, certificate_pem: bytes) -> x509.Certificate:
        """A certificate that it once issued to a device."""
        ...


class Tell(Protocol):
    """How devices learn that something new is wanted of them."""

    def tell(self, devices: Sequence[str]) -> None:
        """State soon what these devices shall run."""
        ...

    def forget(self, devices: Sequence[str]) -> None:
        """Clear soon what the broker retains of these devices."""
        ...


class Revoke(Protocol):
    """How a revocation comes true."""

    def publish(self) -> None:
        """Let everybody know which certificates are revoked."""
        ...

    def cut(self, device: str) -> None:
        """End soon the session that a device has."""
        ...


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where devices find us."""

    api_url: str
    mqtt_host: str
    mqtt_port: int
    offload_url: str


@dataclass(frozen=True, slots=True)
class Controller:
    """The parts of one running controller."""

    database: Database
    blobs: BlobStore
    registry: Registry
    planning: Planning
    releasing: Releasing
    devices: Devices
    gateways: Gateways
    director: Director
    rollouts: Rollouts
    authority: Authority
    tell: Tell
    revocations: Revoke
    addresses: Addresses
    signing: Signing
    exporting: Exporting
    listing: Listing
    fleet: Fleet
    rolling: Rolling
    bundles: Bundles
    offline: Offline
    replanner: Replanner
    agents: AgentReleases
    parts: Parts

    def within(self, groups: frozenset[str] | None) -> Controller:
        """The same controller, for a caller for whom only devices of these groups exist; None: all do."""
        return replace(
            self,
            devices=self.devices.within(groups),
            rollouts=self.rollouts.within(groups),
            replanner=self.replanner.within(groups),
        )

    # ---- models -----------------------------------------------------------------------------------------------

    def push(self, part: Path, name: str, input_text: str, bindings: Mapping[str, int]) -> dict[str, Any]:
        """Heavy. Keep a model file."""
        before = {model.id for model in self.registry.all()}
        model = self.registry.push(part, name, input_text, bindings)
        return {**shown_model(model), "created": model.id not in before}

    def models(self) -> list[dict[str, Any]]:
        """Every model, its layers only counted."""
        return [{**shown_model(model), "layers": len(model.shown["layers"])} for model in self.registry.all()]

    def model(self, reference: str) -> dict[str, Any]:
        """One model with its layers."""
        return shown_model(self.registry.get(reference))

    def file(self, reference: str, *, optimised: bool) -> Path:
        """Where the model's file lies: as it came, or as it is cut."""
        model = self.registry.get(reference)
        return self.blobs.path(model.optimised_sha256 if optimised else model.sha256)

    def add_samples(
        self, reference: str, frames: Sequence[bytes], tensors: Sequence[bytes], labels: Mapping[bytes, int]
    ) -> dict[str, Any]:
        """Heavy. Keep sample inputs."""
        model = self.registry.get(reference)
        return {"model": model.ref, "samples": self.registry.add_samples(model, frames, tensors, labels=labels)}

    def profile(self, reference: str, codecs: bool = False, device_class: str = OWN_CLASS) -> dict[str, Any]:
        """Heavy. Measure a model on this machine; with `codecs`, what each does to the answers for its samples too."""
        return self.planning.profile(self.registry.get(reference), device_class=device_class, codecs=codecs)

    def profile_at_work(self, reference: str, device: str) -> dict[str, Any]:
        """Heavy, if the model was not measured here yet. What a device measured of a model that it runs, as costs."""
        return self.replanner.measured_on(reference, self.devices.get(device))

    def costs(
        self, reference: str, device_class: str, lossy: bool = False, tiers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Heavy, if not measured yet. The costs file."""
        costs = self.planning.costs(self.registry.get(reference), device_class, lossy=lossy, tiers=tiers, whole=True)
        built: dict[str, Any] = msgspec.to_builtins(costs)
        return built

    # ---- plans and deployments --------------------------------------------------------------------------------

    def plan(self, reference: str, device_class: str, link: str, wish: Wish) -> dict[str, Any]:
        """Heavy. A plan for people; nothing is deployed."""
        return self.planning.describe(self.registry.get(reference), device_class, link, wish)

    def deploy(
        self,
        reference: str,
        targets: Sequence[str],
        link: str,
        wish: Wish,
        *,
        recut: bool = False,
        elsewhere: bool = False,
        now: bool = False,
        asked: Asked = PLAIN,
    ) -> dict[str, Any]:
        """Heavy. Plan, cut, sign, and begin a rollout on the terms asked for; with `now` devices fetch it at any hour.

        With `recut`, and where the release key lies elsewhere, the planner signs another cut of a release. With
        `elsewhere`: what the release key must sign, and nothing is published yet.
        """
        model = self.registry.get(reference)
        chosen = self.devices.select(targets)
        self.rollouts.check(asked, len(chosen))
        gateways = self.gateways.of([device.name for device in chosen])
        through = through_by_class(chosen, gateways)
        if wish.encrypt:
            check_can_decrypt([*chosen, *gateways.values()])
        by_planner = recut or not (elsewhere or self.signing.signs_releases)
        links = links_by_class(chosen, link)
        digest, manifest = self.releasing.prepare(model, links, wish, recut=by_planner, through=through)
        signed_here = by_planner or self.signing.signs_releases or digest in self.signing.releases()
        if elsewhere and not signed_here:
            names = sorted(device.name for device in chosen)
            return {**_planned(digest, model, names, manifest), **self.signing.to_sign(self.releasing.raw(digest))}
        self.releasing.publish(model, digest, wish)
        options = {**wish.as_options(), "now": now}
        return self._roll_out(model, manifest, Wanted(digest, model.ref, chosen, targets, options, asked, who_asks()))

    def deploy_signed(
        self,
        reference: str,
        targets: Sequence[str],
        wish: Wish,
        release: str,
        signed: bytes,
        *,
        now: bool = False,
        asked: Asked = PLAIN,
    ) -> dict[str, Any]:
        """Heavy. Publish a release that was prepared by `deploy` and signed elsewhere, and begin its rollout."""
        model = self.registry.get(reference)
        manifest = self.releasing.prepared(model, release)
        chosen = self.devices.select(targets)
        if late := sorted({device.device_class for device in chosen} - set(manifest.plans)):
            raise Conflict(f"the release has no plan for {', '.join(late)}, which joined meanwhile: deploy again")
        self.rollouts.check(asked, len(chosen))
        self.releasing.publish(model, release, wish, signed)
        options = {**wish.as_options(), "now": now}
        return self._roll_out(model, manifest, Wanted(release, model.ref, chosen, targets, options, asked, who_asks()))

    def deploy_agent(
        self,
        version: str,
        targets: Sequence[str],
        *,
        elsewhere: bool = False,
        signed: tuple[str, bytes] | None = None,
        now: bool = False,
        asked: Asked = PLAIN,
    ) -> dict[str, Any]:
        """Heavy. Sign a version of the agent as a release, and begin a rollout on the terms asked for.

        With `elsewhere`: what the release key must sign, and nothing is published yet; with `signed` (the release, the
        list of releases with it) it was.
        """
        model = self.agents.get(version)
        chosen = self.devices.select(targets)
        self.rollouts.check(asked, len(chosen))
        digest, manifest = self.agents.prepare(model)
        self.agents.check_fit(manifest, chosen)
        if signed is not None and signed[0] != digest:
            raise Conflict(f"agent {version} got another build meanwhile: deploy it again, and sign that")
        known = signed is not None or self.signing.signs_releases or digest in self.signing.releases()
        if elsewhere and not known:
            names = sorted(device.name for device in chosen)
            return {**_planned(digest, model, names, manifest), **self.signing.to_sign(self.releasing.raw(digest))}
        whole = Wish(partition="device")
        self.releasing.publish(model, digest, whole, signed[1] if signed is not None else None)
        options = {**whole.as_options(), "now": now, "agent": version}
        return self._roll_out(model, manifest, Wanted(digest, model.ref, chosen, targets, options, asked, who_asks()))

    def _roll_out(self, model: Model, manifest: Manifest, wanted: Wanted) -> dict[str, Any]:
        if self.devices.groups is not None:
            wanted = replace(wanted, options={**wanted.options, "groups": sorted(self.devices.groups)})
        made = self.rollouts.make(wanted)
        taken_over = [{"rollout": number, "devices": count} for number, count in sorted(made.supersedes.items())]
        names = sorted(device.name for device in wanted.devices)
        told = {"deployment": made.number, "rollout": made.number, "supersedes": taken_over}
        return {**told, **_planned(wanted.release, model, names, manifest)}

    def ask_rollout(self, number: int, verb: Verb) -> dict[str, Any]:
        """Pause it, let it go on, approve its next stage, abort it, or take its devices back."""
        self.rollouts.command(number, verb, who_asks())
        return self.rollouts.shown(number)

    def deployments(self) -> list[dict[str, Any]]:
        """Every deployment, oldest first; of each only the devices that exist for who asks."""
        mine = self._mine()
        shown = [shown_deployment(row) for row in self.director.deployments()]
        return shown if mine is None else [within for one in shown if (within := narrowed(one, mine))]

    def releases(self) -> list[dict[str, Any]]:
        """Every release, oldest first."""
        models: dict[int, Model] = {model.id: model for model in self.registry.all()}
        return [
            {"release": row.digest, "model": models[row.model_id].ref, "created": row.created, **row.options}
            for row in self.releasing.all()
            if row.model_id in models  # the agent's own are not of a model
        ]

    # ---- devices ----------------------------------------------------------------------------------------------

    def claim(self, wish: ClaimWish, gateway: str = "") -> dict[str, Any]:
        """A one-time claim for a device to come, as the operator carries it there; with `gateway` for one that others
        offload through, at that HOST:PORT."""
        device_profile(wish.device_class)
        link_of(wish.link)
        if gateway:
            host_and_port(gateway, "gateway")
        token, expires = self.devices.claim(wish)
        if gateway:
            self.gateways.appoint(wish.device, gateway)
            self.settle()
        claim = Claim(
            device=wish.device,
            device_class=wish.device_class,
            token=token,
            controller_url=self.addresses.api_url,
            ca_pem=self.authority.ca_pem,
            tuf_root=self.signing.root_text,
            expires=expires,
        )
        carried: dict[str, Any] = msgspec.to_builtins(claim)
        return carried

    def enrol(
        self, token: str, csr_pem: str, encryption_key: bytes = b"", encryption_signature: bytes = b""
    ) -> dict[str, Any]:
        """A certificate for a token, and where everything is."""
        if encryption_key:
            check_introduced(csr_pem, encryption_key, encryption_signature)
        let_in = self.devices.enrol(token, csr_pem.encode(), self.authority.sign_request, encryption_key)
        self.director.wrap_anew(let_in.device)
        self.settle()
        if let_in.replaced:
            self.revocations.publish()
            self.revocations.cut(let_in.device)
        if let_in.fresh:
            self.tell.forget([let_in.device])
        self.tell.tell([let_in.device])
        return self._enrolled(let_in)

    def papers(self, targets: Sequence[str], models: Sequence[str], valid_s: int) -> dict[str, Any]:
        """What a bundle for these devices holds, all but the chunks."""
        chosen = self.devices.select(targets)
        if not chosen:
            raise Conflict(f"no device is meant by {', '.join(targets)[:200]}")
        return self.offline.papers(chosen, models, valid_s)

    def renew(self, renewal: Renewal, *, shown_serial: int | None) -> dict[str, Any]:
        """A new certificate for a device that proves to hold the key of one of ours, expired or not.

        `shown_serial` is of the certificate that the connection showed: the same one, or none where it has expired.
        """
        old = self.authority.recognise(renewal.certificate_pem.encode())
        expired = old.not_valid_after_utc.timestamp() <= time()
        if shown_serial != old.serial_number and not (expired and shown_serial is None):
            raise Forbidden("a certificate is renewed over a connection that shows it, until it has expired")
        try:
            check_renewal(renewal, old)
        except TrustError as error:
            raise Forbidden(str(error)) from error
        return self._enrolled(self.devices.renew(old, renewal.csr_pem.encode(), self.authority.sign_request))

    def _enrolled(self, let_in: Enrolment) -> dict[str, Any]:
        enrolled = Enrolled(
            device=let_in.device,
            certificate_pem=let_in.certificate.decode(),
            ca_pem=self.authority.ca_pem,
            broker_host=self.addresses.mqtt_host,
            broker_port=self.addresses.mqtt_port,
            offload_url=self.addresses.offload_url,
        )
        answer: dict[str, Any] = msgspec.to_builtins(enrolled)
        return answer

    def describe(self, name: str, group: str | None, labels: Mapping[str, str | None]) -> dict[str, Any]:
        """Another group or other labels for a device. What it was told to run stays; later deployments go by it."""
        described = self.devices.describe(name, group, labels)
        return {"device": name, "group": described.group, "labels": described.labels}

    def revoke(self, name: str) -> dict[str, Any]:
        """Take a device's right away, and forget what it was told."""
        self.devices.revoke(name)
        self.revocations.publish()
        self.revocations.cut(name)
        self.tell.tell([name])
        self.settle()
        return {"device": name, "state": "revoked"}

    # ---- gateways ---------------------------------------------------------------------------------------------

    def lead(self, targets: Sequence[str], gateway: str, link: str = "") -> dict[str, Any]:
        """Let devices offload through a gateway, or with `none` to the cloud."""
        if gateway != "none" and self.devices.groups is not None and self.devices.open_claim(gateway) is None:
            self.devices.get(gateway)
        led = self.gateways.lead(self.devices.select(targets), gateway, link)
        self.settle()
        return {"devices": led, "gateway": None if gateway == "none" else gateway}

    def gateway_certificate(self, name: str, serial: int, csr_pem: str) -> dict[str, Any]:
        """A server's certificate for the gateway of that name, whose own certificate has that serial number."""
        self._check_gateway(name, serial)
        return {"certificate_pem": self.authority.sign_gateway(csr_pem.encode(), name).decode()}

    def revoked_for(self, name: str, serial: int) -> bytes:
        """The revocation list (PEM), for a gateway to go by."""
        self._check_gateway(name, serial)
        return self.authority.revocation_list(self.devices.revoked_serials())

    def _check_gateway(self, name: str, serial: int) -> None:
        self.gateways.check_serves(name)
        if serial in self.devices.revoked_serials():
            raise Forbidden("this certificate was revoked")

    def settle(self) -> None:
        """Tell gateways what they keep now, and devices through whom they offload, where that has changed."""
        if changed := self.director.settle():
            self.tell.tell(changed)

    def all_devices(self, asked: AskedDevices | None = None) -> tuple[list[dict[str, Any]], str]:
        """A page of devices and of claims that are still open for one not seen yet, by name; and the name to go on
        after, empty on the last page."""
        wanted = replace(asked or AskedDevices(), groups=self.devices.groups)
        page, now = self.listing.page(wanted), time()
        led = self.gateways.of([one.name for one in page.devices])
        enrolled = [
            shown_device(one, self.devices.state(one), page, now)
            | {"gateway": led[one.name].name if one.name in led else None}
            for one in page.devices
        ]
        every = [*enrolled, *(shown_claim(claim) for claim in page.claims)]
        return sorted(every, key=lambda one: str(one["name"])), page.after

    def overview(self) -> dict[str, Any]:
        """The fleet at a glance."""
        return self.fleet.overview(self.devices.groups)

    def how_parts_are(self) -> list[dict[str, Any]]:
        """Broker, offload server, database, disk, processes and gateways."""
        return self.parts.shown(self.devices.groups)

    def history(self, name: str, span: Span, since: float, until: float) -> dict[str, Any]:
        """What a device told, added up by minutes, hours, days or months."""
        self.devices.get(name)
        return {"device": name, "span": span, "buckets": self.rolling.history(name, span, since, until)}

    def model_history(self, reference: str, span: Span, since: float, until: float) -> dict[str, Any]:
        """The same of a model, whatever its version, on all devices that exist for who asks."""
        name = self.registry.get(reference).name
        found = self.rolling.of_model(name, span, since, until, self.devices.groups)
        return {"model": name, "span": span, "buckets": found}

    def ask_for_logs(self, name: str) -> dict[str, Any]:
        """Ask a device for its log."""
        self.devices.get(name)
        return self.bundles.request(name, who_asks())

    def log_bundles(self, name: str) -> list[dict[str, Any]]:
        """The log bundles of a device, newest first."""
        self.devices.get(name)
        return self.bundles.of(name)

    def log_bundle(self, name: str, number: str) -> dict[str, Any]:
        """One of them, with its content once it is here."""
        self.devices.get(name)
        return self.bundles.get(name, number)

    def device(self, name: str) -> dict[str, Any]:
        """One device: what it was told, what it does."""
        claim = self.devices.open_claim(name)
        if claim is not None:
            return shown_claim(claim)
        device = self.devices.get(name)
        shown = shown_device(device, self.devices.state(device), self.listing.of(device), time())
        led = self.gateways.of([name])
        through = {"gateway": led[name].name if name in led else None, "serves_at": self.gateways.address(name) or None}
        return {**shown, **through, "plans": self._plans_in_use(device)}

    def _plans_in_use(self, device: Device) -> dict[str, Any]:
        """By model, the table that the device chooses from."""
        running = {one["model"]: one["release"] for one in (device.reported or {}).get("models", []) if one["release"]}
        manifests = {model: self.releasing.find(release) for model, release in running.items()}
        return {
            model: msgspec.to_builtins(manifest.plans[device.device_class])
            for model, manifest in manifests.items()
            if manifest is not None and device.device_class in manifest.plans
        }

    def telemetry(self, name: str, newest: int) -> list[dict[str, Any]]:
        """What a device told of itself, oldest first."""
        return self.devices.history(name, newest)

    def events(self, newest: int) -> list[dict[str, Any]]:
        """The newest events, oldest first; who is for some groups sees those of their devices."""
        mine = self._mine()
        wanted = select(Event).order_by(Event.id.desc()).limit(newest)
        if mine is not None:
            wanted = wanted.where(Event.what.like("device.%"), Event.subject.in_(mine))
        with self.database.read() as session:
            rows = session.scalars(wanted).all()
        return [shown_event(row) for row in reversed(rows)]

    def _mine(self) -> frozenset[str] | None:
        """The names of the devices that exist for who asks; None: of all there are and were."""
        return None if self.devices.groups is None else frozenset(device.name for device in self.devices.all())


def links_by_class(devices: Sequence[Device], link: str) -> dict[str, Link]:
    """The link that each device class is planned for: the deployment's, else the slowest among its devices."""
    by_class: dict[str, list[Link]] = {}
    for device in devices:
        by_class.setdefault(device.device_class, []).append(link_of(link, device.link))
    return {device_class: slowest(links) for device_class, links in sorted(by_class.items())}


def _planned(digest: str, model: Model, devices: Sequence[str], manifest: Manifest) -> dict[str, Any]:
    plans = [msgspec.to_builtins(plan) for plan in manifest.plans.values()]
    told = {"release": digest, "model": model.ref, "devices": list(devices), "encrypted": manifest.is_encrypted}
    return {**told, "plans": plans, **signature(manifest)}
