"""Devices: claimed, enrolled, seen, revoked. Decides who a device is and whether it is alive; speaks to no network.

A device counts as online only while its newest session was born, has not died, and something that the broker cannot
repeat by itself (telemetry, a fetch, a session never seen before) came lately. Retained messages revive nobody.
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

from edgesplit.errors import MalformedMessage, NotFound, UsageError
from edgesplit.identifiers import device_name
from edgesplit.mqtt import messages
from edgesplit_controller.errors import Conflict, Forbidden, NotAllowed, unknown
from edgesplit_controller.fleet import ingest
from edgesplit_controller.fleet.ingest import Taken
from edgesplit_controller.fleet.selector import Described, Selector, parse_selector
from edgesplit_controller.storage.database import (
    CertificateRow,
    ClaimRow,
    Database,
    Desired,
    Device,
    Flood,
    Starts,
    TelemetryRow,
    held,
    record,
)

Row = TypeVar("Row", Device, ClaimRow)
State = Literal["online", "stale", "offline", "revoked", "claimed"]
CLAIM_S = 3_600
LONGEST_CLAIM_S = 30 * 86_400
HISTORY = 10_000
"""Telemetry messages kept per device, give or take `TRIM_EVERY`."""
TRIM_EVERY = 200
ACKNOWLEDGE_S = 60.0
STARTS = 16
"""Newest starts of an agent that are remembered."""
HOLD_S = 60.0
"""So long a device that floods is held off, the first time; each time more twice as long."""
LONGEST_HOLD_S = 3_600.0
CALM_S = 86_400.0
"""After a day without a flood the next one counts as the first."""
COPIED_EVERY_S = 3_600.0
"""Two cards that fight for a name are recorded once an hour, not at every turn."""


class ClaimWish(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says of a device to come."""

    device: str
    device_class: str
    group: str = ""
    labels: dict[str, str] = {}
    link: str = ""
    """As `edgesplit.links.parse_link` reads it; empty: the plan asks for one, or assumes Wi-Fi."""
    expires_s: int = CLAIM_S
    replace: bool = False
    """The name is a device's already, and shall be taken from it by whoever uses this claim."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A device that was let in."""

    device: str
    certificate: bytes
    fresh: bool
    """It has a key that this name did not have before: what the broker retains of the name is another's."""
    replaced: bool = False
    """The name was taken from hardware that had it: its certificates are revoked, and its session must end."""


class Devices:
    """The devices of one controller."""

    def __init__(
        self, database: Database, *, stale_after_s: float, now: Callable[[], float], telemetry_s: float | None = None
    ) -> None:
        """`telemetry_s`: how often devices are told to send telemetry; None: as they like."""
        self._database = database
        self.stale_after_s = stale_after_s
        self._telemetry_s = telemetry_s
        self._now = now
        self._untrimmed: Counter[str] = Counter()
        self._acknowledged: dict[str, float] = {}
        self._groups: frozenset[str] | None = None

    def within(self, groups: frozenset[str] | None) -> Devices:
        """The same devices, for a caller for whom only those of these groups exist; None: all do.

        What operators ask for goes by that: `claim`, `revoke`, `get`, `all`, `select`, `history`, claims. What devices
        and the controller itself do does not.
        """
        narrowed = copy.copy(self)
        narrowed._groups = groups
        return narrowed

    @property
    def groups(self) -> frozenset[str] | None:
        """The groups that exist here; None: all."""
        return self._groups

    def sees(self, group: str) -> bool:
        """Do devices of that group exist here?"""
        return self._groups is None or group in self._groups

    def claim(self, wish: ClaimWish) -> tuple[str, int]:
        """A token that enrols this device once, and when it expires. Only its hash is kept.

        Conflict where the name is a device's already, unless the wish says that it shall be replaced.
        """
        device_name(wish.device)
        _check_labels(wish.group, wish.labels)
        if not 0 < wish.expires_s <= LONGEST_CLAIM_S:
            raise UsageError(f"a claim lasts 1 to {LONGEST_CLAIM_S} seconds, not {wish.expires_s}")
        if not self.sees(wish.group):
            raise NotAllowed(
                f"you may claim devices for your groups ({', '.join(sorted(self._groups or ()))}), not others"
            )
        token = secrets.token_urlsafe(32)
        now = self._now()
        expires = int(now + wish.expires_s)
        with self._database.write() as session:
            there = session.get(Device, wish.device)
            having = _claiming(session, wish.device, now) + ([there.group] if there is not None else [])
            if not all(self.sees(group) for group in having):  # also a revoked one's, whose history is kept by its name
                raise Conflict(f"the name {wish.device!r} is taken: choose another")
            if there is not None and not there.revoked and not wish.replace:
                raise Conflict(
                    f"{wish.device!r} is an enrolled device; `--replace` gives its name to other hardware and cuts it "
                    f"off, `edgectl device revoke {wish.device}` only cuts it off"
                )
            session.add(
                ClaimRow(
                    token_sha256=_hash(token), device=wish.device, device_class=wish.device_class, group=wish.group,
                    labels=dict(wish.labels), link=wish.link, expires=expires, used=None, public_key_sha256=None,
                )
            )  # fmt: skip
            record(
                session,
                now,
                "operator",
                "device.claimed",
                wish.device,
                device_class=wish.device_class,
                group=wish.group,
            )
        return token, expires

    def enrol(
        self, token: str, csr_pem: bytes, issue: Callable[[bytes, str], bytes], encryption_key: bytes = b""
    ) -> Enrolment:
        """A certificate, made by `issue(csr, name)`; Forbidden for a token that is not good.

        `encryption_key` is the device's own, as the caller has made sure; that of hardware which had the name before
        is forgotten. The same token with the same key is answered again while the claim lasts: the first answer may
        have been lost.
        """
        key = public_key_sha256(csr_pem)
        now = self._now()
        with self._database.write() as session:
            claim = _good_claim(session, token, key, now)
            held(session, claim.device)
            certificate = issue(csr_pem, claim.device)
            claim.used, claim.public_key_sha256 = claim.used or now, key
            others = (ClaimRow.device == claim.device, ClaimRow.used.is_(None))
            session.execute(update(ClaimRow).where(*others).values(expires=0.0))
            replaced = _revoke_certificates(session, claim.device, now, "replaced", but=key) > 0
            serial = _issued(session, claim.device, certificate, key, now)
            fresh = _enrolled(session, claim, serial, key, now, encryption_key)
            record(session, now, claim.device, "device.enrolled", claim.device, serial=serial, public_key_sha256=key)
            return Enrolment(claim.device, certificate, fresh, replaced)

    def renew(self, old: x509.Certificate, csr_pem: bytes, issue: Callable[[bytes, str], bytes]) -> Enrolment:
        """A new certificate for the holder of `old`, which the caller has made sure to be ours and its sender's.

        Good for an expired one too, so that a device comes back from a long absence; Forbidden for one that is
        revoked, or whose successor was seen already.
        """
        key, now, serial = public_key_sha256(csr_pem), self._now(), str(old.serial_number)
        with self._database.write() as session:
            row = session.get(CertificateRow, serial)
            device = held(session, row.device) if row is not None else None
            if row is None or device is None or row.revoked or device.revoked:
                raise Forbidden("this certificate was revoked: the device needs a claim (`edgectl device claim`)")
            certificate = issue(csr_pem, device.name)
            new = _issued(session, device.name, certificate, key, now)
            record(session, now, device.name, "device.renewed", device.name, serial=new, public_key_sha256=key)
            return Enrolment(device.name, certificate, fresh=False)

    def revoked_serials(self) -> list[int]:
        """Of every certificate that must not be believed: revoked, or of a device that is held off for a flood."""
        with self._database.read() as session:
            away = select(Flood.device).where(Flood.held_until > self._now())
            gone = select(CertificateRow.serial).where(
                CertificateRow.revoked.is_not(None) | CertificateRow.device.in_(away)
            )
            return [int(serial) for serial in session.scalars(gone)]

    def hold(self, name: str, dropped: int) -> bool:
        """Hold a device off for a while, because it floods; False if there is no such device. One that is held off
        already stays so, no longer."""
        now = self._now()
        with self._database.write() as session:
            device = held(session, name)
            if device is None or device.revoked:
                return False
            flood = session.get(Flood, name)
            if flood is None:
                flood = Flood(device=name, at=0.0, times=0, dropped=0, held_until=0.0, listed=False)
                session.add(flood)
            fresh = flood.held_until <= now
            if fresh:
                flood.times = 1 if now - flood.at > CALM_S else flood.times + 1
                flood.held_until = now + hold_s(flood.times)
            flood.at, flood.dropped, flood.listed = now, dropped, True
            if fresh:
                _adopt_certificate(session, device)
                detail = {"dropped": dropped, "held_until": flood.held_until, "times": flood.times}
                record(session, now, name, "device.flooding", name, **detail)
            return True

    def end_holds(self) -> list[str]:
        """Devices whose hold has run out since the last call: the revocation list is due without them."""
        with self._database.write() as session:
            over = select(Flood).where(Flood.listed, Flood.held_until <= self._now())
            ended = list(session.scalars(over))
            for flood in ended:
                flood.listed = False
            return [flood.device for flood in ended]

    def floods(self) -> dict[str, Flood]:
        """The last flood of each device that ever made one."""
        with self._database.read() as session:
            return {flood.device: flood for flood in session.scalars(select(Flood))}

    def copied(self) -> dict[str, float]:
        """When two agents were last seen to share an identity, by device."""
        with self._database.read() as session:
            rows = session.scalars(select(Starts).where(Starts.copied.is_not(None)))
            return {row.device: row.copied for row in rows if row.copied is not None}

    def revoke(self, name: str) -> None:
        """Forget what the device shall run and take it for dead; its certificates are revoked, its name is free."""
        with self._database.write() as session:
            shown = _device(session, name, self._groups)
            device = held(session, name) or shown
            if device.revoked:
                raise Conflict(f"device {name!r} is revoked already")
            now = self._now()
            session.execute(delete(Desired).where(Desired.device == name))
            _adopt_certificate(session, device)
            _revoke_certificates(session, name, now, "operator")
            device.revoked, device.alive = now, False
            device.statement, device.statement_expires = None, 0.0
            device.encryption_key = b""
            record(session, now, "operator", "device.revoked", name, serial=device.certificate_serial)

    def describe(self, name: str, group: str | None, labels: Mapping[str, str | None]) -> Device:
        """Put a device into another group (None: leave it where it is), and give it labels; None takes one away."""
        _check_labels(group or "", {key: value or "" for key, value in labels.items()})
        with self._database.write() as session:
            shown = _device(session, name, self._groups)
            device = held(session, name) or shown
            if group is not None and not self.sees(group):
                raise NotAllowed(f"you may move devices among your groups ({', '.join(sorted(self._groups or ()))})")
            kept = {**device.labels, **labels}
            device.group = device.group if group is None else group
            device.labels = {key: value for key, value in kept.items() if value is not None}
            record(session, self._now(), "operator", "device.described", name, group=device.group, labels=device.labels)
            return device

    def get(self, name: str) -> Device:
        """The device of that name, with near matches in the error."""
        with self._database.read() as session:
            return _device(session, name, self._groups)

    def all(self) -> Sequence[Device]:
        """Every device that enrolled, revoked ones included, by name."""
        with self._database.read() as session:
            return session.scalars(_of(Device, self._groups).order_by(Device.name)).all()

    def select(self, targets: Iterable[str]) -> list[Device]:
        """The devices that `targets` mean, each an expression (`selecting`): a name, `group=NAME`, `KEY=VALUE` (a
        label), `all`, or several joined. Revoked ones never."""
        wanted = [parse_selector(target) for target in targets]
        there = [device for device in self.all() if not device.revoked]
        if not wanted:
            raise UsageError("no target: name devices, a group (group=NAME), a label (KEY=VALUE), or all")
        names, claimed = {device.name for device in there}, {claim.device for claim in self.open_claims()}
        chosen: dict[str, Device] = {}
        for target in wanted:
            if late := sorted((target.names & claimed) - names):
                raise Conflict(f"{late[0]} has not enrolled yet: start its agent with the claim that was made for it")
            chosen.update({device.name: device for device in _meant(target, there)})
        return list(chosen.values())

    def state(self, device: Device) -> State:
        """Whether it lives, as far as can be known now."""
        return state_of(device, self._now(), self.stale_after_s)

    def open_claims(self) -> Sequence[ClaimRow]:
        """Claims that can still be used."""
        with self._database.read() as session:
            good = _of(ClaimRow, self._groups).where(ClaimRow.used.is_(None), ClaimRow.expires > self._now())
            return session.scalars(good.order_by(ClaimRow.device)).all()

    def open_claim(self, name: str) -> ClaimRow | None:
        """The newest claim with which the device of that name may come, if it does not live already."""
        good = (ClaimRow.device == name, ClaimRow.used.is_(None), ClaimRow.expires > self._now())
        with self._database.read() as session:
            if session.scalars(_of(Device, self._groups).where(Device.name == name, Device.revoked.is_(None))).first():
                return None
            return session.scalars(_of(ClaimRow, self._groups).where(*good).order_by(ClaimRow.expires.desc())).first()

    def hear(self, heard: Iterable[tuple[str, messages.Message]]) -> Taken:
        """Take in what devices said, in order, in one transaction. Unknown and revoked devices are not heard."""
        now = self._now()
        said = list(heard)
        with self._database.hear(name for name, _ in said) as session:
            taken = ingest.take_in(session, said, now, _born)
            self._untrimmed.update(taken.stored)
            self._acknowledge(taken, now)
            for name in [name for name, grown in self._untrimmed.items() if grown >= TRIM_EVERY]:
                _trim(session, name)
                del self._untrimmed[name]
        return taken

    def _acknowledge(self, taken: Taken, now: float) -> None:
        """Tell each device about once a minute how far its telemetry has come, and how often more is wanted; it keeps
        what it was not told of."""
        for name, (number, sequence) in taken.newest.items():
            if now - self._acknowledged.get(name, float("-inf")) >= ACKNOWLEDGE_S:
                self._acknowledged[name] = now
                taken.kept.append((name, messages.Kept(session=number, sequence=sequence, every_s=self._telemetry_s)))

    def history(self, name: str, newest: int = 1_000) -> list[dict[str, Any]]:
        """The newest telemetry of a device, oldest first by when it was measured."""
        order = (TelemetryRow.at.desc(), TelemetryRow.id.desc())
        with self._database.read() as session:
            _device(session, name, self._groups)
            rows = select(TelemetryRow).where(TelemetryRow.device == name).order_by(*order).limit(newest)
            return [
                {"at": row.at, "late": row.late, "dated": row.dated, **row.content}
                for row in reversed(session.scalars(rows).all())
            ]


def hold_s(times: int) -> float:
    """How long a device is held off that floods for the `times`-th time."""
    return float(min(LONGEST_HOLD_S, HOLD_S * 2 ** min(times - 1, 30)))


def state_of(device: Device, now: float, stale_after_s: float) -> State:
    """`online` only for a living session that was heard lately; `stale` for one that is silent."""
    if device.revoked:
        return "revoked"
    if not device.alive or device.last_seen is None:
        return "offline"
    return "online" if now - device.last_seen <= stale_after_s else "stale"


def public_key_sha256(csr_pem: bytes) -> str:
    """Of the key in a certificate request; MalformedMessage if it is none or is not signed by that key."""
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


def _good_claim(session: Session, token: str, key: str, now: float) -> ClaimRow:
    """One answer for a wrong, an expired and a used token: who guesses learns nothing."""
    hashed = _hash(token)
    claim = session.get(ClaimRow, hashed)
    known = hmac.compare_digest(hashed, claim.token_sha256 if claim else "0" * 64)
    if claim is None or not known or claim.expires <= now or (claim.used and claim.public_key_sha256 != key):
        raise Forbidden("this claim token is unknown, used or expired: ask for a new one with `edgectl device claim`")
    return claim


def _enrolled(session: Session, claim: ClaimRow, serial: str, key: str, now: float, encryption_key: bytes) -> bool:
    """The device's row as the claim describes it; is its key new? Its counter is kept from a former life and never
    falls; its sessions begin anew with a new key."""
    device = session.get(Device, claim.device)
    if device is None:
        device = Device(name=claim.device, counter=0, statement=None, statement_expires=0.0, last_seen=None)
        device.public_key_sha256 = ""
        session.add(device)
    fresh = device.public_key_sha256 != key
    if fresh:
        device.session, device.alive = 0, False
        device.birth = device.reported = device.telemetry = None
    device.device_class, device.group, device.labels, device.link = (
        claim.device_class,
        claim.group,
        claim.labels,
        claim.link,
    )
    device.certificate_serial, device.public_key_sha256 = serial, key
    device.encryption_key = encryption_key
    device.enrolled, device.revoked = now, None
    if fresh:
        session.execute(delete(Starts).where(Starts.device == claim.device))
        session.execute(delete(Flood).where(Flood.device == claim.device))
        ingest.forget(session, claim.device)
    return fresh


def _issued(session: Session, device: str, certificate_pem: bytes, key: str, now: float) -> str:
    """Remember a certificate; its serial number."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    serial = str(certificate.serial_number)
    expires = certificate.not_valid_after_utc.timestamp()
    row = CertificateRow(serial=serial, device=device, public_key_sha256=key, issued=now, expires=expires, revoked=None)
    session.add(row)
    session.flush()
    return serial


def _adopt_certificate(session: Session, device: Device) -> None:
    """Remember the certificate of a device that enrolled before certificates were remembered."""
    if session.get(CertificateRow, device.certificate_serial) is None:
        session.add(
            CertificateRow(
                serial=device.certificate_serial, device=device.name, public_key_sha256=device.public_key_sha256,
                issued=device.enrolled, expires=0.0, revoked=None,
            )
        )  # fmt: skip
        session.flush()


def _revoke_certificates(session: Session, device: str, now: float, reason: str, *, but: str = "") -> int:
    """Revoke a device's certificates, but for those of one key; how many were good until now."""
    there = session.get(Device, device)
    if there is not None:
        _adopt_certificate(session, there)
    good = (CertificateRow.device == device, CertificateRow.revoked.is_(None), CertificateRow.public_key_sha256 != but)
    rows = session.scalars(select(CertificateRow).where(*good)).all()
    for row in rows:
        row.revoked, row.reason = now, reason
    return len(rows)


def _check_labels(group: str, labels: Mapping[str, str]) -> None:
    for word in (group, *labels, *labels.values()):
        if len(word) > 63 or not all(letter.isalnum() or letter in "-_./" for letter in word):
            raise UsageError(f"not a group or label: {word[:80]!r} (letters, digits, '-', '_', '.', '/', at most 63)")
    if {"group", "all", ""} & set(labels):
        raise UsageError("a label cannot be called 'group' or 'all', nor be empty")


def described(device: Device) -> Described:
    """What an expression can ask of a device."""
    return Described(device.name, device.device_class, device.group, device.labels)


def _meant(target: Selector, there: Sequence[Device]) -> list[Device]:
    for name in sorted(target.names - {device.name for device in there}):
        raise unknown("device", name, (device.name for device in there))
    found = [device for device in there if target(described(device))]
    for key, value in () if found else target.asked[:1]:
        if key == "group":
            raise unknown("group", value, {device.group for device in there if device.group})
        raise unknown("label", f"{key}={value}", {f"{k}={v}" for one in there for k, v in one.labels.items()})
    if not there:
        raise Conflict("no device is enrolled yet: `edgectl device claim NAME` makes a claim for one")
    if not found:
        raise NotFound(f"no device is meant by {target.text[:80]!r}")
    return found


def _of(table: type[Row], groups: frozenset[str] | None) -> Select[Row]:
    """The rows of these groups; None: all rows."""
    every: Select[Row] = select(table)
    return every if groups is None else every.where(table.group.in_(groups))


def _claiming(session: Session, name: str, now: float) -> list[str]:
    """The groups for which there are open claims of that name."""
    good = (ClaimRow.device == name, ClaimRow.used.is_(None), ClaimRow.expires > now)
    return list(session.scalars(select(ClaimRow.group).where(*good)))


def _device(session: Session, name: str, groups: frozenset[str] | None = None) -> Device:
    """The device of that name. One of other groups is spoken of as if it were not there."""
    device = session.get(Device, name)
    if device is None or (groups is not None and device.group not in groups):
        raise unknown("device", name, (one.name for one in session.scalars(_of(Device, groups))))
    return device


def _born(session: Session, device: Device, birth: messages.Birth, now: float) -> bool:
    """A new session is a sign of life; a known one may be the broker's retained copy and is none."""
    superseded = False
    if birth.session > device.session:
        device.alive, device.last_seen = True, now
        record(session, now, device.name, "device.born", device.name, session=birth.session)
        _count_starts(session, device.name, birth.start, now)
        superseded = _succeeded(session, device, birth.certificate, now)
    device.session, device.birth = birth.session, msgspec.to_builtins(birth)
    return superseded


def _succeeded(session: Session, device: Device, serial: str, now: float) -> bool:
    """A renewed certificate is at work: its predecessors have had their day. Were there any?"""
    row = session.get(CertificateRow, serial) if serial and serial != device.certificate_serial else None
    if row is None or row.device != device.name or row.revoked:
        return False
    device.certificate_serial, device.public_key_sha256 = serial, row.public_key_sha256
    return _revoke_certificates(session, device.name, now, "renewed", but=row.public_key_sha256) > 0


def _count_starts(session: Session, device: str, mark: str, now: float) -> None:
    """An agent that speaks again after another start of it did is not the same one: the identity was copied."""
    if not mark:
        return
    row = session.get(Starts, device)
    if row is None:
        row = Starts(device=device, marks=[], copied=None)
        session.add(row)
    if mark in row.marks[:-1]:
        if row.copied is None or now - row.copied > COPIED_EVERY_S:
            record(session, now, device, "device.copied", device)
        row.copied = now
    row.marks = [*(one for one in row.marks if one != mark), mark][-STARTS:]


def _trim(session: Session, name: str) -> None:
    """Drop what is older than the newest `HISTORY` telemetry rows of a device."""
    order = (TelemetryRow.at.desc(), TelemetryRow.id.desc())
    of_device = select(TelemetryRow.at, TelemetryRow.id).where(TelemetryRow.device == name)
    edge = session.execute(of_device.order_by(*order).offset(HISTORY).limit(1)).first()
    if edge is not None:
        older = (TelemetryRow.at < edge[0]) | ((TelemetryRow.at == edge[0]) & (TelemetryRow.id <= edge[1]))
        session.execute(delete(TelemetryRow).where(TelemetryRow.device == name, older))
