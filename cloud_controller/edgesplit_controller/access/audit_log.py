"""The audit log: who asked for what, of what, and how it ended, refused calls too. Lines are only ever added.

Each line holds the hash of the line before, so that a change, a cut or a gap is noticed: `verify` names the first line
that does not fit. The database's own triggers refuse to change or drop a line (`migrations`); whoever can drop the
triggers and write the whole log anew is noticed only by whoever kept an older hash elsewhere (`verify --expect`).
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

FIRST = "0" * 64
TEXT = 200
"""Letters that are kept of a subject, or of a text in the detail."""
PAGE = 1_000
WHO = ("operator", "serial", "address", "request")
FIELDS = ("number", "at", *WHO, "what", "subject", "outcome", "detail", "previous")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What is written down."""

    what: str
    outcome: str
    operator: str = ""
    serial: str = ""
    address: str = ""
    request: str = ""
    subject: str = ""
    detail: Mapping[str, str | int] = {}


class Audit:
    """The audit log of one installation."""

    def __init__(self, database: Database, *, now: Callable[[], float]) -> None:
        self._database = database
        self._now = now

    def write(self, line: Line) -> int:
        """Add a line; its number. It is on disk when this returns."""
        with self._database.write() as session:
            head = session.scalars(select(AuditHeadRow).where(AuditHeadRow.id == 1).with_for_update()).one_or_none()
            if head is None:
                head = AuditHeadRow(id=1, number=0, hash=FIRST)
                session.add(head)
            content = {
                "number": head.number + 1,
                "at": round(self._now(), 3),
                **{name: _short(getattr(line, name)) for name in (*WHO, "what", "subject")},
                "outcome": line.outcome,
                "detail": {key: _short(value) for key, value in line.detail.items()},
                "previous": head.hash,
            }
            row = AuditRow(**content, hash=line_hash(content))
            session.add(row)
            head.number, head.hash = row.number, row.hash
            return row.number

    def newest(self, count: int, before: int = 0) -> list[dict[str, Any]]:
        """The newest lines (those before number `before`, if given), oldest first."""
        wanted = select(AuditRow).order_by(AuditRow.number.desc()).limit(count)
        with self._database.read() as session:
            rows = session.scalars(wanted.where(AuditRow.number < before) if before else wanted).all()
        return [shown_line(row) for row in reversed(rows)]

    def all(self) -> Iterator[dict[str, Any]]:
        """Every line, oldest first, a page at a time."""
        last = 0
        while True:
            wanted = select(AuditRow).where(AuditRow.number > last).order_by(AuditRow.number).limit(PAGE)
            with self._database.read() as session:
                rows = session.scalars(wanted).all()
            if not rows:
                return
            yield from (shown_line(row) for row in rows)
            last = rows[-1].number

    def head(self) -> tuple[int, str]:
        """Number and hash of the newest line, as noted apart from the lines."""
        with self._database.read() as session:
            row = session.get(AuditHeadRow, 1)
            return (row.number, row.hash) if row is not None else (0, FIRST)

    def verify(self, expected: str = "") -> dict[str, Any]:
        """Is every line what was written? With the hash of an older line in `expected`: is that one still there?"""
        number, hash_ = self.head()  # before the lines: more may be added while they are read
        verdict = verified(self.all(), expected)
        if verdict["problem"]:
            return verdict
        if verdict["lines"] < number:
            return {**verdict, "problem": f"the log ends at line {verdict['lines']}, and {number} were written"}
        if verdict["lines"] == number and verdict["hash"] != hash_:
            return {**verdict, "problem": f"line {number} is not the one that was written"}
        return verdict


def verified(lines: Iterable[Mapping[str, Any]], expected: str = "") -> dict[str, Any]:
    """The same of lines from anywhere, as in an export: how many, the last one's hash, and what is wrong (or "")."""
    number, previous, seen = 0, FIRST, not expected or expected == FIRST
    for line in lines:
        number += 1
        if problem := _problem(line, number, previous):
            return {"lines": number - 1, "hash": previous, "problem": problem}
        previous = str(line["hash"])
        seen = seen or previous == expected
    problem = "" if seen else f"no line has the hash {expected[:64]}: the log was cut, or written anew"
    return {"lines": number, "hash": previous, "problem": problem}


def line_hash(content: Mapping[str, Any]) -> str:
    """SHA-256 of a line's fields but `hash`, as JSON with sorted keys and no spaces."""
    fields = {name: content[name] for name in FIELDS}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def shown_line(row: AuditRow) -> dict[str, Any]:
    """A line as the API shows it."""
    return {**{name: getattr(row, name) for name in FIELDS}, "hash": row.hash}


def _problem(line: Mapping[str, Any], number: int, previous: str) -> str:
    """What is wrong with a line that should be of this number and follow that hash; empty for nothing."""
    try:
        if line["number"] != number:
            return f"line {number} is missing: after {number - 1} comes {line['number']}"
        if line["previous"] != previous:
            return f"line {number} does not follow the one before it"
        return "" if line["hash"] == line_hash(line) else f"line {number} was changed"
    except (KeyError, TypeError, ValueError):
        return f"line {number} is damaged"


def _short(value: str | int) -> str | int:
    """Text that fits: what callers send is cut, and no letter is kept that a database or a terminal chokes on."""
    if isinstance(value, int):
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in value[:TEXT])
