"""Browsers that were let in: a one-time code opens a session, a cookie carries it, time ends it. Knows no HTTP.

Promises: a session's secret is made here at each login and never taken from outside (no fixation); a code opens one
session, within two minutes; a session ends half an hour after it was last used, after twelve hours, at the end of its
operator, and when it is logged out. CSRF tokens are derived from the session's secret, which only its cookie holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import delete, update

from edgesplit_controller.access import bearer_token
from edgesplit_controller.access.operators import SEEN_EVERY_S, Operators
from edgesplit_controller.errors import Forbidden
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import BrowserSessionRow, LoginCodeRow, OperatorRow

CODE_S = 120
IDLE_S = 1_800.0
LONGEST_S = 43_200.0
KEPT_S = 86_400.0
"""What has ended is forgotten a day later: the audit log remembers."""
WRONG_CODE = "this login code is unknown, used or expired: `edgectl dashboard` makes a new one"


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that has just begun."""

    secret: str
    """For the cookie."""
    operator: OperatorRow
    expires: float


class Sessions:
    """The browser sessions of one installation."""

    def __init__(self, database: Database, operators: Operators, *, now: Callable[[], float]) -> None:
        self._database = database
        self._operators = operators
        self._now = now

    def make_code(self, operator: str) -> tuple[str, float]:
        """A code that lets one browser in as this operator, and when it is void."""
        code, expires = bearer_token.make("code"), self._now() + CODE_S
        with self._database.write() as session:
            session.execute(delete(LoginCodeRow).where(LoginCodeRow.expires < self._now() - KEPT_S))
            session.add(
                LoginCodeRow(sha256=bearer_token.fingerprint(code), operator=operator, expires=expires, used=None)
            )
        return code, expires

    def open_by_code(self, code: str, address: str) -> Opened:
        """A session for a code that was never used; Forbidden says one thing of every other."""
        hashed, now = bearer_token.fingerprint(code), self._now()
        with self._database.write() as session:
            good = (LoginCodeRow.sha256 == hashed, LoginCodeRow.used.is_(None), LoginCodeRow.expires > now)
            used = session.execute(update(LoginCodeRow).where(*good).values(used=now))
            row = session.get(LoginCodeRow, hashed) if used.rowcount == 1 else None  # type: ignore[attr-defined]
            operator = self._operators.living(row.operator, session) if row is not None else None
            if operator is None:
                raise Forbidden(WRONG_CODE)
        return self.open(operator, address)

    def open(self, operator: OperatorRow, address: str) -> Opened:
        """A session for an operator who has proved to be one."""
        secret, now = bearer_token.make("session"), self._now()
        with self._database.write() as session:
            session.execute(delete(BrowserSessionRow).where(BrowserSessionRow.expires < now - KEPT_S))
            session.add(
                BrowserSessionRow(
                    sha256=bearer_token.fingerprint(secret), operator=operator.name, made=now, last_seen=now,
                    expires=now + LONGEST_S, ended=None, address=address,
                )
            )  # fmt: skip
        return Opened(secret, operator, now + LONGEST_S)

    def operator_of(self, secret: str, *, using: bool = True) -> OperatorRow | None:
        """Whose session this is, if it still is one. `using` it keeps it from ending for want of use."""
        hashed, now = bearer_token.fingerprint(secret), self._now()
        with self._database.read() as session:
            row = session.get(BrowserSessionRow, hashed)
            if row is None or row.ended or row.expires <= now or row.last_seen + IDLE_S <= now:
                return None
            operator = self._operators.living(row.operator, session)
        if operator is not None and using and now - row.last_seen > SEEN_EVERY_S:
            still = (BrowserSessionRow.sha256 == hashed, BrowserSessionRow.last_seen < now)
            with self._database.write() as session:
                session.execute(update(BrowserSessionRow).where(*still).values(last_seen=now))
        return operator

    def end(self, secret: str) -> None:
        """Log out."""
        mine = (BrowserSessionRow.sha256 == bearer_token.fingerprint(secret), BrowserSessionRow.ended.is_(None))
        with self._database.write() as session:
            session.execute(update(BrowserSessionRow).where(*mine).values(ended=self._now()))


def csrf_token(secret: str) -> str:
    """What a page of this session sends with each change. Pages of others cannot know it."""
    return bearer_token.derived(secret, "edgesplit csrf 1")
