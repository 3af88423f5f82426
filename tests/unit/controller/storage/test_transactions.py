"""Transactions on SQLite and PostgreSQL: isolation, telemetry beside writers, and database errors as errors of the
SDK."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from edgesplit.errors import Busy, UsageError
from edgesplit_controller.storage import engines
from edgesplit_controller.storage.database import Database, lock_device, record_event
from edgesplit_controller.storage.engines import Unavailable, parse_url
from edgesplit_controller.storage.tables.core import Device, Event, TelemetryRow
from support.postgres import Postgres

PATIENCE_S = 60.0


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database(database_url)
    yield opened
    opened.close()


def on_postgresql(postgres: Postgres) -> Database:
    return Database(postgres.database())


def a_device(name: str, **more: object) -> Device:
    given: dict[str, object] = {
        "name": name, "device_class": "x", "group": "", "labels": {}, "link": "", "certificate_serial": "1",
        "public_key_sha256": "", "enrolled": 0.0, "revoked": None, "statement": None, "last_seen": None,
        "birth": None, "reported": None, "telemetry": None,
    }  # fmt: skip
    return Device(**{**given, **more})


def in_threads(*works: Callable[[], None]) -> None:
    """Run them at once; the first error rises."""
    problems: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    if problems:
        raise problems[0]


def test_read_modify_write_loses_no_update(database: Database) -> None:
    """Eight writers increment one number after reading it: none of 80 increments is lost."""
    with database.write() as session:
        session.add(a_device("cam", counter=0))

    def count() -> None:
        for _ in range(10):
            with database.write() as session:
                device = session.get(Device, "cam")
                assert device is not None
                device.counter += 1

    in_threads(*[count] * 8)
    with database.read() as session:
        assert session.scalars(select(Device.counter)).one() == 80


def test_a_read_transaction_sees_one_snapshot(database: Database) -> None:
    """What is committed while it reads is visible to the next one."""
    with database.write() as session:
        record_event(session, 1.0, "me", "began", "")
    with database.read() as reader:
        assert len(reader.scalars(select(Event)).all()) == 1
        with database.write() as session:
            record_event(session, 2.0, "me", "went on", "")
        assert len(reader.scalars(select(Event.id)).all()) == 1
    with database.read() as reader:
        assert len(reader.scalars(select(Event.id)).all()) == 2


def test_a_block_that_raises_is_rolled_back(database: Database) -> None:
    """Nothing of it is stored."""
    for transaction in (database.write, database.write_concurrent):
        with pytest.raises(RuntimeError), transaction() as session:
            session.add(a_device("cam"))
            session.flush()
            raise RuntimeError
    with database.read() as session:
        assert session.get(Device, "cam") is None


def test_telemetry_is_stored_beside_an_open_writer(postgres: Postgres) -> None:
    """On PostgreSQL, in the middle of a deployment's transaction."""
    database = on_postgresql(postgres)
    with database.write() as session:
        session.add_all([a_device("told"), a_device("heard")])
    with database.write() as writer:
        writer.execute(update(Device).where(Device.name == "told").values(counter=7))

        def hear() -> None:
            with database.write_concurrent(["heard"]) as session:
                session.add(TelemetryRow(device="heard", at=1.0, stored=1.0, session=1, sequence=0, content={}))

        in_threads(hear)
        assert len(writer.scalars(select(TelemetryRow)).all()) == 1
    database.close()


def test_a_locked_device_row_blocks_writes_to_that_device_only(postgres: Postgres) -> None:
    """On PostgreSQL, a device's message waits for a writer that holds that device, and for no other."""
    database = on_postgresql(postgres)
    with database.write() as session:
        session.add_all([a_device("a", session=1), a_device("b", session=1)])
    writing, heard = threading.Event(), threading.Event()

    def hear(*names: str) -> Callable[[], None]:
        def work() -> None:
            assert writing.wait(PATIENCE_S)
            with database.write_concurrent(names) as session:
                for name in names:
                    found = session.get(Device, name)
                    assert found is not None
                    found.session += 10
            heard.set()

        return work

    def write() -> None:
        with database.write() as session:
            device = lock_device(session, "a")
            assert device is not None
            writing.set()
            assert heard.wait(PATIENCE_S), "the other device had to wait"
            device.session *= 100

    in_threads(write, hear("b"))
    heard.clear()
    writing.clear()
    in_threads(hear("b", "a"), hear("a", "b"), writing.set)
    with database.read() as session:
        assert session.scalars(select(Device.session).order_by(Device.name)).all() == [120, 31]
    database.close()


def test_a_deadlock_is_reported_as_busy(postgres: Postgres) -> None:
    """Of two transactions that hold what the other wants, one is refused with a retry hint, the other commits, and
    nothing is half done."""
    database = on_postgresql(postgres)
    with database.write() as session:
        session.add_all([a_device("a"), a_device("b")])
    meeting = threading.Barrier(2)
    told: list[Busy] = []

    def both(first: str, second: str) -> Callable[[], None]:
        def work() -> None:
            try:
                with database.write_concurrent() as session:
                    session.execute(update(Device).where(Device.name == first).values(counter=Device.counter + 1))
                    meeting.wait(PATIENCE_S)
                    session.execute(update(Device).where(Device.name == second).values(counter=Device.counter + 1))
            except Busy as error:
                told.append(error)

        return work

    in_threads(both("a", "b"), both("b", "a"))
    assert len(told) == 1
    with database.read() as session:
        assert session.scalars(select(Device.counter)).all() == [1, 1]
    database.close()


def test_a_restarted_database_is_reconnected(postgres: Postgres) -> None:
    """PostgreSQL dies in the middle of a transaction: the transaction is lost as unavailable; then queries work
    again."""
    database = on_postgresql(postgres)
    with pytest.raises(Unavailable), database.write() as session:
        session.add(a_device("half"))
        session.flush()
        postgres.kill()
    with pytest.raises(Unavailable), database.read() as session:
        session.get(Device, "half")
    postgres.start()
    with database.write() as session:
        assert session.get(Device, "half") is None
        session.add(a_device("whole"))
    with database.read() as session:
        assert session.get(Device, "whole") is not None
    database.close()


def test_a_connection_lost_in_a_savepoint_is_unavailable(postgres: Postgres) -> None:
    """The error of the rollback does not hide the first error."""
    database = on_postgresql(postgres)
    with pytest.raises(Unavailable), database.write() as session:
        try:
            with session.begin_nested():
                session.add(a_device("half"))
                session.flush()
                postgres.kill()
                session.add(a_device("other"))
                session.flush()
        finally:
            postgres.start()
    with database.read() as session:
        assert session.get(Device, "half") is None
    database.close()


def test_an_exhausted_connection_pool_is_reported_as_busy(postgres: Postgres) -> None:
    """Every connection is taken for longer than the timeout."""
    limits = engines.EngineLimits(lock_timeout_s=1, pool_size=1, pool_overflow=0)
    database = Database(postgres.database(), limits)
    with database.read() as session:
        session.get(Device, "cam")
        with pytest.raises(Busy, match="too many"), database.read() as other:
            other.get(Device, "cam")
    database.close()


def test_non_finite_numbers_are_stored_as_null(database: Database) -> None:
    """Telemetry may hold them, but JSON has none: every stored value can be read."""
    with database.write() as session:
        odd = {"nan": float("nan"), "inf": float("inf"), "nul": "\0"}
        session.add(TelemetryRow(device="cam", at=1.0, stored=1.0, session=1, sequence=0, content=odd))
    with database.read() as session:
        assert session.scalars(select(TelemetryRow.content)).one() == {"nan": None, "inf": None, "nul": "\0"}


def test_text_with_nul_is_a_usage_error(postgres: Postgres) -> None:
    """PostgreSQL stores no NUL: refused in queries as in writes."""
    database = on_postgresql(postgres)
    with pytest.raises(UsageError, match="NUL"), database.read() as session:
        session.get(Device, "a\0b")
    with pytest.raises(UsageError, match="NUL"), database.write() as session:
        record_event(session, 1.0, "me", "did", "a\0b")
    database.close()


def test_a_full_disk_is_unavailable_and_rolls_back(tmp_path: object) -> None:
    """SQLite without room: nothing half done, and it works again once there is room."""
    database = Database(f"sqlite:///{tmp_path}/c.db")

    def limit(session: Session, pages: int) -> int:
        return int(session.connection().exec_driver_sql(f"PRAGMA max_page_count = {pages}").scalar_one())

    with database.read() as session:
        before = limit(session, 1)
    with pytest.raises(Unavailable, match=r"disk .* is full"), database.write() as session:
        session.add(a_device("cam"))
        session.add_all(
            TelemetryRow(device="cam", at=1.0, stored=1.0, session=1, sequence=number, content={"x": "y" * 3_000})
            for number in range(100)
        )
    with database.read() as session:
        assert session.get(Device, "cam") is None and limit(session, before + 1_000)
    with database.write() as session:
        session.add(a_device("cam"))
    database.close()


def test_a_constraint_violation_keeps_its_error(database: Database) -> None:
    """Two rows of one key are no unavailability of the database."""
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(a_device("cam"))
        session.flush()
        session.execute(Device.__table__.insert().from_select(["name"], select(Device.name)))


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("postgresql://me:secret@db/edgesplit", "postgresql+psycopg://me:***@db/edgesplit"),
        ("postgres://db/edgesplit", "postgresql+psycopg://db/edgesplit"),
        ("postgresql+psycopg2:///edgesplit?host=/run", "postgresql+psycopg:///edgesplit?host=%2Frun"),
        ("sqlite:////tmp/c.db", "sqlite:////tmp/c.db"),
    ],
)
def test_supported_database_urls_are_accepted(url: str, meant: str) -> None:
    """Every spelling for PostgreSQL uses the driver that is installed."""
    assert repr(parse_url(url)) == meant


@pytest.mark.parametrize(
    "url", ["", "mysql://db/x", "postgresql://db", "sqlite://", "http://[", "no url", "sqlite+x://a"]
)
def test_unsupported_database_urls_are_refused(url: str) -> None:
    """With what is meant, or what is missing."""
    with pytest.raises(UsageError, match=r"--database|names no database"):
        engines.open_engine(url)


def test_sqlite_reports_busy_after_the_lock_timeout(tmp_path: object) -> None:
    """Another program holds the file."""
    database = Database(f"sqlite:///{tmp_path}/c.db", engines.EngineLimits(lock_timeout_s=0))
    other = sqlite3.connect(f"{tmp_path}/c.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy), database.write() as session:
        session.add(a_device("cam"))
    other.close()
    with database.write() as session:
        session.add(a_device("cam"))
    database.close()
