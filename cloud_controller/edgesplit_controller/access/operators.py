"""Operators: added, listed, given new credentials, revoked, and looked up by token and certificate. Independent of
HTTP.

Guarantees: a token is returned once and stored as its hash; revoked or expired credentials are refused from the next
call on; an operator cannot create one with more permissions than its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from edgesplit.errors import UsageError
from edgesplit_controller.access import bearer_token
from edgesplit_controller.caller import OWNER, Caller, Role
from edgesplit_controller.errors import Conflict, PermissionDenied, not_found
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import (
    BrowserSessionRow,
    OperatorCertificateRow,
    OperatorRow,
    TokenRow,
)

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
MAX_GROUPS = 64
DEFAULT_VALIDITY_S = 90 * 86_400
"""Default validity of an operator, in seconds."""
MAX_VALIDITY_S = 365 * 86_400
"""Longest validity of an operator in seconds: that of a certificate."""
LAST_SEEN_RESOLUTION_S = 60.0
"""Resolution of `last_seen` in seconds, so that reading calls rarely write to the database."""
OWNER_IS_FIXED = (
    "the data folder's owner cannot be changed from here: delete operator.token there and start the controller again,"
    " which makes a new token"
)
"""Refusal of changes to the owner of the data folder."""
Issue = Callable[[bytes, str, float | None], bytes]
"""Issues a certificate (PEM) from a certificate request, for the operator of this name, valid no longer than this Unix
time."""


@dataclass(frozen=True, slots=True)
class NewOperator:
    """An operator to be created."""

    name: str
    role: Role
    groups: tuple[str, ...] = ()
    expires_s: int = DEFAULT_VALIDITY_S


@dataclass(frozen=True, slots=True)
class OperatorCredentials:
    """New credentials of an operator, returned once."""

    operator: str
    token: str
    certificate_pem: str
    """Empty if no certificate was requested."""
    expires: float | None


class Operators:
    """The operators of one installation."""

    def __init__(self, database: Database, issue: Issue, *, now: Callable[[], float]) -> None:
        self._database = database
        self._issue = issue
        self._now = now
        self._listeners: list[Callable[[str], None]] = []

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with an operator's name after its rights, credentials or sessions changed in this process."""
        self._listeners.append(listener)

    def announce(self, name: str) -> None:
        """Tell the listeners that this operator changed; called after the change is committed."""
        for listener in self._listeners:
            listener(name)

    def adopt_owner(self, token: str, serial: int) -> None:
        """Make this token and certificate the only valid credentials of the data folder's owner."""
        hashed, now = bearer_token.fingerprint(token), self._now()
        with self._database.write() as session:
            owner = session.get(OperatorRow, OWNER)
            if owner is None:
                owner = OperatorRow(name=OWNER, groups=[], created=now, last_seen=None)
                session.add(owner)
            owner.role, owner.groups, owner.expires, owner.revoked = Role.ADMIN.word, [], None, None
            session.flush()
            _end_credentials(session, OWNER, now, but_token=hashed, but_serial=str(serial))
            session.merge(TokenRow(sha256=hashed, operator=OWNER, created=now, revoked=None))
            session.merge(_owner_certificate(serial, now))

    def add_owner_certificate(self, serial: int) -> None:
        """Make this certificate, a renewed one, valid for the data folder's owner beside those that are."""
        with self._database.write() as session:
            session.merge(_owner_certificate(serial, self._now()))

    def add(self, operator: NewOperator, csr_pem: str, by: Caller) -> OperatorCredentials:
        """Create an operator, or enable a revoked one again, with a token and, if `csr_pem` is not empty, a
        certificate. PermissionDenied for more permissions than those of `by`."""
        _check(operator)
        if operator.role > by.role or not by.covers(operator.groups or None):
            groups = "" if by.groups is None else f" of {', '.join(sorted(by.groups))}"
            raise PermissionDenied(f"you may add operators up to {by.role.word}{groups}: say which with --group")
        with self._database.write() as session:
            now = self._now()
            row = session.get(OperatorRow, operator.name)
            if row is not None and not row.revoked:
                hint = f"`edgectl operator rotate {operator.name}`"
                raise Conflict(f"there is an operator {operator.name!r} already: {hint}")
            if row is None:
                row = OperatorRow(name=operator.name, last_seen=None)
                session.add(row)
            row.role, row.groups, row.created = operator.role.word, sorted(set(operator.groups)), now
            row.expires, row.revoked = now + operator.expires_s, None
            credentials = self._issue_credentials(session, row, csr_pem, now)
        self.announce(operator.name)
        return credentials

    def rotate(self, name: str, csr_pem: str, by: Caller, expires_s: int = 0) -> OperatorCredentials:
        """Issue a new token and, if `csr_pem` is not empty, a new certificate; the old ones and every session end.
        `expires_s` sets a new validity from now; 0 keeps the old one."""
        if not 0 <= expires_s <= MAX_VALIDITY_S:
            raise UsageError(f"an operator lasts 1 to {MAX_VALIDITY_S // 86_400} days")
        with self._database.write() as session:
            row, now = _changeable_operator(session, name, by), self._now()
            if row.revoked:
                raise Conflict(f"operator {name!r} is revoked: `edgectl operator add {name}` creates it again")
            if expires_s:
                row.expires = now + expires_s
            elif state_of(row, now) == "expired":
                raise Conflict(f"operator {name!r} has expired: give its new validity with --expires")
            _end_credentials(session, name, now, but_serial="" if csr_pem else None)
            credentials = self._issue_credentials(session, row, csr_pem, now)
        self.announce(name)
        return credentials

    def rotate_own(self, caller: Caller, csr_pem: str) -> OperatorCredentials:
        """Issue new credentials for the caller itself; its validity does not change."""
        with self._database.write() as session:
            row = self.active(caller.operator, session)
            if row is None or row.name == OWNER:
                raise Conflict(OWNER_IS_FIXED)
            now = self._now()
            _end_credentials(session, row.name, now, but_serial="" if csr_pem else None)
            credentials = self._issue_credentials(session, row, csr_pem, now)
        self.announce(caller.operator)
        return credentials

    def revoke(self, name: str, by: Caller) -> None:
        """Revoke an operator: its tokens, certificates and sessions end."""
        with self._database.write() as session:
            row, now = _changeable_operator(session, name, by), self._now()
            if row.revoked:
                raise Conflict(f"operator {name!r} is revoked already")
            row.revoked = now
            _end_credentials(session, name, now, but_serial="")
        self.announce(name)

    def all(self, by: Caller) -> list[dict[str, Any]]:
        """Every operator that `by` may change, by name."""
        now = self._now()
        with self._database.read() as session:
            rows = session.scalars(select(OperatorRow).order_by(OperatorRow.name)).all()
        return [to_dict(row, now) for row in rows if by.covers(row.groups or None)]

    def by_token_and_certificate(self, token: str, serial: int) -> OperatorRow | None:
        """The active operator to whom both this token and the certificate with this serial number belong; None if they
        are not valid or not of the same operator."""
        with self._database.read() as session:
            row = session.get(TokenRow, bearer_token.fingerprint(token))
            certificate = session.get(OperatorCertificateRow, str(serial))
            if row is None or certificate is None or row.revoked or certificate.revoked:
                return None
            return self.active(row.operator, session) if certificate.operator == row.operator else None

    def active(self, name: str, session: Session) -> OperatorRow | None:
        """The operator of this name, if it is neither revoked nor expired."""
        row = session.get(OperatorRow, name)
        return row if row is not None and state_of(row, self._now()) == "active" else None

    def on_call(self, row: OperatorRow) -> None:
        """Record that the operator called now, at most once in `LAST_SEEN_RESOLUTION_S`."""
        now = self._now()
        if row.last_seen is None or now - row.last_seen > LAST_SEEN_RESOLUTION_S:
            with self._database.write() as session:
                session.execute(update(OperatorRow).where(OperatorRow.name == row.name).values(last_seen=now))

    def _issue_credentials(self, session: Session, row: OperatorRow, csr_pem: str, now: float) -> OperatorCredentials:
        session.flush()
        token = bearer_token.make("op")
        session.add(TokenRow(sha256=bearer_token.fingerprint(token), operator=row.name, created=now, revoked=None))
        certificate = self._issue(csr_pem.encode(), row.name, row.expires) if csr_pem else b""
        if certificate:
            parsed = x509.load_pem_x509_certificate(certificate)
            session.add(
                OperatorCertificateRow(
                    serial=str(parsed.serial_number), operator=row.name, issued=now,
                    expires=parsed.not_valid_after_utc.timestamp(), revoked=None,
                )
            )  # fmt: skip
        return OperatorCredentials(row.name, token, certificate.decode(), row.expires)


def to_caller(row: OperatorRow, *, serial: str, address: str) -> Caller:
    """The operator of this row as a caller."""
    groups = frozenset(str(group) for group in row.groups) if row.groups else None
    return Caller(row.name, Role.parse(row.role), groups, serial, address)


def state_of(row: OperatorRow, now: float) -> str:
    """`active`, `expired` or `revoked`."""
    if row.revoked:
        return "revoked"
    return "expired" if row.expires is not None and row.expires <= now else "active"


def to_dict(row: OperatorRow, now: float) -> dict[str, Any]:
    """An operator as the API returns it."""
    return {
        "name": row.name, "role": row.role, "groups": list(row.groups), "state": state_of(row, now),
        "created": row.created, "expires": row.expires, "last_seen": row.last_seen,
    }  # fmt: skip


def _check(operator: NewOperator) -> None:
    if not NAME.fullmatch(operator.name) or operator.name == OWNER:
        raise UsageError(
            f"not an operator's name: {operator.name[:80]!r} (lower-case letters, digits and '-', at most 63,"
            f" and not {OWNER!r})"
        )
    if not 0 < operator.expires_s <= MAX_VALIDITY_S:
        raise UsageError(f"an operator lasts 1 to {MAX_VALIDITY_S // 86_400} days")
    if len(operator.groups) > MAX_GROUPS or any(not 0 < len(group) <= 63 for group in operator.groups):
        raise UsageError(f"at most {MAX_GROUPS} groups, of 1 to 63 letters each")


def _changeable_operator(session: Session, name: str, by: Caller) -> OperatorRow:
    """The operator of this name, if `by` may change it. An operator that is not visible to `by` is reported as not
    existing."""
    rows: Sequence[OperatorRow] = session.scalars(select(OperatorRow)).all()
    visible = {row.name: row for row in rows if by.covers(row.groups or None)}
    if name not in visible:
        raise not_found("operator", name, visible)
    if name == OWNER:
        raise Conflict(OWNER_IS_FIXED)
    if Role.parse(visible[name].role) > by.role:
        raise PermissionDenied(f"{name} is {visible[name].role}, and you are {by.role.word}")
    return visible[name]


def _owner_certificate(serial: int, now: float) -> OperatorCertificateRow:
    return OperatorCertificateRow(serial=str(serial), operator=OWNER, issued=now, expires=0.0, revoked=None)


def _end_credentials(
    session: Session, name: str, now: float, *, but_token: str = "", but_serial: str | None = None
) -> None:
    """End an operator's tokens, certificates and sessions, except the token with hash `but_token` and the certificate
    `but_serial` (None: leave all certificates)."""
    tokens = (TokenRow.operator == name, TokenRow.revoked.is_(None), TokenRow.sha256 != but_token)
    revoked_tokens = session.execute(update(TokenRow).where(*tokens).values(revoked=now))
    if but_serial is not None:
        table = OperatorCertificateRow
        certificates = (table.operator == name, table.revoked.is_(None), table.serial != but_serial)
        session.execute(update(table).where(*certificates).values(revoked=now))
    if not but_token or revoked_tokens.rowcount:  # type: ignore[attr-defined]
        sessions = (BrowserSessionRow.operator == name, BrowserSessionRow.ended.is_(None))
        session.execute(update(BrowserSessionRow).where(*sessions).values(ended=now))
