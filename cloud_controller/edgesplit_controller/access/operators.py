"""Operators: added, listed, given new tokens, revoked; who one is by token and certificate. Knows no HTTP.

Promises: a token is shown once and kept as its hash; what was revoked or has expired opens nothing from the next call
on; nobody makes an operator who may more than they may themselves.
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
from edgesplit_controller.errors import Conflict, NotAllowed, unknown
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import (
    BrowserSessionRow,
    OperatorCertificateRow,
    OperatorRow,
    TokenRow,
)

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
MOST_GROUPS = 64
LIFE_S = 90 * 86_400
LONGEST_S = 365 * 86_400
"""As long as a certificate."""
SEEN_EVERY_S = 60.0
"""`last_seen` is this coarse, so that reading does not write."""
OWNERS = (
    "the data folder's owner cannot be changed from here: delete operator.token there and start the controller again,"
    " which makes a new token"
)
Issue = Callable[[bytes, str, float | None], bytes]
"""A certificate (PEM) from a request, for the operator of that name, good no longer than that."""


@dataclass(frozen=True, slots=True)
class OperatorWish:
    """An operator to be."""

    name: str
    role: Role
    groups: tuple[str, ...] = ()
    expires_s: int = LIFE_S


@dataclass(frozen=True, slots=True)
class Equipped:
    """What an operator is told once."""

    operator: str
    token: str
    certificate_pem: str
    """Empty where none was asked for."""
    expires: float | None


class Operators:
    """The operators of one installation."""

    def __init__(self, database: Database, issue: Issue, *, now: Callable[[], float]) -> None:
        self._database = database
        self._issue = issue
        self._now = now

    def adopt_owner(self, token: str, serial: int) -> None:
        """The data folder's owner has this token and this certificate, and no others: what lay there before is void."""
        hashed, now = bearer_token.fingerprint(token), self._now()
        with self._database.write() as session:
            owner = session.get(OperatorRow, OWNER)
            if owner is None:
                owner = OperatorRow(name=OWNER, groups=[], made=now, last_seen=None)
                session.add(owner)
            owner.role, owner.groups, owner.expires, owner.revoked = Role.ADMIN.word, [], None, None
            session.flush()
            _void(session, OWNER, now, but_token=hashed, but_serial=str(serial))
            session.merge(TokenRow(sha256=hashed, operator=OWNER, made=now, revoked=None))
            mine = OperatorCertificateRow(serial=str(serial), operator=OWNER, issued=now, expires=0.0, revoked=None)
            session.merge(mine)

    def add(self, wish: OperatorWish, csr_pem: str, by: Caller) -> Equipped:
        """A new operator, or one who comes back after a revocation, with a token and, for a request, a certificate."""
        _check(wish)
        if wish.role > by.role or not by.covers(wish.groups or None):
            raise NotAllowed(f"you may add operators up to {by.role.word}{_of_groups(by)}: say which with --group")
        with self._database.write() as session:
            now = self._now()
            row = session.get(OperatorRow, wish.name)
            if row is not None and not row.revoked:
                raise Conflict(f"there is an operator {wish.name!r} already: `edgectl operator rotate {wish.name}`")
            if row is None:
                row = OperatorRow(name=wish.name, last_seen=None)
                session.add(row)
            row.role, row.groups, row.made = wish.role.word, sorted(set(wish.groups)), now
            row.expires, row.revoked = now + wish.expires_s, None
            return self._equipped(session, row, csr_pem, now)

    def rotate(self, name: str, csr_pem: str, by: Caller, expires_s: int = 0) -> Equipped:
        """A new token, and for a request a new certificate; the old ones and every session end. With `expires_s` the
        operator lasts so long from now."""
        if not 0 <= expires_s <= LONGEST_S:
            raise UsageError(f"an operator lasts 1 to {LONGEST_S // 86_400} days")
        with self._database.write() as session:
            row, now = _changeable(session, name, by), self._now()
            if row.revoked:
                raise Conflict(f"operator {name!r} is revoked: `edgectl operator add {name}` lets them in again")
            if expires_s:
                row.expires = now + expires_s
            elif state(row, now) == "expired":
                raise Conflict(f"operator {name!r} has expired: say for how long they are let in again (--expires)")
            _void(session, name, now, but_serial="" if csr_pem else None)
            return self._equipped(session, row, csr_pem, now)

    def rotate_own(self, caller: Caller, csr_pem: str) -> Equipped:
        """The same for oneself, but for how long one lasts."""
        with self._database.write() as session:
            row = self.living(caller.operator, session)
            if row is None or row.name == OWNER:
                raise Conflict(OWNERS)
            now = self._now()
            _void(session, row.name, now, but_serial="" if csr_pem else None)
            return self._equipped(session, row, csr_pem, now)

    def revoke(self, name: str, by: Caller) -> None:
        """From now on this operator is nobody: tokens, certificates and sessions end."""
        with self._database.write() as session:
            row, now = _changeable(session, name, by), self._now()
            if row.revoked:
                raise Conflict(f"operator {name!r} is revoked already")
            row.revoked = now
            _void(session, name, now, but_serial="")

    def all(self, by: Caller) -> list[dict[str, Any]]:
        """Every operator that `by` may change, by name."""
        now = self._now()
        with self._database.read() as session:
            rows = session.scalars(select(OperatorRow).order_by(OperatorRow.name)).all()
        return [shown_operator(row, now) for row in rows if by.covers(row.groups or None)]

    def by_token(self, token: str) -> OperatorRow | None:
        """Whose token this is; None for nobody's, a revoked one, and one whose operator has expired."""
        with self._database.read() as session:
            row = session.get(TokenRow, bearer_token.fingerprint(token))
            return self.living(row.operator, session) if row is not None and not row.revoked else None

    def holding(self, token: str, serial: int) -> OperatorRow | None:
        """Who holds this token and the certificate of this serial number; None where that is not one operator, or not
        one any more."""
        with self._database.read() as session:
            row = session.get(TokenRow, bearer_token.fingerprint(token))
            shown = session.get(OperatorCertificateRow, str(serial))
            if row is None or row.revoked or shown is None or shown.revoked or shown.operator != row.operator:
                return None
            return self.living(row.operator, session)

    def living(self, name: str, session: Session) -> OperatorRow | None:
        """The operator of that name, if they may anything now."""
        row = session.get(OperatorRow, name)
        return row if row is not None and state(row, self._now()) == "active" else None

    def certified(self, name: str, serial: int) -> bool:
        """Was this certificate issued to that operator, and not revoked?"""
        with self._database.read() as session:
            row = session.get(OperatorCertificateRow, str(serial))
            return row is not None and row.operator == name and not row.revoked

    def seen(self, row: OperatorRow) -> None:
        """This operator was here."""
        now = self._now()
        if row.last_seen is None or now - row.last_seen > SEEN_EVERY_S:
            with self._database.write() as session:
                session.execute(update(OperatorRow).where(OperatorRow.name == row.name).values(last_seen=now))

    def _equipped(self, session: Session, row: OperatorRow, csr_pem: str, now: float) -> Equipped:
        session.flush()
        token = bearer_token.make("op")
        session.add(TokenRow(sha256=bearer_token.fingerprint(token), operator=row.name, made=now, revoked=None))
        certificate = self._issue(csr_pem.encode(), row.name, row.expires) if csr_pem else b""
        if certificate:
            made = x509.load_pem_x509_certificate(certificate)
            session.add(
                OperatorCertificateRow(
                    serial=str(made.serial_number), operator=row.name, issued=now,
                    expires=made.not_valid_after_utc.timestamp(), revoked=None,
                )
            )  # fmt: skip
        return Equipped(row.name, token, certificate.decode(), row.expires)


def caller_of(row: OperatorRow, *, serial: str, address: str) -> Caller:
    """The operator of this row, as somebody who asks."""
    groups = frozenset(str(group) for group in row.groups) if row.groups else None
    return Caller(row.name, Role.parse(row.role), groups, serial, address)


def state(row: OperatorRow, now: float) -> str:
    """`active`, `expired` or `revoked`."""
    if row.revoked:
        return "revoked"
    return "expired" if row.expires is not None and row.expires <= now else "active"


def shown_operator(row: OperatorRow, now: float) -> dict[str, Any]:
    """An operator as the API shows one."""
    return {
        "name": row.name,
        "role": row.role,
        "groups": list(row.groups),
        "state": state(row, now),
        "made": row.made,
        "expires": row.expires,
        "last_seen": row.last_seen,
    }


def _check(wish: OperatorWish) -> None:
    if not NAME.fullmatch(wish.name) or wish.name == OWNER:
        raise UsageError(
            f"not an operator's name: {wish.name[:80]!r} (lower-case letters, digits and '-', at most 63,"
            f" and not {OWNER!r})"
        )
    if not 0 < wish.expires_s <= LONGEST_S:
        raise UsageError(f"an operator lasts 1 to {LONGEST_S // 86_400} days")
    if len(wish.groups) > MOST_GROUPS or any(not 0 < len(group) <= 63 for group in wish.groups):
        raise UsageError(f"at most {MOST_GROUPS} groups, of 1 to 63 letters each")


def _changeable(session: Session, name: str, by: Caller) -> OperatorRow:
    """The operator of that name, if `by` may change them; who may not is told as if there were none."""
    known: Sequence[OperatorRow] = session.scalars(select(OperatorRow)).all()
    mine = {row.name: row for row in known if by.covers(row.groups or None)}
    if name not in mine:
        raise unknown("operator", name, mine)
    if name == OWNER:
        raise Conflict(OWNERS)
    if Role.parse(mine[name].role) > by.role:
        raise NotAllowed(f"{name} is {mine[name].role}, and you are {by.role.word}")
    return mine[name]


def _void(session: Session, name: str, now: float, *, but_token: str = "", but_serial: str | None = None) -> None:
    """End an operator's tokens, certificates (None: not these) and sessions, but those named."""
    mine = (TokenRow.operator == name, TokenRow.revoked.is_(None), TokenRow.sha256 != but_token)
    changed = session.execute(update(TokenRow).where(*mine).values(revoked=now))
    if but_serial is not None:
        old = (
            OperatorCertificateRow.operator == name,
            OperatorCertificateRow.revoked.is_(None),
            OperatorCertificateRow.serial != but_serial,
        )
        session.execute(update(OperatorCertificateRow).where(*old).values(revoked=now))
    if not but_token or changed.rowcount:  # type: ignore[attr-defined]
        open_ = (BrowserSessionRow.operator == name, BrowserSessionRow.ended.is_(None))
        session.execute(update(BrowserSessionRow).where(*open_).values(ended=now))


def _of_groups(by: Caller) -> str:
    return "" if by.groups is None else f" of {', '.join(sorted(by.groups))}"
