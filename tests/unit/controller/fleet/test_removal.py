"""Removal of devices: what goes, what stays, and what the name does afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from edgesplit.errors import NotFound
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Birth, Death, ModelState, Reported, Telemetry, TelemetryWindow
from edgesplit.release.manifest import Signed, Statement
from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit_controller.errors import Conflict, Unauthenticated
from edgesplit_controller.fleet import removal
from edgesplit_controller.fleet.devices import ClaimRequest, Devices
from edgesplit_controller.fleet.gateways import Gateways
from edgesplit_controller.fleet.log_bundles import LogBundleStore
from edgesplit_controller.history.rollup import RollUp
from edgesplit_controller.messaging.statement_publisher import StatementPublisher
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.schema import known_tables
from edgesplit_controller.storage.tables.core import (
    CertificateRow,
    ClaimRow,
    Event,
    GatewayRouteRow,
    RemovedDeviceRow,
    TelemetryRow,
)
from edgesplit_controller.storage.tables.device_state import DeviceBucketRow, LogBundleRow, LogPieceRow
from support.device_fleet import add_release
from support.immediate_deployment import deploy
from support.rollout_harness import NEW, RolloutHarness

RELEASE = "a" * 64


class Fleet:
    """Devices with all that is stored of them, on one folder."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder, self.now = folder, 2_000_000_000.0
        self.database = Database(database_url)
        self.devices = Devices(self.database, stale_after_s=10.0, now=lambda: self.now)
        self.gateways = Gateways(self.database, now=lambda: self.now, model_if_split=lambda _release: "")
        self.director = Director(
            self.database, self._sign, statement_s=1_000, now=lambda: self.now, gateways=self.gateways
        )
        self.statements = StatementPublisher(self.database)
        self.logs = LogBundleStore(self.database, lambda _name, _job: None, now=lambda: self.now)
        self.authority = Authority(folder / "keys")
        with self.database.write() as session:
            add_release(session, RELEASE)

    def _sign(self, statement: Statement) -> bytes:
        return messages.encode(Signed(messages.encode(statement), ()))

    def claim(self, name: str, group: str = "") -> str:
        return self.devices.claim(ClaimRequest(device=name, device_class="raspberrypi4", group=group))[0]

    def use(self, token: str, key: str) -> None:
        csr = certificate_request(load_or_make_key(self.folder / f"{key}.key"), "anything")
        self.devices.enrol(token, csr, self.authority.sign_request)

    def enrol(self, name: str, key: str = "") -> None:
        self.use(self.claim(name), key or name)

    def live(self, name: str) -> None:
        """A device that did all that leaves rows: it runs a release, reports, has telemetry, logs and a flood."""
        self.enrol(name)
        deploy(self.database, self.director, RELEASE, "m@1", [name])
        window = TelemetryWindow(model="m", release=RELEASE, row="local", requests=3)
        self.devices.ingest([
            (name, Birth(1, 0.0, "1", "raspberrypi4", False, "", start_id="s")),
            (name, Reported(1, 1, (ModelState("m", "", RELEASE, "failed", "no room"),), safe_mode="it crashed")),
            (name, Telemetry(session=1, sequence=1, emulated=False, up_bytes_per_s=1.0, rtt_s=0.1, remote_usable=True,
                             models=(window,))),
        ])  # fmt: skip
        self.now += 120.0
        RollUp(self.database, now=lambda: self.now).step()
        bundle = self.logs.request(name, "owner")["id"]
        piece = messages.LogPiece(id=bundle, offset=0, total=9, sha256="0" * 64, data=b"part")
        self.devices.ingest([(name, piece)])
        self.devices.quarantine(name, 1)

    def rows(self, name: str) -> dict[str, int]:
        """How many rows of each table are about the device of this name."""
        counts = {}
        with self.database.read() as session:
            for table in known_tables().sorted_tables:
                column = table.c.get("device") if table.name != "devices" else table.c.name
                if column is not None:
                    counts[table.name] = len(session.execute(select(table).where(column == name)).all())
        return {table: count for table, count in counts.items() if count}

    def published(self) -> None:
        """Publish what is due, as the controller's loop does."""
        due = self.director.statements(self.statements.due())
        self.statements.confirm(due)


@pytest.fixture
def fleet(tmp_path: Path, database_url: str) -> Fleet:
    return Fleet(tmp_path, database_url)


def test_every_table_about_devices_is_deleted_from_or_kept_on_purpose() -> None:
    """A new table with a device in it must say what becomes of its rows."""
    decided = {table.__table__.name for table in (*removal.DELETED, *removal.KEPT)}  # type: ignore[attr-defined]
    about = {table.name for table in known_tables().sorted_tables if "device" in table.c}
    refers = {
        table.name
        for table in known_tables().sorted_tables
        if any(key.column.table.name == "devices" for key in table.foreign_keys)
    }
    assert about | refers == decided


def test_a_removed_device_leaves_its_certificates_and_its_counter(fleet: Fleet) -> None:
    """Rows, history, logs and claims go; the certificate stays on the revocation list, and the audit trail tells."""
    fleet.live("cam")
    fleet.live("bystander")
    untouched = fleet.rows("bystander")
    before = fleet.rows("cam")
    assert {"running", "conditions", "telemetry", "telemetry_rolled", "bundles", "floods", "starts"} <= set(before)
    counter = fleet.devices.get("cam").counter
    serial = int(fleet.devices.get("cam").certificate_serial)
    fleet.devices.revoke("cam")
    removed = fleet.devices.remove("cam")
    assert removed.was_enrolled and not removed.revoked_now
    assert fleet.rows("cam") == {"certificates": 1, "removed_devices": 1}
    assert fleet.rows("bystander") == untouched and serial in fleet.devices.revoked_serials()
    with fleet.database.read() as session:
        assert session.get_one(RemovedDeviceRow, "cam").counter == counter
        assert {piece.bundle for piece in session.scalars(select(LogPieceRow))} == {
            bundle.id for bundle in session.scalars(select(LogBundleRow))
        }
        names = [event.what for event in session.scalars(select(Event).where(Event.subject == "cam"))]
    assert names[-1] == "device.removed" and "device.enrolled" in names
    assert "cam" not in [device.name for device in fleet.devices.all()]
    with pytest.raises(NotFound):
        fleet.devices.get("cam")


def test_a_device_that_is_not_revoked_needs_force(fleet: Fleet) -> None:
    """Without it nothing changes; with it the certificate is revoked in the same transaction."""
    fleet.live("cam")
    before = fleet.rows("cam")
    with pytest.raises(Conflict, match="edgectl device revoke cam"):
        fleet.devices.remove("cam")
    assert fleet.rows("cam") == before and fleet.devices.get("cam").revoked is None
    serial = int(fleet.devices.get("cam").certificate_serial)
    assert fleet.devices.remove("cam", force=True).revoked_now
    assert serial in fleet.devices.revoked_serials() and "devices" not in fleet.rows("cam")


def test_a_claim_that_nobody_used_is_removed(fleet: Fleet) -> None:
    """Its token enrols nothing any more; a name that never was is not found."""
    token = fleet.claim("cam")
    assert not fleet.devices.remove("cam").was_enrolled
    assert not fleet.rows("cam") and not fleet.devices.open_claims()
    with pytest.raises(Unauthenticated):
        fleet.use(token, "cam")
    with pytest.raises(NotFound):
        fleet.devices.remove("cam")
    with pytest.raises(NotFound):
        fleet.devices.remove("never", force=True)


def test_a_used_claim_does_not_bring_a_removed_device_back(fleet: Fleet) -> None:
    """Its token may be repeated with the same key while it is valid, but not after the removal."""
    token = fleet.claim("cam")
    fleet.use(token, "cam")
    fleet.use(token, "cam")
    fleet.devices.remove("cam", force=True)
    with pytest.raises(Unauthenticated):
        fleet.use(token, "cam")
    with fleet.database.read() as session:
        assert not session.scalars(select(ClaimRow)).all()


def test_statements_of_the_next_device_of_the_name_are_newer(fleet: Fleet) -> None:
    """Also with a clock that was set back: the agent may return with the folder in which it noted the old counter."""
    fleet.live("cam")
    counter = fleet.devices.get("cam").counter
    fleet.devices.remove("cam", force=True)
    fleet.now -= 1_000_000.0
    fleet.enrol("cam", key="cam")
    deploy(fleet.database, fleet.director, RELEASE, "m@1", ["cam"])
    assert fleet.devices.get("cam").counter > counter
    with fleet.database.read() as session:
        assert session.get(RemovedDeviceRow, "cam") is None
    assert len(fleet.devices.history("cam")) == 0


def test_the_broker_is_cleared_of_a_removed_device_until_it_says_so(fleet: Fleet) -> None:
    """A controller that is killed before the clearing does it at its next start; one that heard nothing new does not
    repeat it."""
    fleet.live("cam")
    fleet.enrol("bystander")
    fleet.devices.remove("cam", force=True)
    assert "cam" in fleet.statements.due() and fleet.director.statements(None)["cam"] == b""
    assert fleet.director.statements(["bystander"]).get("cam") is None
    fleet.published()
    assert "cam" not in fleet.statements.due() and "cam" not in fleet.director.statements(None)


def test_a_removed_device_that_is_heard_is_thrown_off_and_cleared(fleet: Fleet) -> None:
    """It connected between the removal and the new revocation list. Its last will is published by the broker, so it
    only needs clearing; nothing is stored of either."""
    fleet.live("cam")
    fleet.devices.remove("cam", force=True)
    fleet.published()
    rows = fleet.rows("cam")
    heard = fleet.devices.ingest([("cam", Birth(9, 0.0, "1", "raspberrypi4", False, ""))])
    assert heard.intruders == {"cam"} and heard.outcomes == {("birth", "revoked"): 1}
    assert fleet.statements.due() == ["cam"]
    fleet.published()
    by_will = fleet.devices.ingest([("cam", Death(9))])
    assert by_will.intruders == set() and by_will.removed == {"cam"}
    assert fleet.statements.due() == ["cam"] and fleet.rows("cam") == rows
    assert fleet.devices.ingest([("never", Death(9))]).outcomes == {("death", "unknown"): 1}


def test_the_devices_of_a_removed_gateway_are_led_to_the_cloud(fleet: Fleet) -> None:
    """They keep their rows; the gateway's name can be a device's."""
    fleet.gateways.register("gw", "10.0.0.7:8500")
    for name in ("gw", "cam"):
        fleet.enrol(name)
    deploy(fleet.database, fleet.director, RELEASE, "m@1", ["cam"])
    fleet.gateways.assign(fleet.devices.select(["cam"]), "gw")
    assert fleet.director.refresh_gateway_statements() == ["cam"]
    fleet.devices.remove("gw", force=True)
    assert fleet.director.refresh_gateway_statements() == ["cam"]
    raw = fleet.director.statements(["cam"])["cam"]
    assert messages.decode(messages.decode(raw, Signed).payload, Statement).gateway is None
    with fleet.database.read() as session:
        assert session.get_one(GatewayRouteRow, "cam").gateway is None
    fleet.enrol("gw", key="other")
    with pytest.raises(Unauthenticated):
        fleet.gateways.check_is_gateway("gw")


def test_an_operator_of_other_groups_removes_nothing(fleet: Fleet) -> None:
    """Neither a device nor a claim, and the answer is the same as for a name that never was."""
    fleet.use(fleet.claim("cam", "doors"), "cam")
    fleet.claim("door", "doors")
    others = fleet.devices.scoped_to(frozenset({"lab"}))
    for name in ("cam", "door", "never"):
        with pytest.raises(NotFound, match=f"no device '?{name}"):
            others.remove(name, force=True)
    assert {"devices", "claims"} <= set(fleet.rows("cam")) and fleet.rows("door") == {"claims": 1}
    own = fleet.devices.scoped_to(frozenset({"doors"}))
    assert own.remove("door").device == "door" and own.remove("cam", force=True).was_enrolled


def test_a_rollout_goes_on_without_a_removed_canary(tmp_path: Path) -> None:
    """The canary, its assigned device and a queued one are removed in the middle: the others get the release."""
    world = RolloutHarness(tmp_path)
    names = [f"cam-{number:03d}" for number in range(6)]
    world.enrol(*names)
    number = world.deploy(NEW, stages=("2",))
    assigned = sorted(name for name, member in world.members(number).items() if member["state"] == "assigned")
    queued = sorted(name for name, member in world.members(number).items() if member["state"] == "queued")
    for name in (assigned[0], queued[0]):
        world.devices.remove(name, force=True)
        del world.fleet[name]
    world.settle()
    assert world.state(number) == "finished" and set(world.running().values()) == {NEW}
    assert len(world.members(number)) == 4


def test_telemetry_that_was_not_summed_up_goes_too(fleet: Fleet) -> None:
    """The sums continue after a removal between two of their steps."""
    fleet.live("cam")
    fleet.live("bystander")
    later = Telemetry(
        session=1, sequence=2, emulated=False, up_bytes_per_s=1.0, rtt_s=0.1, remote_usable=True, models=()
    )
    fleet.devices.ingest([("cam", later), ("bystander", later)])
    fleet.devices.remove("cam", force=True)
    fleet.now += 120.0
    assert RollUp(fleet.database, now=lambda: fleet.now).step() == 1
    with fleet.database.read() as session:
        assert {row.device for row in session.scalars(select(DeviceBucketRow))} == {"bystander"}
        assert {row.device for row in session.scalars(select(TelemetryRow))} == {"bystander"}
        assert {row.device for row in session.scalars(select(CertificateRow))} == {"bystander", "cam"}


def test_a_device_serves_no_more_models_than_a_report_has_room_for(fleet: Fleet) -> None:
    """One more is refused and changes nothing; newer releases of those that it serves are not."""
    fleet.enrol("cam")
    limit = LIMITS.models_per_device
    for at in range(limit):
        deploy(fleet.database, fleet.director, RELEASE, f"m{at}@1", ["cam"])
    with pytest.raises(Conflict, match=f"serves {limit} models already"):
        deploy(fleet.database, fleet.director, RELEASE, "one-more@1", ["cam"])
    deploy(fleet.database, fleet.director, RELEASE, "m0@1", ["cam"])
    raw = fleet.director.statements(["cam"])["cam"]
    assert len(messages.decode(messages.decode(raw, Signed).payload, Statement).releases) == limit
