"""The audit log: which operator called what, on what, and how it ended, refused calls included. Entries are only
appended.

Each entry holds the hash of the previous one (a hash chain), so that a changed, removed or missing entry is detected:
`verify` names the first entry that does not fit. Database triggers refuse to change or delete an entry
(`storage.migrations`). An attacker who drops the triggers and rewrites the whole log is detected only with a hash that
was stored outside of it (`verify --expect`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy import select

from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import AuditHeadRow, AuditRow

FIRST_PREVIOUS = "0" * 64
"""The previous hash of the first entry."""
MAX_TEXT_CHARS = 200
"""Characters that are stored of a subject, or of a text in the detail."""
PAGE_ENTRIES = 1_000
"""Entries that are read from the database at once."""
CALLER_FIELDS = ("operator", "serial", "address", "request")
"""Fields that identify the caller and the request."""
FIELDS = ("number", "at", *CALLER_FIELDS, "what", "subject", "outcome", "detail", "previous")
"""Fields that the hash of an entry covers."""


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
        """Check the whole hash chain; the result is that of `verified`. With `expected`, the hash of an older entry,
        also check that this entry still exists."""
        number, hash_ = self.head()  # read first: entries may be appended during the check
        result = verify_chain(self.all(), expected)
        if result["problem"]:
            return result
        if result["lines"] < number:
            return {**result, "problem": f"the log ends at line {result['lines']}, and {number} were written"}
        if result["lines"] == number and result["hash"] != hash_:
            return {**result, "problem": f"line {number} is not the one that was written"}
        return result


def verify_chain(lines: Iterable[Mapping[str, Any]], expected: str = "") -> dict[str, Any]:
    """Check the hash chain of entries from any source, such as an export: the number of good entries (`lines`), the
    hash of the last one, and the first `problem` ("" for none)."""
    number, previous, is_found = 0, FIRST_PREVIOUS, not expected or expected == FIRST_PREVIOUS
    for line in lines:
        number += 1
        if problem := _problem(line, number, previous):
            return {"lines": number - 1, "hash": previous, "problem": problem}
        previous = str(line["hash"])
        is_found = is_found or previous == expected
    problem = "" if is_found else f"no line has the hash {expected[:64]}: the log was cut, or written anew"
    return {"lines": number, "hash": previous, "problem": problem}


def entry_hash(content: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of an entry's fields without `hash`, as JSON with sorted keys and no spaces."""
    fields = {name: content[name] for name in FIELDS}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def to_dict(row: AuditRow) -> dict[str, Any]:
    """An entry as the API returns it."""
    return {**{name: getattr(row, name) for name in FIELDS}, "hash": row.hash}


def _problem(line: Mapping[str, Any], number: int, previous: str) -> str:
    """Why `line` is not entry `number` that follows the hash `previous`; empty if it is."""
    try:
        if line["number"] != number:
            return f"line {number} is missing: after {number - 1} comes {line['number']}"
        if line["previous"] != previous:
            return f"line {number} does not follow the one before it"
        return "" if line["hash"] == entry_hash(line) else f"line {number} was changed"
    except (KeyError, TypeError, ValueError):
        return f"line {number} is damaged"


def _printable(value: str | int) -> str | int:
    """The text cut to `TEXT` characters, with unprintable ones replaced by "?": callers send it, and databases and
    terminals may fail on it."""
    if isinstance(value, int):
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in value[:MAX_TEXT_CHARS])
