"""Devices: enrolment, liveness and statements, with a manual clock."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cryptography import x509
from sqlalchemy import select, update

from edgesplit.errors import MalformedMessage, NotFound, UsageError
from edgesplit.identifiers import RESERVED, WORDS, device_name, new_device_name
from edgesplit.mqtt import messages
from edgesplit.release.manifest import Statement
from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit_controller.errors import Conflict, Unauthenticated
from edgesplit_controller.fleet import devices as devices_module
from edgesplit_controller.fleet.devices import ClaimRequest, Devices, Enrolment, public_key_sha256
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import ClaimRow, Desired, Device, Model, ReleaseRow
from edgesplit_controller.tuf.key_change import KeyChange
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.repository_signer import next_version
from edgesplit_controller.tuf.rotation import Rotation
from support.immediate_deployment import deploy

STALE_S = 10.0


class DevicesHarness:
    """Devices and a director on one folder, with a clock that is set by hand."""

    def __init__(self, folder: Path, database_url: str, **limits: int) -> None:
        self.folder = folder
        self.now = 1_000_000.0
        self.database = Database(database_url)
        self.devices = Devices(self.database, stale_after_s=STALE_S, now=lambda: self.now, **limits)
        self.signed: list[Statement] = []
        self.director = Director(self.database, self._sign, statement_s=1_000, now=lambda: self.now)
        self.authority = Authority(folder / "keys")

    def _sign(self, statement: Statement) -> bytes:
        self.signed.append(statement)
        return f"{statement.device} {statement.counter}".encode()

    def csr(self, key: str) -> bytes:
        """A request by the key of that name."""
        return certificate_request(load_or_make_key(self.folder / f"{key}.key"), "anything")

    def enrol(self, name: str = "cam", key: str = "key", **more: object) -> Enrolment:
        """A device that was claimed and has enrolled."""
        token, _ = self.devices.claim(ClaimRequest(device=name, device_class="raspberrypi4", **more))  # type: ignore[arg-type]
        return self.devices.enrol(token, self.csr(key), self.authority.sign_request)

    def hear(self, message: messages.Message, name: str = "cam") -> str:
        """The device says this; its state then."""
        self.devices.ingest([(name, message)])
        return self.devices.state(self.devices.get(name))

    def release(self, digest: str) -> None:
        """A release that is known."""
        with self.database.write() as session:
            model = Model(
                name="m", version=int(digest, 16), sha256="", optimised_sha256="", bytes=0, input_text="", bindings={},
                shown={}, created=0.0,
            )  # fmt: skip
            session.add(model)
            session.flush()
            session.add(ReleaseRow(digest=digest, model_id=model.id, created=0.0, options={}))


@pytest.fixture
def bench(tmp_path: Path, database_url: str) -> DevicesHarness:
    return DevicesHarness(tmp_path, database_url)


def birth(session: int, start: str = "", certificate: int | str = "") -> messages.Birth:
    return messages.Birth(
        session,
        0.5,
        "1",
        "raspberrypi4",
        True,
        "http://127.0.0.1:8600",
        start_id=start,
        certificate_serial=str(certificate),
    )


def telemetry(session: int, sequence: int = 1) -> messages.Telemetry:
    return messages.Telemetry(
        session=session, sequence=sequence, emulated=True, up_bytes_per_s=1e6, rtt_s=0.01, remote_usable=True, models=()
    )


def test_a_dead_device_is_never_listed_as_online(bench: DevicesHarness) -> None:
    """The state after each message, with older sessions and redelivered messages among them."""
    bench.enrol()
    assert bench.devices.state(bench.devices.get("cam")) == "offline"
    story: list[tuple[float, messages.Message, str]] = [
        (0, birth(5), "online"),
        (8, telemetry(5), "online"),
        (8, birth(5), "online"),
        (STALE_S + 1, birth(5), "stale"),  # the broker's retained copy revives nobody
        (0, messages.Death(4), "stale"),  # an older session's death says nothing of this one
        (0, telemetry(4), "stale"),
        (0, telemetry(5), "stale"),  # nor does a message that came before
        (0, telemetry(5, 2), "online"),
        (0, messages.Death(5), "offline"),
        (0, birth(5), "offline"),
        (0, birth(6), "online"),
        (0, messages.Death(5), "online"),
        (0, messages.Reported(6, 1, ()), "online"),
        (3 * STALE_S, messages.Reported(6, 1, ()), "stale"),
        (0, messages.FetchMetadata("metadata/timestamp.json"), "online"),
    ]
    for step, (seconds, message, state) in enumerate(story):
        bench.now += seconds
        assert bench.hear(message) == state, f"step {step}: {message}"


def test_messages_of_unknown_and_revoked_devices_are_ignored(bench: DevicesHarness) -> None:
    """They change nothing, and messages of other devices in the same batch are handled."""
    bench.enrol()
    bench.devices.ingest([("stranger", birth(1)), ("cam", birth(1))])
    assert bench.devices.state(bench.devices.get("cam")) == "online"
    bench.devices.revoke("cam")
    assert bench.hear(birth(2)) == "revoked"
    with pytest.raises(NotFound):
        bench.devices.get("stranger")


@pytest.mark.parametrize("name", sorted(WORDS))
def test_a_word_of_the_commands_is_refused_as_device_name(bench: DevicesHarness, name: str) -> None:
    """At the claim, and at the enrolment by a claim that an older version made: `edgectl device gateway cam none` would
    mean either. A device that has the name from before can still renew and be sent statements."""
    with pytest.raises(UsageError, match="word of the commands"):
        bench.devices.claim(ClaimRequest(device=name, device_class="raspberrypi4"))
    token, _ = bench.devices.claim(ClaimRequest(device="cam", device_class="raspberrypi4"))
    with bench.database.write() as session:
        session.execute(update(ClaimRow).values(device=name))
    with pytest.raises(UsageError, match="word of the commands"):
        bench.devices.enrol(token, bench.csr("key"), bench.authority.sign_request)
    assert device_name(name) == name
    for other in ("none-1", "cam-none"):
        assert new_device_name(other) == other
    for reserved in sorted(RESERVED):
        with pytest.raises(UsageError, match="not a device name"):
            new_device_name(reserved)


def test_a_claim_token_is_valid_once_for_one_key_until_expiry(bench: DevicesHarness) -> None:
    """A wrong token, one used with another key and an expired one get the same answer."""
    token, expires = bench.devices.claim(ClaimRequest(device="cam", device_class="raspberrypi4", expires_s=100))
    assert expires == bench.now + 100
    texts = set()
    first = bench.devices.enrol(token, bench.csr("a"), bench.authority.sign_request)
    again = bench.devices.enrol(token, bench.csr("a"), bench.authority.sign_request)
    assert (first.device, first.fresh, again.fresh) == ("cam", True, False)
    for wrong, key, later in ((token, "b", 0), ("guess", "a", 0), (token, "a", 100)):
        bench.now += later
        with pytest.raises(Unauthenticated) as refused:
            bench.devices.enrol(wrong, bench.csr(key), bench.authority.sign_request)
        texts.add(str(refused.value))
    assert len(texts) == 1
    with bench.database.read() as session:
        assert token not in str([row.__dict__ for row in session.query(devices_module.ClaimRow)])


def test_a_new_key_begins_new_sessions_but_never_lowers_the_counter(bench: DevicesHarness) -> None:
    """A device whose card was replaced counts its sessions from one; its statements' counter still only grows."""
    bench.enrol()
    bench.release("a1")
    deploy(bench.database, bench.director, "a1", "m@1", ["cam"])
    bench.hear(birth(57))
    counter = bench.devices.get("cam").counter

    assert bench.enrol(key="other", replace=True).fresh

    assert bench.hear(birth(1)) == "online"
    assert bench.devices.get("cam").counter == counter


def test_claiming_an_enrolled_name_needs_replace(bench: DevicesHarness) -> None:
    """A name is free again once its device is revoked."""
    bench.enrol()
    with pytest.raises(Conflict, match="`--replace`"):
        bench.devices.claim(ClaimRequest(device="cam", device_class="raspberrypi3b+"))
    assert bench.devices.get("cam").device_class == "raspberrypi4"
    bench.devices.revoke("cam")
    assert bench.enrol(key="other").fresh


def test_the_first_claim_used_voids_others_for_the_name(bench: DevicesHarness) -> None:
    """A leaked second claim cannot take the name from the enrolled device."""
    wish = ClaimRequest(device="cam", device_class="raspberrypi4")
    first, second = (bench.devices.claim(wish)[0] for _ in range(2))
    bench.devices.enrol(first, bench.csr("a"), bench.authority.sign_request)
    with pytest.raises(Unauthenticated):
        bench.devices.enrol(second, bench.csr("b"), bench.authority.sign_request)


def test_the_certificate_of_replaced_hardware_is_revoked(bench: DevicesHarness) -> None:
    """It is on the revocation list from the moment the replacement enrols, and not before."""
    old = serial_of(bench.enrol())
    token, _ = bench.devices.claim(ClaimRequest(device="cam", device_class="raspberrypi4", replace=True))
    assert bench.devices.revoked_serials() == []
    assert bench.devices.enrol(token, bench.csr("other"), bench.authority.sign_request).replaced
    assert bench.devices.revoked_serials() == [old]


def test_messages_of_a_revoked_device_end_its_session(bench: DevicesHarness) -> None:
    """The session outlived the revocation and is closed; the broker's last will for it is no sign of life."""
    serial = serial_of(bench.enrol())
    bench.devices.revoke("cam")
    assert bench.devices.revoked_serials() == [serial]
    assert bench.devices.ingest([("cam", messages.Death(3))]).intruders == frozenset()
    assert bench.devices.ingest([("cam", telemetry(3))]).intruders == {"cam"}


def renewed(bench: DevicesHarness, old: Enrolment, key: str) -> Enrolment:
    certificate = bench.authority.parse_device_certificate(old.certificate)
    return bench.devices.renew(certificate, bench.csr(key), bench.authority.sign_request)


def test_a_renewed_certificate_takes_over_on_first_use(bench: DevicesHarness) -> None:
    """Until then both are valid: if the answer was lost, the device asks again with the old key."""
    first = bench.enrol()
    lost = renewed(bench, first, "lost")
    second = renewed(bench, first, "next")
    assert bench.devices.revoked_serials() == []
    assert bench.devices.ingest([("cam", birth(1, certificate=serial_of(first)))]).superseded is False
    assert bench.devices.ingest([("cam", birth(2, certificate=serial_of(second)))]).superseded
    assert sorted(bench.devices.revoked_serials()) == sorted([serial_of(first), serial_of(lost)])
    with pytest.raises(Unauthenticated, match="revoked"):
        renewed(bench, first, "thief")
    assert renewed(bench, second, "third").device == "cam"


def test_a_revoked_device_cannot_renew_its_certificate(bench: DevicesHarness) -> None:
    """Neither can a device with an unknown certificate."""
    first = bench.enrol()
    bench.devices.revoke("cam")
    with pytest.raises(Unauthenticated, match="revoked"):
        renewed(bench, first, "next")
    stranger = Authority(bench.folder / "other").sign_request(bench.csr("key"), "cam")
    with pytest.raises(MalformedMessage, match="not a certificate of this authority"):
        bench.authority.parse_device_certificate(stranger)


def copied_at(bench: DevicesHarness) -> float | None:
    with bench.database.read() as session:
        return session.get_one(devices_module.AgentStartsRow, "cam").copied


def test_a_cloned_device_is_detected(bench: DevicesHarness) -> None:
    """Two agents that alternate under one name; one agent that reconnects or restarts is no clone."""
    bench.enrol()
    for number, mark in enumerate(["a", "a", "b", "b", "c", "d"], start=1):
        bench.hear(birth(number, start=mark))
    assert copied_at(bench) is None
    bench.hear(birth(7, start="c"))
    assert copied_at(bench) == bench.now


def serial_of(enrolment: Enrolment) -> int:
    return int(x509.load_pem_x509_certificate(enrolment.certificate).serial_number)


def test_an_invalid_certificate_request_is_malformed() -> None:
    """Neither plain text nor another PEM is a certificate request."""
    for raw in (b"", b"hello", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"):
        with pytest.raises(MalformedMessage):
            public_key_sha256(raw)


@pytest.mark.parametrize(
    "wish",
    [
        ClaimRequest(device="Cam", device_class="x"),
        ClaimRequest(device="controller", device_class="x"),
        ClaimRequest(device="cam", device_class="x", expires_s=0),
        ClaimRequest(device="cam", device_class="x", expires_s=10**9),
        ClaimRequest(device="cam", device_class="x", group="a b"),
        ClaimRequest(device="cam", device_class="x", labels={"group": "a"}),
    ],
    ids=str,
)
def test_an_invalid_claim_is_refused(bench: DevicesHarness, wish: ClaimRequest) -> None:
    """Names that are topics, groups that cannot be typed again, lifetimes out of bounds."""
    with pytest.raises(UsageError):
        bench.devices.claim(wish)


def test_targets_are_names_groups_labels_or_all(bench: DevicesHarness) -> None:
    """Each device is selected once; an unknown name suggests similar ones."""
    bench.enrol("cam-1", group="door", labels={"site": "north"})
    bench.enrol("cam-2", key="k2", group="door")
    bench.enrol("cam-3", key="k3", labels={"site": "north"})

    def meant(*targets: str) -> list[str]:
        return [device.name for device in bench.devices.select(targets)]

    assert meant("cam-1") == ["cam-1"]
    assert meant("group=door", "cam-1") == ["cam-1", "cam-2"]
    assert meant("site=north") == ["cam-1", "cam-3"]
    assert meant("all") == ["cam-1", "cam-2", "cam-3"]
    for wrong, hint in (("cam-9", "cam-1"), ("group=dor", "door"), ("site=nort", "site=north")):
        with pytest.raises(NotFound, match=hint):
            meant(wrong)
    bench.devices.revoke("cam-2")
    assert meant("group=door") == ["cam-1"]
    with pytest.raises(Conflict):
        bench.devices.revoke("cam-2")


def test_telemetry_history_is_bounded(tmp_path: Path, database_url: str) -> None:
    """The oldest rows are deleted, so that no device fills the disk."""
    bench = DevicesHarness(tmp_path, database_url, max_telemetry_rows=50, trim_every=20)
    bench.enrol()
    bench.hear(birth(1))
    bench.devices.ingest([("cam", telemetry(1, sequence)) for sequence in range(95)])
    bench.devices.ingest([("cam", telemetry(1, 95))])
    kept = [message["sequence"] for message in bench.devices.history("cam")]
    assert kept[-1] == 95 and 50 <= len(kept) < 50 + 20
    assert [message["sequence"] for message in bench.devices.history("cam", newest=2)] == [94, 95]


def test_counters_only_grow_and_follow_the_clock() -> None:
    """A restored backup cannot command backwards, nor can a clock that was set back."""
    assert next_version(0, 1_000.9) == 1_000
    assert next_version(1_000, 1_000.9) == 1_001
    assert next_version(5_000, 1_000.0) == 5_001


def test_a_statement_lists_every_desired_release(bench: DevicesHarness) -> None:
    """Deployments of several models are combined; a newer one of the same model replaces the older, each under a higher
    counter."""
    bench.enrol()
    for digest in ("a1", "b2", "c3"):
        bench.release(digest)
    for digest, model in (("a1", "digits@1"), ("b2", "faces@1"), ("c3", "digits@2")):
        deploy(bench.database, bench.director, digest, model, ["cam"])
    told = [{release.model: release.release for release in statement.releases} for statement in bench.signed]
    assert told == [{"digits": "a1"}, {"digits": "a1", "faces": "b2"}, {"digits": "c3", "faces": "b2"}]
    counters = [statement.counter for statement in bench.signed]
    assert counters == sorted(set(counters)) and counters[0] >= bench.now
    assert bench.director.statements(None) == {"cam": f"cam {counters[-1]}".encode()}
    assert bench.director.statements(["other"]) == {}


def test_an_urgent_deployment_is_marked_in_the_statement(bench: DevicesHarness) -> None:
    """`--now` is part of the signed statement, for that release only."""
    bench.enrol()
    for digest in ("a1", "b1", "b2"):
        bench.release(digest)
    deploy(bench.database, bench.director, "a1", "m@1", ["cam"])
    deploy(bench.database, bench.director, "b1", "n@1", ["cam"], now=True)
    assert [(release.model, release.fetch_now) for release in bench.signed[-1].releases] == [("m", False), ("n", True)]
    deploy(bench.database, bench.director, "b2", "n@2", ["cam"], now=False)
    assert not any(release.fetch_now for release in bench.signed[-1].releases)


def test_statements_are_renewed_at_half_their_lifetime(bench: DevicesHarness) -> None:
    """Statements of a fleet without deployments stay valid."""
    bench.enrol()
    bench.release("a1")
    deploy(bench.database, bench.director, "a1", "m@1", ["cam"])
    bench.now += 499
    assert bench.director.renew() == []
    bench.now += 2
    assert bench.director.renew() == ["cam"]
    assert bench.signed[-1].expires == bench.now + 1_000 and bench.signed[-1].releases == bench.signed[0].releases


def test_statements_are_reissued_when_the_director_key_changes(bench: DevicesHarness, tmp_path: Path) -> None:
    """With the same releases and a higher counter; after an interruption, only those that the present key did not
    sign."""
    bench.enrol()
    bench.enrol("other", key="k2")
    bench.release("a1")
    repository = Repository(tmp_path / "tuf", now=lambda: bench.now)
    director = Director(bench.database, repository.sign_statement, statement_s=1_000, now=lambda: bench.now)
    deploy(bench.database, director, "a1", "m@1", ["cam", "other"])
    before = director.statements(None)

    assert director.resign_all() == ["cam", "other"]
    assert all(director.statements(None)[name] != before[name] for name in before)
    assert director.resign_all(signed_by=repository.delegated_keys("director")) == []
    assert Rotation(repository).change(KeyChange(anew=("director",)))
    assert director.resign_all(signed_by=repository.delegated_keys("director")) == ["cam", "other"]
    assert director.resign_all(signed_by=repository.delegated_keys("director")) == []


def test_a_revoked_device_gets_no_statement_and_no_deployment(bench: DevicesHarness) -> None:
    """Its statement is withdrawn, and a deployment that names it is refused as a whole."""
    bench.enrol()
    bench.enrol("other", key="k2")
    bench.release("a1")
    deploy(bench.database, bench.director, "a1", "m@1", ["cam"])
    bench.devices.revoke("cam")
    assert bench.director.statements(None) == {"cam": b""}
    with pytest.raises(Conflict):
        deploy(bench.database, bench.director, "a1", "m@1", ["cam", "other"])
    with bench.database.read() as session:
        assert not session.scalars(select(Desired)).all()
    assert len(bench.director.deployments()) == 1


def test_a_failed_write_is_rolled_back(bench: DevicesHarness) -> None:
    """No half of a transaction is stored."""
    with pytest.raises(RuntimeError), bench.database.write() as session:
        session.add(
            Device(
                name="half",
                device_class="",
                group="",
                labels={},
                link="",
                certificate_serial="",
                public_key_sha256="",
                enrolled=0.0,
            )
        )
        session.flush()
        raise RuntimeError
    with pytest.raises(NotFound):
        bench.devices.get("half")


def test_a_claimed_device_is_listed_before_it_enrols(bench: DevicesHarness) -> None:
    """A deployment to it reports that it has not enrolled, not that it is unknown."""
    bench.devices.claim(ClaimRequest(device="cam", device_class="raspberrypi4"))
    found = bench.devices.open_claim("cam")
    assert found is not None and found.device == "cam"
    assert bench.devices.open_claim("other") is None
    with pytest.raises(Conflict, match="cam has not enrolled yet"):
        bench.devices.select(["cam"])
    for about in (bench.devices.get, bench.devices.revoke, bench.devices.history):
        with pytest.raises(Conflict, match=r"cam has not enrolled yet.*edgectl device remove cam"):
            about("cam")
    with pytest.raises(NotFound, match="no device 'cam'"):
        bench.devices.scoped_to(frozenset({"shop"})).get("cam")
    bench.enrol("cam")
    assert bench.devices.open_claim("cam") is None
    assert [device.name for device in bench.devices.select(["cam"])] == ["cam"]


def test_safe_mode_and_refused_statements_are_listed(bench: DevicesHarness) -> None:
    """The device list marks devices without a running model, the device's page gives the reason."""
    from rich.console import Console

    from edgesplit_cli.views.device import device_table
    from edgesplit_controller.fleet.device_view import device_to_dict
    from edgesplit_controller.fleet.listing import Listing

    bench.enrol()
    state = messages.ModelState("m", "", "a" * 64, "safe mode", "3 starts in a row were not found healthy")
    bench.hear(messages.Birth(5, 1.0, "1", "raspberrypi4", False, ""))
    bench.hear(messages.Reported(5, 7, (state,), "3 starts in a row were not found healthy", "it has expired"))
    listing = Listing(bench.database, stale_after_s=STALE_S, now=lambda: bench.now)
    device = bench.devices.get("cam")
    shown = device_to_dict(device, "online", listing.page_of_device(device), bench.now)
    assert (
        shown["safe_mode"] == "3 starts in a row were not found healthy"
        and shown["statement_problem"] == "it has expired"
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(device_table([shown]))
    assert "online safe mode" in console.export_text()


def last_flood(bench: DevicesHarness) -> devices_module.FloodRow:
    with bench.database.read() as session:
        return session.get_one(devices_module.FloodRow, "cam")


def test_a_flooding_device_is_blocked_and_readmitted(bench: DevicesHarness) -> None:
    """Its certificate is listed as revoked for a minute, the next time for two; other devices are unaffected."""
    serial = x509.load_pem_x509_certificate(bench.enrol().certificate).serial_number
    bench.enrol("other", "other-key")
    for times, held_s in ((1, 60), (2, 120)):
        assert bench.devices.quarantine("cam", 7) and bench.devices.quarantine("cam", 8)  # told twice of one flood
        assert bench.devices.revoked_serials() == [serial] and bench.devices.release_quarantined() == []
        flood = last_flood(bench)
        assert (flood.times, flood.dropped, flood.held_until) == (times, 8, bench.now + held_s)
        bench.now += held_s
        assert bench.devices.release_quarantined() == ["cam"] and bench.devices.release_quarantined() == []
        assert bench.devices.revoked_serials() == []
    assert bench.devices.state(bench.devices.get("cam")) == "offline"
    bench.now += devices_module.FLOOD_RESET_S + 1
    assert bench.devices.quarantine("cam", 0) and last_flood(bench).times == 1


def test_only_devices_are_blocked_for_flooding(bench: DevicesHarness) -> None:
    """The controller's own session is never closed, and a revoked device is not listed twice."""
    bench.enrol()
    bench.devices.revoke("cam")
    assert not bench.devices.quarantine("controller", 1) and not bench.devices.quarantine("cam", 1)
