"""The audit log: which operator called what, on what, and how it ended, refused calls included. Entries are only
appended.

Each entry holds the hash of the previous one (a hash chain), so that a changed, removed or missing entry is detected:
`verify` names the first entry that does not fit. Database triggers refuse to change or delete an entry
(`storage.migrations`). An attacker who drops the triggers and rewrites the whole log is detected only with a hash that
was stored outside of it (`verify --expect`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy import select

from edgesplit.audit_chain import CALLER_FIELDS, FIELDS, FIRST_PREVIOUS, entry_hash, verify_chain
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import AuditHeadRow, AuditRow

MAX_TEXT_CHARS = 200
"""Characters that are stored of a subject, or of a text in the detail."""
PAGE_ENTRIES = 1_000
"""Entries that are read from the database at once."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An audit log entry to be written; the log adds its number, time and hashes."""

    what: str
    outcome: str
    operator: str = ""
    serial: str = ""
    address: str = ""
    request: str = ""
    subject: str = ""
    detail: Mapping[str, str | int] = {}


class AuditLog:
    """The audit log of one installation."""

    def __init__(self, database: Database, *, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def write(self, line: AuditEntry) -> int:
        """Append an entry and return its number. It is committed to disk when this returns."""
        # The row of the chain's head is locked first, so that processes append one after the other: two entries
        # with the same previous hash would break the chain.
        with self._database.write() as session:
            head = session.scalars(select(AuditHeadRow).where(AuditHeadRow.id == 1).with_for_update()).one_or_none()
            if head is None:
                head = AuditHeadRow(id=1, number=0, hash=FIRST_PREVIOUS)
                session.add(head)
            content = {
                "number": head.number + 1,
                "at": round(self._now(), 3),
                **{name: _printable(getattr(line, name)) for name in (*CALLER_FIELDS, "what", "subject")},
                "outcome": line.outcome,
                "detail": {key: _printable(value) for key, value in line.detail.items()},
                "previous": head.hash,
            }
            row = AuditRow(**content, hash=entry_hash(content))
            session.add(row)
            head.number, head.hash = row.number, row.hash
            return row.number

    def newest(self, count: int, before: int = 0) -> list[dict[str, Any]]:
        """The newest entries, only those before number `before` if that is given, oldest first."""
        query = select(AuditRow).order_by(AuditRow.number.desc()).limit(count)
        with self._database.read() as session:
            rows = session.scalars(query.where(AuditRow.number < before) if before else query).all()
        return [to_dict(row) for row in reversed(rows)]

    def all(self) -> Iterator[dict[str, Any]]:
        """Every entry, oldest first, read a page at a time."""
        last = 0
        while True:
            query = select(AuditRow).where(AuditRow.number > last).order_by(AuditRow.number).limit(PAGE_ENTRIES)
            with self._database.read() as session:
                rows = session.scalars(query).all()
            if not rows:
                return
            yield from (to_dict(row) for row in rows)
            last = rows[-1].number

    def head(self) -> tuple[int, str]:
        """Number and hash of the newest entry, as stored separately from the entries."""
        with self._database.read() as session:
            row = session.get(AuditHeadRow, 1)
            return (row.number, row.hash) if row is not None else (0, FIRST_PREVIOUS)

    def verify(self, expected: str = "") -> dict[str, Any]:
        """Check the whole hash chain; the result is that of `verify_chain`. With `expected`, the hash of an older
        entry, also check that this entry still exists."""
        number, hash_ = self.head()  # read first: entries may be appended during the check
        result = verify_chain(self.all(), expected)
        if result["problem"]:
            return result
        if result["lines"] < number:
            return {**result, "problem": f"the log ends at line {result['lines']}, and {number} were written"}
        if result["lines"] == number and result["hash"] != hash_:
            return {**result, "problem": f"line {number} is not the one that was written"}
        return result


def to_dict(row: AuditRow) -> dict[str, Any]:
    """An entry as the API returns it."""
    return {**{name: getattr(row, name) for name in FIELDS}, "hash": row.hash}


def _printable(value: str | int) -> str | int:
    """The text cut to `MAX_TEXT_CHARS` characters, with unprintable ones replaced by "?": callers send it, and
    databases and terminals may fail on it."""
    if isinstance(value, int):
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in value[:MAX_TEXT_CHARS])
