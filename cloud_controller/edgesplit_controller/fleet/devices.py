"""Registry of devices: claims, enrolment, certificates, revocation, removal, and ingestion of their messages. Decides a
device's identity and whether it is online; performs no network I/O.

A device is online only while its newest session was born and has not died, and while something that the broker cannot
repeat by itself (telemetry, a fetch, a new session) arrived recently. A retained message never makes a device online.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import Select, delete, select, update
from sqlalchemy.orm import Session

from edgesplit.backoff import Backoff
from edgesplit.errors import MalformedMessage, NotFound, UsageError
from edgesplit.identifiers import new_device_name
from edgesplit.mqtt import messages
from edgesplit_controller.errors import Conflict, PermissionDenied, Unauthenticated, not_found
from edgesplit_controller.fleet import ingest, removal
from edgesplit_controller.fleet.change_feed import REMOVED
from edgesplit_controller.fleet.conditions import OFFLOAD_FLOOD_S
from edgesplit_controller.fleet.ingest import IngestResult
from edgesplit_controller.fleet.selector import DeviceAttributes, Selector, parse_selector
from edgesplit_controller.storage.database import Database, lock_device, record_event
from edgesplit_controller.storage.tables.core import (
    AgentStartsRow,
    CertificateRow,
    ClaimRow,
    Desired,
    Device,
    FloodRow,
    OffloadFloodRow,
    TelemetryRow,
)

Row = TypeVar("Row", Device, ClaimRow)
State = Literal["online", "stale", "offline", "revoked", "claimed"]
CLAIM_S = 3_600
"""Default validity of a claim, in seconds."""
MAX_CLAIM_S = 30 * 86_400
"""Longest validity of a claim, in seconds."""
MAX_TELEMETRY_ROWS = 10_000
"""Telemetry messages that are kept per device, give or take `TRIM_EVERY`."""
TRIM_EVERY = 200
"""New telemetry messages of a device after which its old ones are deleted."""
ACK_INTERVAL_S = 60.0
"""Seconds between two acknowledgements of live telemetry to a device."""
MAX_STARTS = 16
"""Newest agent starts that are remembered per device."""
QUARANTINE = Backoff(first_s=60.0, longest_s=3_600.0)
"""How long a device is in quarantine for flooding, by how often it has been."""
FLOOD_RESET_S = 86_400.0
"""Seconds without flooding after which the next quarantine counts as the first."""
COPIED_EVENT_INTERVAL_S = 3_600.0
"""Seconds between two events about the same copied identity."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A claim to be made: the description of a device that is going to enrol."""

    device: str
    device_class: str
    group: str = ""
    labels: dict[str, str] = {}
    link: str = ""
    """In the notation of `edgesplit.links.parse_link`; empty: the plan specifies one, or Wi-Fi is assumed."""
    expires_s: int = CLAIM_S
    replace: bool = False
    """The name belongs to a device already and is transferred to the hardware that uses this claim."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Result of an enrolment or a renewal."""

    device: str
    certificate: bytes
    fresh: bool
    """The key is new for this name: what the broker retains under the name is from other hardware."""
    replaced: bool = False
    """The name was taken from other hardware: its certificates are revoked, and its session must end."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Result of a removal."""

    device: str
    was_enrolled: bool
    """It was a device; otherwise only a claim."""
    revoked_now: bool
    """Its certificates were valid until now: the revocation list must be published, and its session must end."""


class Devices:
    """The devices of one controller."""

    def __init__(
        self, database: Database, *, stale_after_s: float, now: Callable[[], float], telemetry_s: float | None = None,
        max_telemetry_rows: int = MAX_TELEMETRY_ROWS, trim_every: int = TRIM_EVERY,
    ) -> None:  # fmt: skip
        """`telemetry_s`: telemetry interval that devices are asked to use; None: their own default."""
        self._database = database
        self.stale_after_s = stale_after_s
        self._telemetry_s = telemetry_s
        self._max_telemetry_rows, self._trim_every = max_telemetry_rows, trim_every
        self._now = now
        self._rows_since_trim: Counter[str] = Counter()
        self._acknowledged_s: dict[str, float] = {}
        self._groups: frozenset[str] | None = None

    def scoped_to(self, groups: frozenset[str] | None) -> Devices:
        """The same devices, limited to those of these groups; None: all.

        The limit applies to what operators ask for: `claim`, `revoke`, `remove`, `get`, `all`, `select`, `history` and
        claims. Messages of devices and the controller's own work are not limited.
        """
        narrowed = copy.copy(self)
        narrowed._groups = groups
        return narrowed

    @property
    def groups(self) -> frozenset[str] | None:
        """The groups that this view is limited to; None: all."""
        return self._groups

    def is_visible(self, group: str) -> bool:
        """Whether devices of this group are visible here."""
        return self._groups is None or group in self._groups

    def claim(self, request: ClaimRequest) -> tuple[str, int]:
        """A token that enrols this device once, and the Unix time at which it expires. Only the token's hash is stored.

        Conflict if the name belongs to an enrolled device and `replace` is not set; PermissionDenied for a group that
        is not visible.
        """
        new_device_name(request.device)
        _check_labels(request.group, request.labels)
        if not 0 < request.expires_s <= MAX_CLAIM_S:
            raise UsageError(f"a claim lasts 1 to {MAX_CLAIM_S} seconds, not {request.expires_s}")
        if not self.is_visible(request.group):
            raise PermissionDenied(
                f"you may claim devices for your groups ({', '.join(sorted(self._groups or ()))}), not others"
            )
        token = secrets.token_urlsafe(32)
        now = self._now()
        expires = int(now + request.expires_s)
        with self._database.write() as session:
            enrolled = session.get(Device, request.device)
            claims = select(ClaimRow.group).where(ClaimRow.device == request.device, ClaimRow.is_open(now))
            # A revoked device of another group counts too: its history is kept under the name.
            groups = [*session.scalars(claims), *([enrolled.group] if enrolled is not None else [])]
            if not all(self.is_visible(group) for group in groups):
                raise Conflict(f"the name {request.device!r} is taken: choose another")
            if enrolled is not None and not enrolled.revoked and not request.replace:
                raise Conflict(
                    f"{request.device!r} is an enrolled device; `--replace` gives its name to other hardware and cuts"
                    f" it off, `edgectl device revoke {request.device}` only cuts it off"
                )
            session.add(
                ClaimRow(
                    token_sha256=_hash(token), device=request.device, device_class=request.device_class,
                    group=request.group, labels=dict(request.labels), link=request.link, expires=expires, used=None,
                    public_key_sha256=None,
                )
            )  # fmt: skip
            record_event(
                session, now, "operator", "device.claimed", request.device, device_class=request.device_class,
                group=request.group,
            )  # fmt: skip
        return token, expires

    def enrol(
        self, token: str, csr_pem: bytes, issue: Callable[[bytes, str], bytes], encryption_key: bytes = b""
    ) -> Enrolment:
        """Enrol a device with a certificate made by `issue(csr, name)`; Unauthenticated for an invalid token.

        `encryption_key` is the device's own, which the caller has verified; the key of hardware that had the name
        before is deleted. A request with the same token and the same key is answered again while the claim is valid,
        because the first response may have been lost.
        """
        key = public_key_sha256(csr_pem)
        now = self._now()
        with self._database.write() as session:
            claim = _usable_claim(session, token, key, now)
            new_device_name(claim.device)  # a claim that an older version made may carry a word of the commands
            lock_device(session, claim.device)
            certificate = issue(csr_pem, claim.device)
            claim.used, claim.public_key_sha256 = claim.used or now, key
            other_claims = (ClaimRow.device == claim.device, ClaimRow.used.is_(None))
            session.execute(update(ClaimRow).where(*other_claims).values(expires=0.0))
            # Certificates of the same key stay valid: this may be the repetition of a request whose response was lost.
            replaced = _revoke_certificates(session, claim.device, now, "replaced", but=key) > 0
            serial = _store_certificate(session, claim.device, certificate, key, now)
            fresh = _fill_device_row(session, claim, serial, key, now, encryption_key)
            record_event(
                session, now, claim.device, "device.enrolled", claim.device, serial=serial, public_key_sha256=key
            )
            return Enrolment(claim.device, certificate, fresh, replaced)

    def renew(self, old: x509.Certificate, csr_pem: bytes, issue: Callable[[bytes, str], bytes]) -> Enrolment:
        """A new certificate for the holder of `old`; the caller has verified that we issued it and that the sender
        holds its key.

        An expired certificate is accepted, so that a device can return after a long absence. Unauthenticated for one
        that is revoked, or whose successor was seen in use.
        """
        key, now, serial = public_key_sha256(csr_pem), self._now(), str(old.serial_number)
        with self._database.write() as session:
            row = session.get(CertificateRow, serial)
            device = lock_device(session, row.device) if row is not None else None
            if row is None or device is None or row.revoked or device.revoked:
                raise Unauthenticated("this certificate was revoked: the device needs a claim (`edgectl device claim`)")
            certificate = issue(csr_pem, device.name)
            new = _store_certificate(session, device.name, certificate, key, now)
            record_event(session, now, device.name, "device.renewed", device.name, serial=new, public_key_sha256=key)
            return Enrolment(device.name, certificate, fresh=False)

    def revoked_serials(self) -> list[int]:
        """Serial numbers of every certificate to refuse: revoked ones, and those of quarantined devices."""
        with self._database.read() as session:
            quarantined = select(FloodRow.device).where(FloodRow.held_until > self._now())
            query = select(CertificateRow.serial).where(
                CertificateRow.revoked.is_not(None) | CertificateRow.device.in_(quarantined)
            )
            return [int(serial) for serial in session.scalars(query)]

    def quarantine(self, name: str, dropped: int, unseen_bytes: int = 0) -> bool:
        """Quarantine a device that floods; False if it does not exist. The quarantine of a device that is quarantined
        already is not extended. The event has the number of its dropped messages, and the bytes that it sent to the
        broker without a message."""
        now = self._now()
        with self._database.write() as session:
            device = lock_device(session, name)
            if device is None or device.revoked:
                return False
            flood = session.get(FloodRow, name)
            if flood is None:
                flood = FloodRow(device=name, at=0.0, times=0, dropped=0, held_until=0.0, listed=False)
                session.add(flood)
            begins = flood.held_until <= now
            if begins:
                flood.times = 1 if now - flood.at > FLOOD_RESET_S else flood.times + 1
                flood.held_until = now + quarantine_s(flood.times)
            flood.at, flood.dropped, flood.listed = now, dropped, True
            if begins:
                _adopt_certificate(session, device)
                detail = {
                    "dropped": dropped, "unseen_bytes": unseen_bytes, "held_until": flood.held_until,
                    "times": flood.times,
                }  # fmt: skip
                record_event(session, now, name, "device.flooding", name, **detail)
            return True

    def record_offload_flood(self, name: str, refused: int, reasons: str) -> None:
        """Record that an offload server refused the device `refused` times lately, again and again. The first of
        several such reports is an event. A name that is no device's is ignored."""
        now = self._now()
        with self._database.write() as session:
            device = lock_device(session, name)
            if device is None:
                return
            row = session.get(OffloadFloodRow, name)
            begins = row is None or now - row.at > OFFLOAD_FLOOD_S
            since = now if row is None or begins else row.since
            session.merge(OffloadFloodRow(device=name, since=since, at=now, refused=refused, reasons=reasons))
            if begins:
                record_event(session, now, name, "device.flooding_offload", name, refused=refused, reasons=reasons)

    def release_quarantined(self) -> list[str]:
        """Devices whose quarantine ended since the last call; the revocation list must be published without them."""
        with self._database.write() as session:
            query = select(FloodRow).where(FloodRow.listed, FloodRow.held_until <= self._now())
            ended = list(session.scalars(query))
            for flood in ended:
                flood.listed = False
            return [flood.device for flood in ended]

    def revoke(self, name: str) -> None:
        """Revoke a device: delete its desired state, mark it as offline, revoke its certificates. Its name can be
        claimed again."""
        with self._database.write() as session:
            visible = _device(session, name, self._groups, self._now())
            device = lock_device(session, name) or visible
            if device.revoked:
                raise Conflict(
                    f"device {name!r} is revoked already; `edgectl device remove {name}` deletes what is stored of it"
                )
            _revoke(session, device, self._now())

    def remove(self, name: str, *, force: bool = False) -> Removal:
        """Delete a device that is revoked or never enrolled, with everything stored of it (`fleet.removal`). Its name
        can be claimed again.

        With `force` a device that is not revoked is revoked first. Conflict without it; NotFound if there is neither a
        device nor a claim of this name.
        """
        with self._database.write() as session:
            now = self._now()
            # The whole row is locked, so that no transaction adds rows that reference it meanwhile.
            device = session.get(Device, name, with_for_update=True)
            if device is None:
                self._remove_claims(session, name, now)
                return Removal(name, was_enrolled=False, revoked_now=False)
            _device(session, name, self._groups, self._now())
            revoked_now = device.revoked is None
            if revoked_now and not force:
                raise Conflict(
                    f"{name!r} is an enrolled device: `edgectl device revoke {name}` first, or remove it with --force"
                )
            if revoked_now:
                _revoke(session, device, now)
            detail = {"serial": device.certificate_serial, "group": device.group, "device_class": device.device_class}
            removal.delete_device(session, device, now)
            record_event(session, now, "operator", REMOVED, name, **detail)
        self._rows_since_trim.pop(name, None)
        self._acknowledged_s.pop(name, None)
        return Removal(name, was_enrolled=True, revoked_now=revoked_now)

    def _remove_claims(self, session: Session, name: str, now: float) -> None:
        """Remove a name that was claimed and never enrolled."""
        claims = session.scalars(select(ClaimRow).where(ClaimRow.device == name)).all()
        if not claims or not all(self.is_visible(claim.group) for claim in claims):
            raise not_found(
                "device", name, (row.name for row in session.scalars(_rows_of_groups(Device, self._groups)))
            )
        removal.delete_rows(session, name)
        record_event(session, now, "operator", REMOVED, name, group=claims[-1].group)

    def update(self, name: str, group: str | None, labels: Mapping[str, str | None]) -> Device:
        """Move a device to another group (None: keep it), and set labels; a label with the value None is removed."""
        _check_labels(group or "", {key: value or "" for key, value in labels.items()})
        with self._database.write() as session:
            visible = _device(session, name, self._groups, self._now())
            device = lock_device(session, name) or visible
            if group is not None and not self.is_visible(group):
                raise PermissionDenied(
                    f"you may move devices among your groups ({', '.join(sorted(self._groups or ()))})"
                )
            merged = {**device.labels, **labels}
            device.group = device.group if group is None else group
            device.labels = {key: value for key, value in merged.items() if value is not None}
            record_event(
                session, self._now(), "operator", "device.described", name, group=device.group, labels=device.labels
            )
            return device

    def get(self, name: str) -> Device:
        """The device of this name; NotFound, with similar names, if it does not exist or is not visible."""
        with self._database.read() as session:
            return _device(session, name, self._groups, self._now())

    def all(self) -> Sequence[Device]:
        """Every device that enrolled, including revoked ones, by name."""
        with self._database.read() as session:
            return session.scalars(_rows_of_groups(Device, self._groups).order_by(Device.name)).all()

    def select(self, targets: Iterable[str]) -> list[Device]:
        """The devices that match any of `targets`, which are selector expressions (`fleet.selector`): a name,
        `group=NAME`, `KEY=VALUE` (a label), `all`, or a combination. Never revoked ones."""
        selectors = [parse_selector(target) for target in targets]
        enrolled = [device for device in self.all() if not device.revoked]
        if not selectors:
            raise UsageError("no target: name devices, a group (group=NAME), a label (KEY=VALUE), or all")
        names, claimed = {device.name for device in enrolled}, {claim.device for claim in self.open_claims()}
        selected: dict[str, Device] = {}
        for target in selectors:
            if not_enrolled := sorted((target.names & claimed) - names):
                raise _not_enrolled(not_enrolled[0])
            selected.update({device.name: device for device in _matching(target, enrolled)})
        return list(selected.values())

    def state(self, device: Device) -> State:
        """Connection state of a device, as far as it is known now."""
        return state_of(device, self._now(), self.stale_after_s)

    def open_claims(self) -> Sequence[ClaimRow]:
        """Claims that are neither used nor expired."""
        with self._database.read() as session:
            claims = _rows_of_groups(ClaimRow, self._groups).where(ClaimRow.is_open(self._now()))
            return session.scalars(claims.order_by(ClaimRow.device)).all()

    def open_claim(self, name: str) -> ClaimRow | None:
        """The newest open claim of this name; None if there is none or the device is enrolled already."""
        enrolled = _rows_of_groups(Device, self._groups).where(Device.name == name, Device.revoked.is_(None))
        claims = _rows_of_groups(ClaimRow, self._groups).where(ClaimRow.device == name, ClaimRow.is_open(self._now()))
        with self._database.read() as session:
            if session.scalars(enrolled).first():
                return None
            return session.scalars(claims.order_by(ClaimRow.expires.desc())).first()

    def ingest(self, incoming: Iterable[tuple[str, messages.Message]]) -> IngestResult:
        """Ingest messages of devices, in order, in one transaction. Messages of unknown and revoked devices are
        dropped."""
        now = self._now()
        received = list(incoming)
        with self._database.write_concurrent(name for name, _ in received) as session:
            result = ingest.ingest_messages(session, received, now, _on_birth)
            self._rows_since_trim.update(result.stored)
            self._acknowledge(result, now)
            for name in [name for name, grown in self._rows_since_trim.items() if grown >= self._trim_every]:
                _trim(session, name, self._max_telemetry_rows)
                del self._rows_since_trim[name]
        return result

    def _acknowledge(self, result: IngestResult, now: float) -> None:
        """Acknowledge live telemetry to each device about once a minute, with the requested interval; a device keeps
        what is not acknowledged."""
        for name, (number, sequence) in result.newest.items():
            if now - self._acknowledged_s.get(name, float("-inf")) >= ACK_INTERVAL_S:
                self._acknowledged_s[name] = now
                ack = messages.Ack(session=number, sequence=sequence, telemetry_interval_s=self._telemetry_s)
                result.acks.append((name, ack))

    def history(self, name: str, newest: int = 1_000) -> list[dict[str, Any]]:
        """The newest telemetry of a device, ordered by the time of measurement, oldest first."""
        order = (TelemetryRow.at.desc(), TelemetryRow.id.desc())
        with self._database.read() as session:
            _device(session, name, self._groups, self._now())
            rows = select(TelemetryRow).where(TelemetryRow.device == name).order_by(*order).limit(newest)
            return [
                {"at": row.at, "from_backlog": row.from_backlog, "dated": row.dated, **row.content}
                for row in reversed(session.scalars(rows).all())
            ]


def quarantine_s(times: int) -> float:
    """Duration in seconds of a device's `times`-th quarantine."""
    return QUARANTINE.pause_s(times - 1)


def state_of(device: Device, now: float, stale_after_s: float) -> State:
    """`online` only for a living session from which a message arrived recently, `stale` for one without."""
    if device.revoked:
        return "revoked"
    if not device.alive or device.last_seen is None:
        return "offline"
    return "online" if now - device.last_seen <= stale_after_s else "stale"


def public_key_sha256(csr_pem: bytes) -> str:
    """SHA-256 of the public key in a certificate request, in hex; MalformedMessage if it is not a request or not signed
    by that key."""
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        if not request.is_signature_valid:
            raise MalformedMessage("the certificate request is not signed by its own key")
        der = request.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise MalformedMessage(f"not a certificate request: {error}") from error
    return hashlib.sha256(der).hexdigest()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _usable_claim(session: Session, token: str, key: str, now: float) -> ClaimRow:
    """The claim of this token. Unauthenticated with one text for an unknown, an expired and a used token: an attacker
    who guesses learns nothing."""
    hashed = _hash(token)
    claim = session.get(ClaimRow, hashed)
    known = hmac.compare_digest(hashed, claim.token_sha256 if claim else "0" * 64)
    if claim is None or not known or claim.expires <= now or (claim.used and claim.public_key_sha256 != key):
        raise Unauthenticated(
            "this claim token is unknown, used or expired: ask for a new one with `edgectl device claim`"
        )
    return claim


def _revoke(session: Session, device: Device, now: float) -> None:
    """Revoke the certificates of a locked device, and delete its desired state."""
    session.execute(delete(Desired).where(Desired.device == device.name))
    _adopt_certificate(session, device)
    _revoke_certificates(session, device.name, now, "operator")
    device.revoked, device.alive = now, False
    device.statement, device.statement_expires = None, 0.0
    device.encryption_key = b""
    record_event(session, now, "operator", "device.revoked", device.name, serial=device.certificate_serial)


def _fill_device_row(
    session: Session, claim: ClaimRow, serial: str, key: str, now: float, encryption_key: bytes
) -> bool:
    """Fill the device's row from the claim; returns whether the key is new. The statement counter is kept from an
    earlier enrolment, also of a device that was removed, and never decreases; session numbers restart with a new key.
    """
    device = session.get(Device, claim.device)
    if device is None:
        counter = removal.take_counter(session, claim.device)
        device = Device(name=claim.device, counter=counter, statement=None, statement_expires=0.0, last_seen=None)
        device.public_key_sha256 = ""
        session.add(device)
    fresh = device.public_key_sha256 != key
    if fresh:
        device.session, device.alive = 0, False
        device.birth = device.reported = device.telemetry = None
    device.device_class, device.group = claim.device_class, claim.group
    device.labels, device.link = claim.labels, claim.link
    device.certificate_serial, device.public_key_sha256 = serial, key
    device.encryption_key = encryption_key
    device.enrolled, device.revoked = now, None
    if fresh:
        session.execute(delete(AgentStartsRow).where(AgentStartsRow.device == claim.device))
        session.execute(delete(FloodRow).where(FloodRow.device == claim.device))
        ingest.delete_reported_state(session, claim.device)
    return fresh


def _store_certificate(session: Session, device: str, certificate_pem: bytes, key: str, now: float) -> str:
    """Store an issued certificate; returns its serial number."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    serial = str(certificate.serial_number)
    expires = certificate.not_valid_after_utc.timestamp()
    row = CertificateRow(serial=serial, device=device, public_key_sha256=key, issued=now, expires=expires, revoked=None)
    session.add(row)
    session.flush()
    return serial


def _adopt_certificate(session: Session, device: Device) -> None:
    """Store the certificate of a device that enrolled before certificates were stored."""
    if session.get(CertificateRow, device.certificate_serial) is None:
        session.add(
            CertificateRow(
                serial=device.certificate_serial, device=device.name, public_key_sha256=device.public_key_sha256,
                issued=device.enrolled, expires=0.0, revoked=None,
            )
        )  # fmt: skip
        session.flush()


def _revoke_certificates(session: Session, device: str, now: float, reason: str, *, but: str = "") -> int:
    """Revoke a device's certificates, except those of the key `but`; returns how many were valid until now."""
    row_of_device = session.get(Device, device)
    if row_of_device is not None:
        _adopt_certificate(session, row_of_device)
    valid = (CertificateRow.device == device, CertificateRow.revoked.is_(None), CertificateRow.public_key_sha256 != but)
    rows = session.scalars(select(CertificateRow).where(*valid)).all()
    for row in rows:
        row.revoked, row.reason = now, reason
    return len(rows)


def _check_labels(group: str, labels: Mapping[str, str]) -> None:
    for word in (group, *labels, *labels.values()):
        if len(word) > 63 or not all(letter.isalnum() or letter in "-_./" for letter in word):
            raise UsageError(f"not a group or label: {word[:80]!r} (letters, digits, '-', '_', '.', '/', at most 63)")
    if {"group", "all", ""} & set(labels):
        raise UsageError("a label cannot be called 'group' or 'all', nor be empty")


def attributes_of(device: Device) -> DeviceAttributes:
    """The attributes of a device that a selector can test."""
    return DeviceAttributes(device.name, device.device_class, device.group, device.labels)


def _matching(target: Selector, devices: Sequence[Device]) -> list[Device]:
    for name in sorted(target.names - {device.name for device in devices}):
        raise not_found("device", name, (device.name for device in devices))
    matching = [device for device in devices if target(attributes_of(device))]
    for key, value in () if matching else target.comparisons[:1]:
        if key == "group":
            raise not_found("group", value, {device.group for device in devices if device.group})
        raise not_found(
            "label", f"{key}={value}", {f"{k}={v}" for candidate in devices for k, v in candidate.labels.items()}
        )
    if not devices:
        raise Conflict("no device is enrolled yet: `edgectl device claim NAME` makes a claim for one")
    if not matching:
        raise NotFound(f"no device matches {target.text[:80]!r}")
    return matching


def _rows_of_groups(table: type[Row], groups: frozenset[str] | None) -> Select[Row]:
    """Select the rows of these groups; None: all rows."""
    query: Select[Row] = select(table)
    return query if groups is None else query.where(table.group.in_(groups))


def _not_enrolled(name: str) -> Conflict:
    return Conflict(
        f"{name} has not enrolled yet: start its agent with the claim that was made for it, or withdraw the claim"
        f" (`edgectl device remove {name}`)"
    )


def _device(session: Session, name: str, groups: frozenset[str] | None, now: float) -> Device:
    """The device of this name; Conflict where only a claim of it exists. One that is not visible is reported as not
    existing."""
    device = session.get(Device, name)
    if device is None or (groups is not None and device.group not in groups):
        open_claims = _rows_of_groups(ClaimRow, groups).where(ClaimRow.device == name, ClaimRow.is_open(now))
        if session.scalars(open_claims).first() is not None:
            raise _not_enrolled(name)
        raise not_found("device", name, (other.name for other in session.scalars(_rows_of_groups(Device, groups))))
    return device


def _on_birth(session: Session, device: Device, birth: messages.Birth, now: float) -> bool:
    """Process a birth message: a new session shows that the device is online; a known one may be the broker's retained
    copy. Returns whether older certificates were revoked."""
    superseded = False
    if birth.session > device.session:
        device.alive, device.last_seen = True, now
        record_event(session, now, device.name, "device.born", device.name, session=birth.session)
        _count_starts(session, device.name, birth.start_id, now)
        superseded = _on_renewed_certificate(session, device, birth.certificate_serial, now)
    device.session, device.birth = birth.session, msgspec.to_builtins(birth)
    return superseded


def _on_renewed_certificate(session: Session, device: Device, serial: str, now: float) -> bool:
    """A renewed certificate is in use: revoke its predecessors. Returns whether there were any."""
    row = session.get(CertificateRow, serial) if serial and serial != device.certificate_serial else None
    if row is None or row.device != device.name or row.revoked:
        return False
    device.certificate_serial, device.public_key_sha256 = serial, row.public_key_sha256
    return _revoke_certificates(session, device.name, now, "renewed", but=row.public_key_sha256) > 0


def _count_starts(session: Session, device: str, mark: str, now: float) -> None:
    """Detect a copied identity: a start that connects again after another start did belongs to a second agent."""
    if not mark:
        return
    row = session.get(AgentStartsRow, device)
    if row is None:
        row = AgentStartsRow(device=device, marks=[], copied=None)
        session.add(row)
    if mark in row.marks[:-1]:
        if row.copied is None or now - row.copied > COPIED_EVENT_INTERVAL_S:
            record_event(session, now, device, "device.copied", device)
        row.copied = now
    # The newest start moves to the end: if the list's last mark changes back, two agents take turns.
    row.marks = [*(other for other in row.marks if other != mark), mark][-MAX_STARTS:]


def _trim(session: Session, name: str, max_rows: int) -> None:
    """Delete telemetry rows of a device beyond the newest `max_rows`."""
    order = (TelemetryRow.at.desc(), TelemetryRow.id.desc())
    of_device = select(TelemetryRow.at, TelemetryRow.id).where(TelemetryRow.device == name)
    oldest_kept = session.execute(of_device.order_by(*order).offset(max_rows).limit(1)).first()
    if oldest_kept is not None:
        at, number = oldest_kept
        older = (TelemetryRow.at < at) | ((TelemetryRow.at == at) & (TelemetryRow.id <= number))
        session.execute(delete(TelemetryRow).where(TelemetryRow.device == name, older))
