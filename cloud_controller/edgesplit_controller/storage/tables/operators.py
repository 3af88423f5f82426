"""Tables of operators, their credentials, and the audit log. No table contains a secret: of a token, a code or a
session only the SHA-256 is stored."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from edgesplit_controller.storage.tables.base import Json, Table


class OperatorRow(Table):
    """A person or program that may use the controller's API, or once could. Never deleted."""

    __tablename__ = "operators"

    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    groups: Mapped[list[Any]]
    """Device groups visible to the operator; empty: all."""
    created: Mapped[float]
    expires: Mapped[float | None]
    revoked: Mapped[float | None]
    last_seen: Mapped[float | None]


class TokenRow(Table):
    """A token of an operator."""

    __tablename__ = "operator_tokens"
    __table_args__ = (Index("tokens_of_operator", "operator"),)

    sha256: Mapped[str] = mapped_column(primary_key=True)
    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"))
    created: Mapped[float]
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
    """A one-time code that opens a browser session."""

    __tablename__ = "login_codes"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"))
    expires: Mapped[float]
    used: Mapped[float | None]


class BrowserSessionRow(Table):
    """A browser session that was opened with a login code."""

    __tablename__ = "browser_sessions"
    __table_args__ = (Index("sessions_of_operator", "operator"),)

    sha256: Mapped[str] = mapped_column(primary_key=True)
    operator: Mapped[str] = mapped_column(ForeignKey("operators.name"))
    created: Mapped[float]
    last_seen: Mapped[float]
    expires: Mapped[float]
    ended: Mapped[float | None]
    address: Mapped[str]


class AuditRow(Table):
    """One entry of the audit log. Append-only: the database itself refuses to change or delete an entry."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Counted from 1, without a gap."""
    at: Mapped[float]
    operator: Mapped[str]
    """Empty if the caller was not identified."""
    serial: Mapped[str]
    """Serial number of the client certificate; empty for none."""
    address: Mapped[str]
    request: Mapped[str]
    """Id of the request, as in its response and in the log."""
    what: Mapped[str]
    subject: Mapped[str]
    outcome: Mapped[str]
    """`asked` (written before the action), then `done`, `refused` or `failed`."""
    detail: Mapped[Json]
    previous: Mapped[str]
    """Hash of the previous entry."""
    hash: Mapped[str]


class AuditHeadRow(Table):
    """Number and hash of the newest entry; locked while an entry is added."""

    __tablename__ = "audit_head"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int]
    hash: Mapped[str]
