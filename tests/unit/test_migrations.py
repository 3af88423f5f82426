"""Migrations: every database comes to the tables of this program, whatever it was, and a newer one is left alone."""

from __future__ import annotations

import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, inspect, text

from edgesplit.errors import UsageError
from edgesplit_controller.database import Database, Device, Model, TelemetryRow
from edgesplit_controller.schema import bring_up_to_date, known_tables


def test_the_steps_make_the_tables_that_the_program_knows(database_url: str) -> None:
    """An empty database that took every step has the tables, columns, indices and constraints of the classes."""
    Database(database_url).close()
    engine = create_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        differences = compare_metadata(context, known_tables())
    engine.dispose()
    assert differences == []


def test_a_database_from_before_migrations_is_adopted(database_url: str) -> None:
    """What is in it stays, what it lacks is made, and it is at the newest step."""
    later = ("certificates", "floods", "behind", "gateways")
    engine = an_old_one(database_url, *(f"DROP TABLE {name}" for name in later), AN_OLD_MODEL, OLD_TELEMETRY)
    engine.dispose()
    database = Database(database_url)
    with database.read() as session:
        kept = session.get(Model, 1)
        assert kept is not None and (kept.ref, kept.bytes) == ("digits@1", 20_000_000_000)
        told = session.query(TelemetryRow).one()
        assert (told.device, told.at, told.sequence, told.late, told.content) == ("cam", 2.5, 7, False, {"a": 1})
        assert set(later) <= set(inspect(session.get_bind()).get_table_names())
    database.close()
    Database(database_url).close()


def test_a_database_that_lacks_a_column_is_not_adopted(database_url: str) -> None:
    """One made by a program older than the first step is refused by the name of what it lacks."""
    engine = an_old_one(database_url, "ALTER TABLE models DROP COLUMN bindings")
    engine.dispose()
    with pytest.raises(UsageError, match=r"models .* lacks bindings"):
        Database(database_url)


def test_a_newer_database_is_refused_untouched(database_url: str) -> None:
    """A step that this program does not know: it says so, says what to do, and changes nothing."""
    Database(database_url).close()
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UsageError, match=r"newer edgesplit .*step 9999.*restore a backup"):
        Database(database_url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()


def test_controllers_that_start_at_once_take_each_step_once(database_url: str) -> None:
    """Eight open an empty database together: all of them find it whole."""
    problems: list[BaseException] = []

    def start() -> None:
        try:
            database = Database(database_url)
            with database.read() as session:
                assert session.query(Device).count() == 0
            database.close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_the_password_of_a_database_is_not_in_an_error() -> None:
    """What cannot be opened is named without what opens it."""
    with pytest.raises(UsageError) as refused:
        Database("postgresql+psycopg://me:secret@127.0.0.1:1/nothing")
    assert "secret" not in str(refused.value) and "127.0.0.1" in str(refused.value)


OLD_TELEMETRY = """INSERT INTO telemetry (id, device, at, content) VALUES (7, 'cam', 2.5, '{"a": 1}')"""
AN_OLD_MODEL = """
INSERT INTO models (name, version, sha256, optimised_sha256, bytes, input_text, bindings, shown, created)
VALUES ('digits', 1, 'a', 'b', 20000000000, '', '{}', '{}', 1.5)
"""


def an_old_one(url: str, *statements: str) -> Engine:
    """A database as it was before there were migrations, after these statements."""
    engine = create_engine(url)
    bring_up_to_date(engine, until="0001")
    with engine.begin() as connection:
        for statement in (*statements, "DROP TABLE alembic_version"):
            connection.execute(text(statement))
    return engine
