"""The audit log: on SQLite and on PostgreSQL, lines are only added, and what was done to them otherwise is noticed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from edgesplit.audit_chain import FIRST_PREVIOUS, verify_chain
from edgesplit_controller.access.audit_log import AuditEntry, AuditLog
from edgesplit_controller.storage.database import Database


@pytest.fixture
def audit(database_url: str) -> Iterator[AuditLog]:
    database = Database(database_url)
    yield AuditLog(database, now=lambda: 1_800_000_000.123456)
    database.close()


def filled(audit: AuditLog, count: int = 5) -> list[dict[str, Any]]:
    for number in range(count):
        audit.write(
            AuditEntry(what="DELETE /v1/devices/{name}", outcome="done", operator="alice", subject=f"cam-{number}")
        )
    return list(audit.all())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET operator = 'mallory' WHERE number = 2",
        "DELETE FROM audit WHERE number = 5",
        "DELETE FROM audit",
        "UPDATE audit SET number = 9 WHERE number = 5",
    ],
)
def test_the_database_refuses_to_change_or_drop_a_line(audit: AuditLog, database_url: str, statement: str) -> None:
    """Whatever program asks, by the database's own triggers."""
    before = filled(audit)
    engine = create_engine(database_url)
    with pytest.raises(DBAPIError, match="only ever added to"), engine.begin() as connection:
        connection.execute(text(statement))
    others = {
        "sqlite": "INSERT OR REPLACE INTO audit SELECT number, at, 'mallory', serial, address, request, what, subject,"
        " outcome, detail, previous, hash FROM audit WHERE number = 2",
        "postgresql": "TRUNCATE audit",
    }
    with pytest.raises(DBAPIError), engine.begin() as connection:
        connection.execute(text(others[engine.dialect.name]))
    engine.dispose()
    assert list(audit.all()) == before and audit.verify()["problem"] == ""


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Five lines, as an export has them."""
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('audit') / 'controller.db'}")
    lines = filled(AuditLog(database, now=lambda: 1_800_000_000.123456))
    database.close()
    return lines


def without(number: int) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda lines: [line for line in lines if line["number"] != number]


def changed(name: str, value: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda lines: [{**line, name: value} if line["number"] == 3 else line for line in lines]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (changed("operator", "mallory"), "line 3 was changed"),
        (changed("at", 1.0), "line 3 was changed"),
        (changed("detail", {"status": 403}), "line 3 was changed"),
        (changed("hash", "0" * 64), "line 3 was changed"),
        (changed("previous", "0" * 64), "line 3 does not follow"),
        (changed("detail", object()), "line 3 is damaged"),
        (lambda lines: [{} if line["number"] == 3 else line for line in lines], "line 3 is damaged"),
        (without(1), "line 1 is missing"),
        (without(3), "line 3 is missing"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1 is missing"),
        (lambda lines: [*lines, lines[-1]], "line 6 is missing"),
        (lambda lines: lines, ""),
    ],
)
def test_a_line_that_was_changed_dropped_moved_or_doubled_is_named(
    five: list[dict[str, Any]], harm: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], said: str
) -> None:
    """Of an export, as of the database."""
    lines = copy.deepcopy(five)
    found = verify_chain(harm(lines))
    assert said in found["problem"] and bool(said) == bool(found["problem"])


def test_a_cut_at_the_end_and_a_log_that_was_written_anew_are_noticed(database_url: str) -> None:
    """By somebody who dropped the triggers: against the number noted apart, and against a hash noted elsewhere."""
    database = Database(database_url)
    audit = AuditLog(database, now=lambda: 1.0)
    lines = filled(audit)
    noted = lines[3]["hash"]
    assert audit.verify(noted)["problem"] == "" and audit.verify(FIRST_PREVIOUS)["problem"] == ""
    engine = create_engine(database_url)
    guards = {
        "sqlite": ["DROP TRIGGER audit_not_update", "DROP TRIGGER audit_not_delete"],
        "postgresql": ["DROP TRIGGER audit_only_added ON audit", "DROP TRIGGER audit_not_emptied ON audit"],
    }
    with engine.begin() as connection:
        for statement in guards[engine.dialect.name]:
            connection.execute(text(statement))
        connection.execute(text("DELETE FROM audit WHERE number = 5"))
    assert "ends at line 4, and 5 were written" in audit.verify()["problem"]
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM audit"))
        connection.execute(text(f"UPDATE audit_head SET number = 0, hash = '{FIRST_PREVIOUS}'"))
    engine.dispose()
    audit.write(AuditEntry(what="another life", outcome="done"))
    assert audit.verify()["problem"] == ""
    assert "was truncated or rewritten" in audit.verify(noted)["problem"]
    database.close()


def test_lines_written_at_once_are_all_there_in_one_chain(database_url: str) -> None:
    """Several threads with databases of their own, as several controller processes have."""
    problems: list[BaseException] = []

    def write() -> None:
        try:
            database = Database(database_url)
            filled(AuditLog(database, now=lambda: 1.0), 10)
            database.close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    database = Database(database_url)
    assert AuditLog(database, now=lambda: 1.0).verify()["lines"] == 40
    assert AuditLog(database, now=lambda: 1.0).verify()["problem"] == ""
    database.close()


def test_what_callers_send_fits_and_commands_no_terminal(audit: AuditLog) -> None:
    """Long, with zeros and escapes: cut and made harmless, on both databases."""
    audit.write(
        AuditEntry(what="GET /\x00", outcome="refused", subject="\x1b[2J" + "x" * 10_000, detail={"a": "\u202e\x00"})
    )
    (line,) = audit.newest(1)
    assert line["what"] == "GET /?" and line["detail"] == {"a": "??"}
    assert line["subject"].startswith("?[2J") and len(line["subject"]) == 200
    assert audit.verify()["problem"] == ""


def test_lines_are_read_in_pages(audit: AuditLog) -> None:
    """The newest, and those before a number."""
    filled(audit, 7)
    assert [line["number"] for line in audit.newest(3)] == [5, 6, 7]
    assert [line["number"] for line in audit.newest(3, before=5)] == [2, 3, 4]
    assert audit.newest(3, before=1) == []
