"""Migrations: every older database gets the tables of this program, and a newer one is refused."""

from __future__ import annotations

import json
import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, inspect, text

from edgesplit.errors import UsageError
from edgesplit_controller.fleet.removal import delete_device
from edgesplit_controller.history.rollup import RollUp
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.migration_steps import known_steps
from edgesplit_controller.storage.schema import STEPS_FOLDER, known_tables, migrate, newest_step, step_of
from edgesplit_controller.storage.tables.core import (
    Deployment,
    Device,
    Model,
    ReleaseRow,
    RemovedDeviceRow,
    TelemetryRow,
)
from edgesplit_controller.storage.tables.device_state import DeviceBucketRow
from edgesplit_controller.storage.tables.replan import ProposalRow
from edgesplit_controller.storage.tables.rollout import RolloutRow


def test_migrations_create_the_tables_of_the_classes(database_url: str) -> None:
    """An empty database after every step has the tables, columns, indices and constraints of the classes."""
    Database(database_url).close()
    engine = create_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        differences = compare_metadata(context, known_tables())
    engine.dispose()
    assert differences == []


def test_a_database_without_migration_number_is_adopted(database_url: str) -> None:
    """Its content stays, missing tables are created, and it is at the newest step."""
    later = ("certificates", "floods", "behind", "gateways")
    engine = an_old_one(database_url, *(f"DROP TABLE {name}" for name in later), AN_OLD_MODEL, OLD_TELEMETRY)
    engine.dispose()
    database = Database(database_url)
    with database.read() as session:
        kept = session.get(Model, 1)
        assert kept is not None and (kept.ref, kept.bytes) == ("digits@1", 20_000_000_000)
        told = session.query(TelemetryRow).one()
        assert (told.device, told.at, told.sequence, told.from_backlog, told.content) == (
            "cam",
            2.5,
            7,
            False,
            {"a": 1},
        )
        assert set(later) <= set(inspect(session.get_bind()).get_table_names())
    database.close()
    Database(database_url).close()


def test_stored_hours_are_aggregated_into_days_and_months(database_url: str) -> None:
    """An installation from before there were days: its year is not empty, and nothing is counted twice afterwards."""
    engine = create_engine(database_url)
    migrate(engine, until="0004")
    day = 1_800_000_000 // 86_400 * 86_400.0
    content = {"requests": 2, "latency_p95_worst_s": 0.1, "celsius_max": None, "cuts": {"local": 2}, "joules_sum": 0.5}
    hotter = {**content, "latency_p95_worst_s": 0.4, "celsius_max": 70.0, "cuts": {"remote": 2}}
    with engine.begin() as connection:
        for name, group in (("cam-1", "doors"), ("cam-2", "doors")):
            connection.execute(text(A_DEVICE), {"name": name, "group": group})
        for device, model, at, told in (
            ("cam-1", "m", day, content), ("cam-1", "m", day + 3_600, hotter), ("cam-1", "m", day + 86_400, content),
            ("cam-2", "m", day, content), ("cam-2", "", day, content),
        ):  # fmt: skip
            row = {"device": device, "model": model, "begins": at, "content": json.dumps(told)}
            connection.execute(text(AN_HOUR), row)
    engine.dispose()
    database = Database(database_url)
    rolling = RollUp(database, now=lambda: day)
    first, second = rolling.device_history("cam-1", "day", day, day + 2 * 86_400)["m"]
    assert (first["requests"], first["latency_p95_worst_s"], first["celsius_max"]) == (4, 0.4, 70.0)
    assert first["cuts"] == {"local": 2, "remote": 2} and second["requests"] == 2
    (month,) = rolling.device_history("cam-1", "month", day, day + 2 * 86_400)["m"]
    assert month["requests"] == 6
    assert [bucket["requests"] for bucket in rolling.model_history("m", "hour", day, day + 7_200, ["doors"])] == [4, 2]
    assert [bucket["requests"] for bucket in rolling.model_history("m", "day", day, day + 2 * 86_400)] == [6, 2]
    assert rolling.model_history("", "day", day, day + 86_400) == []
    database.close()


def test_fields_of_stored_messages_are_renamed(database_url: str) -> None:
    """Each JSON column, over more rows than are changed at once: renamed at every depth,
    values and other fields kept."""
    engine = create_engine(database_url)
    migrate(engine, until="0008")
    reported = {"session": 3, "counter": 7, "models": [{"model": "m", "wanted": "aa", "state": "running"}]}
    message = {
        "at": 5.0, "remote_ok": True, "moment": {"at": 4.5, "boot": "b", "up_s": 1.0}, "queue": {"here": 2},
        "models": [{"model": "m", "late": 1, "trouble": ""}],
    }  # fmt: skip
    with engine.begin() as connection:
        connection.execute(text(A_DEVICE), {"name": "cam", "group": "doors"})
        connection.execute(text("UPDATE devices SET reported = :told"), {"told": json.dumps(reported)})
        for number in range(1_100):
            row = {"at": float(number), "content": json.dumps(message)}
            connection.execute(text(A_MESSAGE), row)
        for model in ("", "m"):
            row = {"device": "cam", "model": model, "begins": 0.0, "content": json.dumps({"late": 2, "remote_ok": 1})}
            connection.execute(text(AN_HOUR), row)
    engine.dispose()
    database = Database(database_url)
    with database.read() as session:
        device = session.get(Device, "cam")
        assert device is not None and device.reported == {
            "session": 3, "statement_counter": 7,
            "models": [{"model": "m", "desired_release": "aa", "state": "running"}],
        }  # fmt: skip
        assert device.birth is None
        contents = [row.content for row in session.query(TelemetryRow).all()]
        buckets = {row.model: row.content for row in session.query(DeviceBucketRow).all() if row.span_s == 3_600}
    database.close()
    assert len(contents) == 1_100 and all(content == contents[0] for content in contents)
    assert contents[0] == {
        "at": 5.0, "remote_usable": True,
        "measured_at": {"unix_s": 4.5, "boot_id": "b", "since_boot_s": 1.0}, "queue": {"in_flight": 2},
        "models": [{"model": "m", "emulation_overruns": 1, "problem": ""}],
    }  # fmt: skip
    assert buckets == {
        "": {"from_backlog": 2, "remote_usable": 1}, "m": {"emulation_overruns": 2, "remote_usable": 1},
    }  # fmt: skip


def test_fields_of_stored_proposals_carry_their_new_names(database_url: str) -> None:
    """The summary of a proposal is renamed with its drifted quantities and its rows."""
    engine = create_engine(database_url)
    migrate(engine, until="0008")
    summary = {"why": "slow", "heard": 2, "drift": [{"what": "uplink"}], "rows": [{"after": "conv1"}]}
    with engine.begin() as connection:
        connection.execute(text(AN_OLD_MODEL))
        connection.execute(
            text("INSERT INTO releases (digest, model_id, created, options) VALUES ('aa', 1, 1.0, '{}')")
        )
        connection.execute(text(A_PROPOSAL), {"told": json.dumps(summary)})
    engine.dispose()
    database = Database(database_url)
    with database.read() as session:
        (row,) = session.query(ProposalRow).all()
        assert row.summary == {
            "reason": "slow", "measured_devices": 2, "drift": [{"quantity": "uplink"}],
            "rows": [{"split_after": "conv1"}],
        }  # fmt: skip
    database.close()


def test_devices_of_a_database_without_removals_can_be_removed(database_url: str) -> None:
    """The step adds a table and leaves every row as it was."""
    engine = create_engine(database_url)
    migrate(engine, until="0009")
    values = (
        "'cam', 'p', '', '{}', '', '1', '', :key, 1.0, NULL, 7, NULL, 0.0, NULL, 0, false, NULL, NULL, NULL, NULL, 0.0"
    )
    names = (
        'name, device_class, "group", labels, link, certificate_serial, public_key_sha256, encryption_key, enrolled,'
        " revoked, counter, statement, statement_expires, restored, session, alive, last_seen, birth, reported,"
        " telemetry, changed"
    )
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO devices ({names}) VALUES ({values})"), {"key": b""})
    engine.dispose()
    database = Database(database_url)
    with database.write() as session:
        device = session.get_one(Device, "cam")
        assert device.counter == 7 and not session.query(RemovedDeviceRow).all()
        delete_device(session, device, 2.0)
    with database.read() as session:
        removed = session.get_one(RemovedDeviceRow, "cam")
        assert (removed.counter, removed.removed, removed.cleared) == (7, 2.0, False)
        assert session.get(Device, "cam") is None
    database.close()


def test_releases_of_a_database_with_rollouts_can_be_removed(database_url: str) -> None:
    """The step drops the references of the history to releases, and only those; every row stays."""
    engine = create_engine(database_url)
    migrate(engine, until="0010")
    with engine.begin() as connection:
        connection.execute(text(AN_OLD_MODEL))
        connection.execute(
            text("INSERT INTO releases (digest, model_id, created, options) VALUES ('aa', 1, 1.0, '{}')")
        )
        connection.execute(text(A_DEPLOYMENT))
        connection.execute(text(A_ROLLOUT))
    engine.dispose()
    database = Database(database_url)
    with database.write() as session:
        session.delete(session.get_one(ReleaseRow, "aa"))
    with database.read() as session:
        assert session.get_one(Deployment, 3).release == session.get_one(RolloutRow, 3).release == "aa"
    inspected = inspect(database.engine)
    references = {
        table: sorted(key["referred_table"] for key in inspected.get_foreign_keys(table))
        for table in ("deployments", "rollouts", "desired")
    }
    assert references == {
        "deployments": [], "rollouts": ["deployments"], "desired": ["deployments", "devices", "releases"],
    }  # fmt: skip
    database.close()


def test_a_database_that_lacks_a_column_is_refused(database_url: str) -> None:
    """A database older than the first step is refused with the name of the missing column."""
    engine = an_old_one(database_url, "ALTER TABLE models DROP COLUMN bindings")
    engine.dispose()
    with pytest.raises(UsageError, match=r"models .* lacks bindings"):
        Database(database_url)


def test_the_newest_step_is_the_end_of_all_steps(database_url: str) -> None:
    """The step by which a start decides, without alembic, that nothing is to be done: the one that follows every other,
    and at which alembic leaves a database."""
    Database(database_url).close()
    engine = create_engine(database_url)
    with engine.connect() as connection:
        assert step_of(connection) == newest_step() == MigrationContext.configure(connection).get_current_revision()
    engine.dispose()
    assert ScriptDirectory(str(STEPS_FOLDER)).get_heads() == [newest_step()] == [max(known_steps(STEPS_FOLDER))]


def test_a_newer_database_is_refused_unchanged(database_url: str) -> None:
    """An unknown step is reported with advice."""
    Database(database_url).close()
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UsageError, match=r"newer edgesplit .*step 9999.*restore a backup"):
        Database(database_url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()


def test_concurrent_starts_run_each_migration_once(database_url: str) -> None:
    """Eight processes open an empty database together and all find it complete."""
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


A_DEVICE = """INSERT INTO devices (name, device_class, "group", labels, link, certificate_serial, public_key_sha256,
  enrolled, counter, session, alive, encryption_key, statement_expires)
VALUES (:name, 'coral', :group, '{}', '', '1', '', 1.0, 0, 0, false, '', 0.0)"""
AN_HOUR = """INSERT INTO telemetry_rolled (device, model, span_s, begins, content)
VALUES (:device, :model, 3600, :begins, :content)"""
A_MESSAGE = """INSERT INTO telemetry (device, at, stored, session, sequence, late, dated, content)
VALUES ('cam', :at, :at, 1, :at, false, 'now', :content)"""
A_PROPOSAL = """INSERT INTO replan_proposals (model, release, device_class, "group", devices, state, told, measured,
  created, who, result)
VALUES ('digits@1', 'aa', 'coral', '', '[]', 'open', :told, '{}', 1.0, '', '')"""
A_DEPLOYMENT = """INSERT INTO deployments (id, release, model, targets, devices, options, created)
VALUES (3, 'aa', 'digits@1', '[]', '[]', '{}', 1.0)"""
A_ROLLOUT = """INSERT INTO rollouts (id, model, release, terms, state, stage, approved, excused, reason, outcome,
  following, superseded_by, rate_state, who, created, began, ended, changed)
VALUES (3, 'digits', 'aa', '{}', 'finished', 0, 0, 0, '', '', false, 0, '{}', 'me', 1.0, 1.0, 2.0, 2.0)"""
OLD_TELEMETRY = """INSERT INTO telemetry (id, device, at, content) VALUES (7, 'cam', 2.5, '{"a": 1}')"""
AN_OLD_MODEL = """
INSERT INTO models (name, version, sha256, optimised_sha256, bytes, input_text, bindings, shown, created)
VALUES ('digits', 1, 'a', 'b', 20000000000, '', '{}', '{}', 1.5)
"""


def an_old_one(url: str, *statements: str) -> Engine:
    """A database as it was before there were migrations, after these statements."""
    engine = create_engine(url)
    migrate(engine, until="0001")
    with engine.begin() as connection:
        for statement in (*statements, "DROP TABLE alembic_version"):
            connection.execute(text(statement))
    return engine
