"""Browser sessions: opened by a one-time login code, identified by a cookie, ended by time or logout. Independent of
HTTP.

Guarantees: the session id is generated here at each login and never accepted from outside (no session fixation); a code
opens one session, within two minutes; a session ends 30 minutes after its last use, after twelve hours, with its
operator, and at logout. CSRF tokens are derived from the session id, which only the cookie contains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import delete, update

from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.operators import LAST_SEEN_RESOLUTION_S, Operators
from edgesplit_controller.errors import Unauthenticated
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import BrowserSessionRow, LoginCodeRow, OperatorRow

CODE_S = 120
"""Validity of a login code, in seconds."""
IDLE_S = 1_800.0
"""Seconds without use after which a session ends."""
MAX_SESSION_S = 43_200.0
"""Longest duration of a session, in seconds."""
RETENTION_S = 86_400.0
"""Seconds after which expired codes and sessions are deleted; the audit log keeps the record."""
NEW_CODE = "`edgectl dashboard` makes a new one"
MISSPELT_CODE = "this login code is misspelt or incomplete: paste the whole address that `edgectl dashboard` printed"
UNKNOWN_CODE = f"this login code is not of this controller: {NEW_CODE}"
USED_CODE = f"this login code was used already, and works once: {NEW_CODE}"
EXPIRED_CODE = f"this login code is older than {CODE_S // 60} minutes: {NEW_CODE}"
INACTIVE_OPERATOR = "the operator of this login code was revoked, or their access has expired: ask an administrator"


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session that was just opened."""

    secret: str
    """The session id, for the cookie."""
    operator: OperatorRow
    expires: float


class Sessions:
    """The browser sessions of one installation."""

    def __init__(self, database: Database, operators: Operators, *, now: Callable[[], float]) -> None:
        self._database = database
        self._operators = operators
        self._now = now

    def make_code(self, operator: str) -> tuple[str, float]:
        """A login code that opens one session of this operator, and the Unix time at which it expires."""
        code, expires = bearer_token.make("code"), self._now() + CODE_S
        with self._database.write() as session:
            session.execute(delete(LoginCodeRow).where(LoginCodeRow.expires < self._now() - RETENTION_S))
            hashed = bearer_token.fingerprint(code)
            session.add(LoginCodeRow(sha256=hashed, operator=operator, expires=expires, used=None))
        return code, expires

    def open_by_code(self, code: str, address: str) -> OpenedSession:
        """Open a session by an unused login code. Unauthenticated, with the reason, for any other: a code has 256
        random bits and cannot be guessed, so the reason reveals nothing of use."""
        if not bearer_token.is_well_formed(code, "code"):
            raise Unauthenticated(MISSPELT_CODE)
        hashed, now = bearer_token.fingerprint(code), self._now()
        with self._database.write() as session:
            is_usable = (LoginCodeRow.sha256 == hashed, LoginCodeRow.used.is_(None), LoginCodeRow.expires > now)
            # One conditional UPDATE marks the code as used: of two concurrent logins only one changes the row.
            used = session.execute(update(LoginCodeRow).where(*is_usable).values(used=now))
            row = session.get(LoginCodeRow, hashed)
            if row is None or used.rowcount != 1:  # type: ignore[attr-defined]
                raise Unauthenticated(UNKNOWN_CODE if row is None else USED_CODE if row.used else EXPIRED_CODE)
            operator = self._operators.active(row.operator, session)
            if operator is None:
                raise Unauthenticated(INACTIVE_OPERATOR)
        return self.open(operator, address)

    def open(self, operator: OperatorRow, address: str) -> OpenedSession:
        """Open a session for an operator that was authenticated."""
        secret, now = bearer_token.make("session"), self._now()
        with self._database.write() as session:
            session.execute(delete(BrowserSessionRow).where(BrowserSessionRow.expires < now - RETENTION_S))
            session.add(
                BrowserSessionRow(
                    sha256=bearer_token.fingerprint(secret), operator=operator.name, created=now, last_seen=now,
                    expires=now + MAX_SESSION_S, ended=None, address=address,
                )
            )  # fmt: skip
        return OpenedSession(secret, operator, now + MAX_SESSION_S)

    def operator_of(self, secret: str) -> OperatorRow | None:
        """The active operator of this session; None if the session is unknown or has ended. The call counts as use of
        the session, which delays its idle timeout."""
        hashed, now = bearer_token.fingerprint(secret), self._now()
        with self._database.read() as session:
            row = session.get(BrowserSessionRow, hashed)
            if row is None or row.ended or row.expires <= now or row.last_seen + IDLE_S <= now:
                return None
            operator = self._operators.active(row.operator, session)
        if operator is not None and now - row.last_seen > LAST_SEEN_RESOLUTION_S:
            this_session = (BrowserSessionRow.sha256 == hashed, BrowserSessionRow.last_seen < now)
            with self._database.write() as session:
                session.execute(update(BrowserSessionRow).where(*this_session).values(last_seen=now))
        return operator

    def end(self, secret: str) -> None:
        """End a session (logout)."""
        this_session = (BrowserSessionRow.sha256 == bearer_token.fingerprint(secret), BrowserSessionRow.ended.is_(None))
        with self._database.write() as session:
            row = session.get(BrowserSessionRow, bearer_token.fingerprint(secret))
            session.execute(update(BrowserSessionRow).where(*this_session).values(ended=self._now()))
            operator = row.operator if row is not None else ""
        self._operators.announce(operator)


def csrf_token(secret: str) -> str:
    """The CSRF token of the session, which a page sends with each change. Pages of other origins cannot compute it."""
    return bearer_token.derive(secret, "edgesplit csrf 1")
