"""Revocation, replacement and renewal against a real controller and broker: what was taken away is gone at once."""

from __future__ import annotations

import json
import queue
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest
from cryptography import x509

from edgesplit.client.client import Connection, Reply
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import LinkError, TrustError, UsageError
from edgesplit.mqtt import messages
from edgesplit.mqtt.session import Session
from edgesplit.trust.identity import (
    Renewal,
    certificate_request,
    decode_claim,
    encode_document,
    enrolment_context,
    load_or_make_key,
    renewal_text,
)
from edgesplit_agent.control import certificate_renewal
from edgesplit_agent.control.enrolment import credentials, enrol
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_controller.messaging.broker import CONTROLLERS, Broker
from edgesplit_controller.pki import authority as ca
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.revocation import Revocations
from edgesplit_controller.pki.revocation_hook import RevocationCommand
from edgesplit_offload.revocation import RevokedSerials
from edgesplit_offload.server import OffloadServer
from support.controller_process import PATIENCE_S, Device, Up, enrolled, eventually
from support.edgesplit_processes import Cloud, frame_input, frames
from support.handmade_release import HandmadeRelease
from support.mosquitto import HOSTS


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("controller") / "data")
    assert running.start() == "ready"
    yield running
    running.end()


def gone(device: Device) -> bool:
    return not device.session.connected


def test_a_revoked_devices_session_ends_and_none_follows(up: Up, tmp_path: Path) -> None:
    """The living session is thrown off, the certificate opens no other, and others notice nothing."""
    victim, bystander = enrolled(up, "pi-stolen", tmp_path), enrolled(up, "pi-next", tmp_path)
    victim.vanish_on_loss()
    began = monotonic()
    up.ok("DELETE", "/v1/devices/pi-stolen")
    eventually("the end of the session", lambda: gone(victim))
    print(f"cut off {monotonic() - began:.3f} s after the operator asked for it (the promise is 5 s)")
    with pytest.raises(LinkError):
        victim.again().connect_or_raise()
    assert bystander.session.connected
    bystander.session.stop()


def retained(up: Up, name: str, sentinel: Device) -> set[str]:
    """The kinds of messages that the broker retains for a device. `sentinel` is one whose birth is retained."""
    heard: queue.Queue[tuple[str, bytes]] = queue.Queue()
    credentials = Authority(up.data / "keys").issue_client(CONTROLLERS[-1])
    watcher = Session(
        *sentinel.address, CONTROLLERS[-1], credentials.client_context(),
        on_message=lambda topic, payload, _correlation: heard.put((topic, payload)),
    )  # fmt: skip
    kinds: tuple[messages.TopicKind, ...] = ("birth", "reported", "desired")
    last = messages.topic(sentinel.name, "birth")
    watcher.subscribe([*(messages.topic(name, kind) for kind in kinds), last], qos=1)
    watcher.start()
    found: set[str] = set()
    try:
        while (entry := heard.get(timeout=PATIENCE_S))[0] != last:
            if entry[1]:
                found.add(entry[0].rpartition("/")[2])
    finally:
        watcher.stop()
    return found


def test_nothing_of_a_removed_device_stays_and_its_name_is_free(up: Up, tmp_path: Path) -> None:
    """The living session ends, its certificate opens no other, the broker retains nothing under its name, and another
    device takes the name."""
    device, bystander = enrolled(up, "pi-gone", tmp_path), enrolled(up, "pi-stays", tmp_path)
    device.vanish_on_loss()
    device.say("reported", messages.Reported(device.number, 0, ()), qos=1, retain=True)
    assert {"birth", "reported"} <= retained(up, "pi-gone", bystander)
    status, answer = up.call("DELETE", "/v1/devices/pi-gone/record")
    assert status == 409 and "--force" in answer["error"] and device.session.connected
    assert up.ok("DELETE", "/v1/devices/pi-gone/record?force=true")["state"] == "removed"
    eventually("the end of the session", lambda: gone(device))
    with pytest.raises(LinkError):
        device.again().connect_or_raise()
    assert up.call("GET", "/v1/devices/pi-gone")[0] == 404 and bystander.session.connected
    assert "pi-gone" not in [row["name"] for row in up.ok("GET", "/v1/views/fleet")["devices"]]
    assert up.ok("GET", "/v1/views/fleet?name=pi-gone")["devices"] == []
    audited = [line for line in up.ok("GET", "/v1/audit?newest=50") if "pi-gone" in str(line)]
    assert any(line["what"] == "DELETE /v1/devices/{name}/record" for line in audited)
    eventually("the clearing of its topics", lambda: not retained(up, "pi-gone", bystander))
    second = enrolled(up, "pi-gone", tmp_path / "second")
    assert second.session.connected and not up.ok("GET", "/v1/devices/pi-gone")["models"]
    second.session.stop()
    bystander.session.stop()


def test_a_revocation_outlives_the_controller(tmp_path: Path) -> None:
    """After a restart, of broker and all, the list is in force from the first connection on."""
    own = Up(tmp_path / "data")
    assert own.start() == "ready"
    device, other = enrolled(own, "cam-1", tmp_path), enrolled(own, "cam-2", tmp_path)
    own.ok("DELETE", "/v1/devices/cam-1")
    own.end()
    assert own.start() == "ready"
    eventually("the other's return", lambda: other.session.connected)
    with pytest.raises(LinkError):
        device.again().connect_or_raise()
    for one in (device, other):
        one.session.stop()
    own.end()


def test_replaced_hardware_is_disconnected_when_the_new_one_enrols(up: Up, tmp_path: Path) -> None:
    """A claim without --replace is refused and changes nothing."""
    old = enrolled(up, "pi-door", tmp_path)
    body = {"device": "pi-door", "device_class": "raspberrypi3b+"}
    status, answer = up.call("POST", "/v1/devices/claims", body)
    assert status == 409 and "--replace" in answer["error"]
    assert up.ok("GET", "/v1/devices/pi-door")["device_class"] == "raspberrypi4"
    old.vanish_on_loss()
    claim = up.ok("POST", "/v1/devices/claims", {**body, "replace": True})
    assert old.session.connected
    new = Device(up, claim, tmp_path / "new")
    eventually("the end of the old one's session", lambda: gone(old))
    with pytest.raises(LinkError):
        old.again().connect_or_raise()
    new.connect()
    new.session.stop()


def test_two_devices_of_one_identity_are_reported(up: Up, tmp_path: Path) -> None:
    """They throw each other off; the controller says so of the device, and in its events."""
    first = enrolled(up, "pi-copy", tmp_path, start="one")
    second = first.again(start="two")
    for number, card in ((2, second), (3, first.again(start="one"))):
        card.number = number
        card.connect()
    told = eventually("the copy", lambda: up.ok("GET", "/v1/devices/pi-copy")["copied"])
    assert told > 0
    assert "device.copied" in [event["action"] for event in up.ok("GET", "/v1/events")]


# Offload server: by request, for a connection may outlive the right


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "keys")


def test_an_open_offload_connection_is_refused_after_revocation(authority: Authority, tmp_path: Path) -> None:
    """Answered until the list changes, and 403 from then on, on the same connection; others are served."""
    listed = tmp_path / "revoked.pem"
    listed.write_bytes(authority.revocation_list([]))
    server = OffloadServer(
        Path("unused"),
        b"",
        open_release=HandmadeRelease(tmp_path).open,
        tls=authority.issue_server("offload", ["127.0.0.1"]).server_context(),
        revoked=RevokedSerials(listed, authority.certificate_file, look_every_s=0.0),
    )
    server.start()
    thief, honest = (authority.issue_client(name) for name in ("cam-1", "cam-2"))
    with (
        closing(Connection("127.0.0.1", server.port, thief.client_context())) as first,
        closing(Connection("127.0.0.1", server.port, honest.client_context())) as second,
    ):
        assert ready(first).status == 200
        serial = x509.load_pem_x509_certificate(thief.certificate_file.read_bytes()).serial_number
        listed.write_bytes(authority.revocation_list([serial]))
        eventually("the refusal", lambda: ready(first).status == 403)
        assert ready(second).status == 200
        listed.write_bytes(Authority(tmp_path / "other").revocation_list([]))
        assert ready(first).status == 403  # a list of somebody else's gives nothing back
    server.stop(1.0)


def ready(connection: Connection) -> Reply:
    return connection.exchange("GET", "/v2/health/ready", deadline=monotonic() + PATIENCE_S)


def test_an_offload_server_does_not_start_with_an_invalid_revocation_list(authority: Authority, tmp_path: Path) -> None:
    """Missing, garbage, another authority's."""
    listed = tmp_path / "revoked.pem"
    with pytest.raises(UsageError, match="cannot read the revocation list"):
        RevokedSerials(listed, authority.certificate_file)
    for raw in (b"", b"hello", Authority(tmp_path / "other").revocation_list([1])):
        listed.write_bytes(raw)
        with pytest.raises(TrustError):
            RevokedSerials(listed, authority.certificate_file)


# Renewal


def agent_folder(up: Up, name: str, path: Path) -> tuple[DataFolder, Identity]:
    claim = up.ok("POST", "/v1/devices/claims", {"device": name, "device_class": "raspberrypi4"})
    folder = DataFolder(path)
    path.mkdir()
    return folder, enrol(folder, decode_claim(json.dumps(claim).encode()))


def test_a_renewed_pair_is_used_and_the_old_one_ends_when_it_is_seen(up: Up, tmp_path: Path) -> None:
    """One file changes, and nothing of the trial stays."""
    folder, identity = agent_folder(up, "pi-renew", tmp_path / "agent")
    before = certificate_renewal.certificate_in_use(folder)
    certificate_renewal.renew(folder, identity)
    after = certificate_renewal.certificate_in_use(folder)
    assert before.serial_number != after.serial_number and before.public_key() != after.public_key()
    assert folder.renewed_file.stat().st_mode & 0o777 == 0o600
    assert not list(folder.identity.glob("*trial*"))
    credentials(folder).client_context()
    assert "device.renewed" in [event["action"] for event in up.ok("GET", "/v1/events")]


def test_a_power_cut_while_renewing_leaves_a_pair_that_works(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost, or the disk fills: the old pair is in use, and the next try succeeds."""
    folder, identity = agent_folder(up, "pi-cut", tmp_path / "agent")
    before = certificate_renewal.certificate_in_use(folder)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(certificate_renewal, "write_durably", full)
        with pytest.raises(OSError, match="No space"):
            certificate_renewal.renew(folder, identity)
    assert certificate_renewal.certificate_in_use(folder) == before
    certificate_renewal.renew(folder, identity)
    assert certificate_renewal.certificate_in_use(folder) != before


def forged(what: str) -> Callable[[Renewal, Any], Renewal]:
    def change(good: Renewal, other_csr: str) -> Renewal:
        changed = {
            "request": {"csr_pem": other_csr},
            "signature": {"signature": b"\0" * 64},
            "certificate": {"certificate_pem": good.certificate_pem[:-80]},
        }[what]
        return Renewal(
            **{
                "certificate_pem": good.certificate_pem,
                "csr_pem": good.csr_pem,
                "signature": good.signature,
                **changed,
            }  # type: ignore[arg-type]
        )

    return change


@pytest.mark.parametrize(("what", "status"), [("request", 401), ("signature", 401), ("certificate", 400)])
def test_a_renewal_that_its_old_key_did_not_sign_is_refused(up: Up, tmp_path: Path, what: str, status: int) -> None:
    """Another key's request under a good signature, no signature, half a certificate."""
    folder, identity = agent_folder(up, f"pi-{what}", tmp_path / "agent")
    held = credentials(folder)
    csr_pem = certificate_request(load_or_make_key(tmp_path / "new.key"), identity.device).decode()
    thief = certificate_request(load_or_make_key(tmp_path / "thief.key"), identity.device).decode()
    signature = load_or_make_key(held.key_file).sign(renewal_text(csr_pem))
    good = Renewal(certificate_pem=held.certificate_file.read_text(), csr_pem=csr_pem, signature=signature)
    bad = forged(what)(good, thief)
    assert up.call("POST", "/v1/renew", json.loads(encode_document(bad)), token=None, as_=held)[0] == status
    assert up.call("POST", "/v1/renew", json.loads(encode_document(good)), token=None, as_=held)[0] == 200


def test_a_renewal_comes_over_a_connection_that_shows_the_certificate(up: Up, tmp_path: Path) -> None:
    """A good signature is not enough while the certificate makes connections: none shown, or another's, is refused."""
    folder, identity = agent_folder(up, "pi-shown", tmp_path / "agent")
    other, _ = agent_folder(up, "pi-other", tmp_path / "other")
    held = credentials(folder)
    csr_pem = certificate_request(load_or_make_key(tmp_path / "new.key"), identity.device).decode()
    signature = load_or_make_key(held.key_file).sign(renewal_text(csr_pem))
    good = Renewal(certificate_pem=held.certificate_file.read_text(), csr_pem=csr_pem, signature=signature)
    for shown in (None, credentials(other)):
        status, answer = up.call("POST", "/v1/renew", json.loads(encode_document(good)), token=None, as_=shown)
        assert status == 401 and "over a connection that presents it" in answer["error"]


def test_the_operators_token_alone_opens_nothing(up: Up, tmp_path: Path) -> None:
    """Who copied the token has no certificate; a device's certificate is not the operator's."""
    folder, _ = agent_folder(up, "pi-nosy", tmp_path / "agent")
    token = (up.data / "operator.token").read_text().strip()
    for shown, said in ((credentials(folder), "'pi-nosy' was shown"), (None, "none was shown")):
        tls = shown.client_context() if shown else enrolment_context((up.data / "ca.pem").read_text())
        with pytest.raises(UsageError, match=said):
            ControllerClient(up.addresses["api_url"], token, tls).get("/v1/devices")


def test_a_device_that_was_away_for_longer_than_its_certificate_comes_back(up: Up, tmp_path: Path) -> None:
    """An expired certificate makes no connection, and yet renews itself."""
    folder, identity = agent_folder(up, "pi-away", tmp_path / "agent")
    expire(up.data, folder)
    ends = certificate_renewal.certificate_in_use(folder).not_valid_after_utc.timestamp()
    assert certificate_renewal.due_in_s(0, ends, ends + 1) == 0
    certificate_renewal.renew(folder, identity)
    assert certificate_renewal.certificate_in_use(folder).not_valid_after_utc.timestamp() > ends


def expire(data: Path, folder: DataFolder, device: str = "pi-away") -> None:
    """Give the device an expired certificate, as the authority would have issued it long ago, and have it known."""
    authority = ca.Authority(data / "keys")
    key = load_or_make_key(folder.key_file)
    old = authority._leaf(device, key.public_key(), ca.ExtendedKeyUsageOID.CLIENT_AUTH, None, life=timedelta(hours=-1))
    folder.certificate_file.write_bytes(old.public_bytes(ca.Encoding.PEM))
    with closing(sqlite3.connect(data / "controller.db")) as database:
        database.execute("UPDATE certificates SET serial = ? WHERE device = ?", (str(old.serial_number), device))
        database.execute("UPDATE devices SET certificate_serial = ? WHERE name = ?", (str(old.serial_number), device))
        database.commit()


def test_a_device_comes_back_from_long_absence_offloads_and_is_cut_off(tmp_path: Path) -> None:
    """The real agent: its certificate ran out while it was off. It renews it, offloads with the new one, and after it
    is revoked it still answers, alone, and the controller hears no more of it."""
    cloud = Cloud(tmp_path / "world")
    cloud.start()
    try:
        cloud.push_digits()
        agent = cloud.agent("pi-long", link="100mbit/1ms")
        cloud.edgectl("deploy", "digits", "--to", "pi-long", "--partition", "cloud", "--wait", "60")
        agent.process.stop()
        expire(cloud.data, DataFolder(agent.data), "pi-long")
        agent.start()
        (jpeg, _), *_ = frames(1)
        given = frame_input(jpeg)
        eventually("an offloaded answer", lambda: agent.infer("digits", given).report.row == "remote")
        events = [event["action"] for event in cloud.api.get("/v1/events")]
        assert "device.renewed" in events
        cloud.edgectl("device", "revoke", "pi-long", "--yes")
        eventually("an answer without the cloud", lambda: agent.infer("digits", given).report.row != "remote")
        assert cloud.api.get("/v1/devices/pi-long")["state"] == "revoked"
    finally:
        cloud.stop()


@pytest.mark.parametrize(
    ("now", "left_s"), [(0.0, 200.0), (199.0, 1.0), (200.0, 0.0), (500.0, 0.0)], ids=["new", "soon", "due", "expired"]
)
def test_a_certificate_is_renewed_at_two_thirds_of_its_life(now: float, left_s: float) -> None:
    """And at once when it is past that."""
    assert certificate_renewal.due_in_s(0.0, 300.0, now) == pytest.approx(left_s)


def test_birth_messages_of_older_agents_are_accepted() -> None:
    """A birth without the marks of its start and certificate."""
    raw = messages.encode(messages.Birth(1, 0.1, "0.1", "raspberrypi4", False, "http://127.0.0.1:1"))
    assert messages.decode(raw, messages.Birth).start_id == ""


def test_mosquitto_refuses_everybody_by_an_expired_list(tmp_path: Path) -> None:
    """Why a broker's list lives as long as the broker's certificate: devices and controller are locked out alike, until
    a newer list comes."""
    authority = Authority(tmp_path / "keys")
    listed = tmp_path / "revoked.pem"
    listed.write_bytes(authority.revocation_list([], timedelta(hours=-1)))
    credentials = authority.issue_client(CONTROLLERS[0])
    broker = Broker(tmp_path / "broker", authority.issue_server("broker", HOSTS), 0, revoked_file=listed)

    def connects() -> bool:
        session = Session(
            "127.0.0.1", broker.port, CONTROLLERS[0], credentials.client_context(), on_message=lambda *_: None
        )
        session.start()
        try:
            return session.wait_connected(2.0)
        finally:
            session.stop()

    broker.start()
    try:
        assert not connects()
        listed.write_bytes(authority.revocation_list([], ca.BROKER_LIST_LIFE))
        broker.reload()
        eventually("a connection", connects)
    finally:
        broker.stop()


def test_an_external_brokers_list_is_renewed_by_the_command(tmp_path: Path) -> None:
    """`--on-revocation` runs for a renewed list as for a changed one, until it succeeds, and meanwhile the controller
    knows why the broker may have an old one."""
    authority, delivered = Authority(tmp_path / "keys"), tmp_path / "delivered.pem"
    published, gate = tmp_path / "revoked.pem", tmp_path / "gate"
    later_s = [0.0]
    lists = Revocations(
        authority, lambda: [7], {published: ca.BROKER_LIST_LIFE}, ("127.0.0.1", 1), now=lambda: time() + later_s[0]
    )
    lists.publish()
    command = RevocationCommand(f'test -e {gate} && cp "$EDGESPLIT_CRL" {delivered}', published)
    command.start()
    lists.add_reader(command)
    try:
        eventually("the failure", lambda: command.problem)
        gate.touch()
        eventually("the first list", lambda: delivered.is_file() and not command.problem)
        first = delivered.read_bytes()
        later_s[0] = ca.BROKER_LIST_LIFE.total_seconds() / 2
        lists.publish_if_due()
        eventually("the renewed list", lambda: delivered.read_bytes() not in (b"", first))
    finally:
        command.stop()
