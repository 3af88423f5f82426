"""Gateways: assignment of devices, cached releases, and the director's signed statements for both."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from edgesplit.errors import NotFound, UsageError
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import ModelState, Reported
from edgesplit.release.manifest import Gateway, Signed, Statement
from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit_controller.errors import Conflict, Unauthenticated
from edgesplit_controller.fleet.devices import ClaimRequest, Devices
from edgesplit_controller.fleet.gateways import Gateways, gateway_tier_by_class
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device, Model, ReleaseRow
from support.immediate_deployment import deploy

THREE, OTHER, TWO = "a" * 64, "b" * 64, "c" * 64
"""Releases: two whose plans know a gateway, one whose plan knows none."""


class GatewayHarness:
    """Devices, gateways and a director on one folder."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.now = 1_000_000.0
        self.database = Database(database_url)
        self.devices = Devices(self.database, stale_after_s=10.0, now=lambda: self.now)
        self.gateways = Gateways(self.database, now=lambda: self.now, model_if_split={THREE: "m", OTHER: "m"}.get)  # type: ignore[arg-type]
        self.director = Director(
            self.database, self._sign, statement_s=1_000, now=lambda: self.now, gateways=self.gateways,
            wrap_for_gateway=lambda device, release: f"{device.name} {release[:1]}".encode(),
        )  # fmt: skip
        self.authority = Authority(folder / "keys")
        with self.database.write() as session:
            session.add(Model(
                id=1, name="m", version=1, sha256="", optimised_sha256="", bytes=0, input_text="", bindings={},
                shown={}, created=0.0,
            ))  # fmt: skip
            session.add_all(
                ReleaseRow(digest=release, model_id=1, created=0.0, options={}) for release in (THREE, OTHER, TWO)
            )

    def _sign(self, statement: Statement) -> bytes:
        return messages.encode(Signed(messages.encode(statement), ()))

    def enrol(self, *names: str, profile: str = "raspberrypi4", link: str = "") -> None:
        for name in names:
            token, _ = self.devices.claim(ClaimRequest(device=name, device_class=profile, link=link, replace=True))
            self.devices.enrol(token, self.csr(name), self.authority.sign_request)

    def csr(self, name: str) -> bytes:
        return certificate_request(load_or_make_key(self.folder / f"{name}.key"), name)

    def gateway(self, name: str = "gw", address: str = "10.0.0.7:8500", profile: str = "jetson-nano") -> None:
        self.gateways.register(name, address)
        self.enrol(name, profile=profile, link="lte")

    def lead(self, gateway: str, *names: str, link: str = "") -> list[str]:
        """Lead these devices there, and tell who must hear of it."""
        self.gateways.assign(self.devices.select(names), gateway, link)
        return self.director.refresh_gateway_statements()

    def deploy(self, release: str, *names: str) -> list[str]:
        deploy(self.database, self.director, release, "m@1", names)
        return self.director.refresh_gateway_statements()

    def statement_of(self, name: str) -> Statement:
        raw = self.director.statements([name])[name]
        return messages.decode(messages.decode(raw, Signed).payload, Statement)

    def keeps(self, name: str = "gw") -> list[str]:
        return [release.release for release in self.statement_of(name).gateway_releases]

    def runs(self, name: str, release: str) -> list[str]:
        """The device reports that it runs that; who is told anew."""
        device = self.devices.get(name)
        said = Reported(device.session, 1, (ModelState("m", release, release, "running"),))
        self.devices.ingest([(name, said)])
        return self.director.refresh_gateway_statements()


@pytest.fixture
def bench(tmp_path: Path, database_url: str) -> GatewayHarness:
    return GatewayHarness(tmp_path, database_url)


def test_statements_name_the_gateway_and_the_releases_it_caches(bench: GatewayHarness) -> None:
    """Name and address in the device's statement; the release with its wrapped keys in the gateway's. Repeating changes
    nothing, and devices without a gateway get none."""
    bench.gateway()
    bench.enrol("cam", "door")
    assert bench.lead("gw", "cam", link="wifi") == []  # nothing was told to either yet
    assert bench.devices.get("cam").link == "wifi"

    assert bench.deploy(THREE, "cam", "door") == ["gw"]

    assert bench.statement_of("cam").gateway == Gateway("gw", "10.0.0.7:8500")
    assert bench.statement_of("door").gateway is None
    (kept,) = bench.statement_of("gw").gateway_releases
    assert (kept.model, kept.release, kept.fetch_now, kept.keys) == ("m", THREE, True, b"gw a")
    assert bench.statement_of("gw").releases == () and bench.statement_of("cam").gateway_releases == ()
    assert bench.director.refresh_gateway_statements() == []


def test_releases_without_gateway_slices_are_not_cached(bench: GatewayHarness) -> None:
    """A gateway only relays such a release, and needs none of its files."""
    bench.gateway()
    bench.enrol("cam")
    bench.lead("gw", "cam")
    assert bench.deploy(TWO, "cam") == []
    assert bench.director.statements(["gw"]) == {}
    assert bench.statement_of("cam").gateway == Gateway("gw", "10.0.0.7:8500")


def test_a_gateway_keeps_a_release_while_a_device_behind_needs_it(bench: GatewayHarness) -> None:
    """What a device still runs is kept beside its desired release; a release that no device reports or desires is
    removed."""
    bench.gateway()
    bench.enrol("cam", "door")
    bench.lead("gw", "cam", "door")
    bench.deploy(THREE, "cam", "door")
    bench.runs("cam", THREE)
    bench.runs("door", THREE)

    assert bench.deploy(OTHER, "cam", "door") == ["gw"] and bench.keeps() == [THREE, OTHER]
    assert bench.runs("cam", OTHER) == [] and bench.keeps() == [THREE, OTHER]
    assert bench.runs("door", OTHER) == ["gw"] and bench.keeps() == [OTHER]
    assert bench.deploy(TWO, "cam", "door") == [] and bench.keeps() == [OTHER]
    bench.runs("cam", TWO)
    assert bench.runs("door", TWO) == ["gw"] and bench.keeps() == []


def test_a_false_report_adds_no_release_to_a_gateway(bench: GatewayHarness) -> None:
    """Whatever a device reports as running: another model's release, an unknown one, a model that was never deployed to
    it."""
    bench.gateway()
    bench.enrol("cam")
    bench.lead("gw", "cam")
    bench.deploy(THREE, "cam")
    device = bench.devices.get("cam")
    many = tuple(ModelState(f"x{n}", OTHER, OTHER, "running") for n in range(50))
    bench.devices.ingest([("cam", Reported(device.session, 1, (*many, ModelState("m", "f" * 64, THREE, "running"))))])
    bench.director.refresh_gateway_statements()
    assert bench.keeps() == [THREE]


def test_gateway_changes_are_restated_to_the_devices_behind_it(bench: GatewayHarness) -> None:
    """A new address; revoked: to the cloud; enrolled again: through it again; `none`: to the cloud permanently."""
    bench.gateway()
    bench.enrol("cam")
    bench.lead("gw", "cam")
    bench.deploy(THREE, "cam")

    bench.gateways.register("gw", "gw.local:9000")
    assert bench.director.refresh_gateway_statements() == ["cam"] and bench.statement_of("cam").gateway == Gateway(
        "gw", "gw.local:9000"
    )

    bench.devices.revoke("gw")
    assert bench.director.refresh_gateway_statements() == ["cam"] and bench.statement_of("cam").gateway is None

    bench.enrol("gw", profile="jetson-nano")
    assert bench.director.refresh_gateway_statements() == ["gw", "cam"]  # the gateway first
    assert bench.keeps() == [THREE] and bench.statement_of("cam").gateway is not None

    assert bench.lead("none", "cam") == ["cam", "gw"]
    assert bench.statement_of("cam").gateway is None and bench.keeps() == []


def test_invalid_gateway_assignments_are_refused_with_a_reason(bench: GatewayHarness) -> None:
    """An unknown device, one that has not enrolled, a gateway behind a gateway, an invalid address."""
    bench.enrol("cam", "door")
    with pytest.raises(Conflict, match="claim one with"):
        bench.lead("door", "cam")
    bench.gateways.register("gw", "10.0.0.7:8500")
    with pytest.raises(Conflict, match="not enrolled yet"):
        bench.lead("gw", "cam")
    bench.gateway()
    with pytest.raises(NotFound, match="did you mean gw"):
        bench.lead("gv", "cam")
    with pytest.raises(Conflict, match="is a gateway"):
        bench.lead("gw", "gw")
    bench.lead("gw", "cam")
    with pytest.raises(Conflict, match="behind a gateway itself"):
        bench.gateways.register("cam", "10.0.0.8:8500")
    for wrong in ("gw", "gw:", ":8500", "gw:0", "gw:x", "gw:99999"):
        with pytest.raises(UsageError, match="address of a gateway"):
            bench.gateways.register("new", wrong)
    bench.gateways.check_is_gateway("gw")
    for name in ("cam", "nobody"):
        with pytest.raises(Unauthenticated, match="is no gateway"):
            bench.gateways.check_is_gateway(name)


def test_a_device_class_uses_one_route_per_release(bench: GatewayHarness) -> None:
    """Devices of one class behind gateways of one profile are planned for the slowest uplink; a mixture is refused and
    one device of each route is named."""
    bench.gateway("near")
    bench.gateway("far")
    bench.gateway("strange", profile="raspberrypi5")
    bench.enrol("cam", "door", "roof")
    bench.enrol("nano", profile="jetson-nano")
    with bench.database.write() as session:
        session.get_one(Device, "far").link = "3g"
    bench.lead("near", "cam")
    bench.lead("far", "door")

    def ways(*names: str) -> object:
        return gateway_tier_by_class(bench.devices.select(names), bench.gateways.by_device(names))

    found = gateway_tier_by_class(bench.devices.select(["cam", "door", "nano"]), bench.gateways.by_device())
    assert list(found) == ["raspberrypi4"]
    assert (found["raspberrypi4"].device_class, found["raspberrypi4"].uplink.name) == ("jetson-nano", "3g")
    assert ways("roof") == {}
    with pytest.raises(Conflict, match=r"roof has no gateway; cam is behind a gateway of the profile jetson-nano"):
        ways("cam", "roof")
    bench.lead("strange", "roof")
    with pytest.raises(Conflict, match="separately"):
        ways("cam", "roof")


def test_a_gateway_certificate_is_valid_for_its_own_name_only(bench: GatewayHarness) -> None:
    """The name is neither an address nor a device's; the certificate is for servers only."""
    made = x509.load_pem_x509_certificate(bench.authority.sign_gateway(bench.csr("gw"), "gw"))
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["gw.gateway.edgesplit"]
    purposes = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.SERVER_AUTH]
