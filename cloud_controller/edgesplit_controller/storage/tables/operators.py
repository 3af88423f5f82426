"""Tables of operators, of what they prove themselves with, and of the audit log. No secret is in any of them: what is
kept of a token, a code or a session is its SHA-256."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.database import Json, Table


class OperatorRow(Table):
    """Somebody who may ask something of the controller, or once might. None is ever forgotten."""

    __tablename__ = "operators"

    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    groups: Mapped[list[Any]]
    """Of devices; empty: all of them."""
    made: Mapped[float]
    expires: Mapped[float | None]
    revoked: Mapped[float | None]
    last_seen: Mapped[float | None]


class TokenRow(Table):
    """A token of an operator."""

    __tablename__ = "operator_tokens"
    __table_args__ = (Index("tokens_of_operator", "operator"),)

    sha256: Mapped[str] = mapped_column(primary_key=True)
    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"))
    made: Mapped[float]
    revoked: Mapped[float | None]


class OperatorCertificateRow(Table):
    """A certificate that was issued to an operator."""

    __tablename__ = "operator_certificates"
    __table_args__ = (Index("certificates_of_operator", "operator"),)

    serial: Mapped[str] = mapped_column(primary_key=True)
    """Decimal."""
    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"))
    issued: Mapped[float]
    expires: Mapped[float]
    revoked: Mapped[float | None]


class LoginCodeRow(Table):
    """A code that opens one session in a browser, once."""

    __tablename__ = "login_codes"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"))
    expires: Mapped[float]
    used: Mapped[float | None]


class BrowserSessionRow(Table):
    """A browser that was let in."""

    __tablename__ = "browser_sessions"
    __table_args__ = (Index("sessions_of_operator", "operator"),)

    sha256: Mapped[str] = mapped_column(primary_key=True)
    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"))
    made: Mapped[float]
    last_seen: Mapped[float]
    expires: Mapped[float]
    ended: Mapped[float | None]
    address: Mapped[str]


class AuditRow(Table):
    """One line of the audit log. Only ever added to: the database itself refuses to change or drop one."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """From 1, without a gap."""
    at: Mapped[float]
    operator: Mapped[str]
    """Empty: it was not found out who it was."""
    serial: Mapped[str]
    """Of the certificate that was shown; empty for none."""
    address: Mapped[str]
    request: Mapped[str]
    """The request's id, as in its answer and in the log."""
    what: Mapped[str]
    subject: Mapped[str]
    outcome: Mapped[str]
    """`asked` (before it is done), then `done`, `refused` or `failed`."""
    detail: Mapped[Json]
    previous: Mapped[str]
    """The hash of the line before."""
    hash: Mapped[str]


class AuditHeadRow(Table):
    """Number and hash of the newest line; who adds one holds this row."""

    __tablename__ = "audit_head"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int]
    hash: Mapped[str]
