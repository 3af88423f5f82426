"""How a database is opened: SQLite in a file, or PostgreSQL by URL; and what its troubles are called here.

Leaves to others: which transactions there are (`database`), and which tables (`schema`).
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError, TimeoutError

from edgesplit.errors import Busy, EdgeError, LinkError, UsageError

POSTGRESQL = "postgresql"
MEANT = "--database is postgresql://USER:PASSWORD@HOST/NAME or sqlite:////PATH/FILE"
WRITER_LOCK = 0x65646765_73706C70
"""PostgreSQL's number of the lock that `Database.write` takes."""
WAIT_S = 30
"""So long a transaction waits for another; then it is told to come back."""
IDLE_S = 120
"""PostgreSQL ends a transaction whose process stopped in the middle of it, so that the others go on."""
POOL, OVERFLOW = 4, 12
"""Connections to PostgreSQL that a process keeps, and how many more it takes when it is busy."""


class Unavailable(LinkError):
    """The database does not answer or has no room. Nothing was changed; the same call may succeed later."""


def open_engine(url: str) -> Engine:
    """The engine for `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`; UsageError for anything else."""
    known = parse_url(url)
    if known.get_backend_name() == POSTGRESQL:
        arguments: dict[str, Any] = {"connect_timeout": "5", "application_name": "edgesplit"}
        arguments = {name: value for name, value in arguments.items() if name not in known.query}
        engine = create_engine(
            known, connect_args=arguments, pool_size=POOL, max_overflow=OVERFLOW, pool_timeout=WAIT_S,
            pool_pre_ping=True, json_serializer=_json, json_deserializer=msgspec.json.decode,
        )  # fmt: skip
        _tune_postgresql(engine)
    else:
        engine = create_engine(known, json_serializer=_json, json_deserializer=msgspec.json.decode)
        _tune_sqlite(engine)
    return engine


def parse_url(url: str) -> URL:
    """A database's URL with the driver that we use."""
    try:
        known = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise UsageError(MEANT) from error
    if known.get_backend_name() in ("postgres", POSTGRESQL):
        if not known.database:
            raise UsageError(f"the database URL {known!r} names no database, as in postgresql://HOST/edgesplit")
        return known.set(drivername="postgresql+psycopg")
    if known.drivername in ("sqlite", "sqlite+pysqlite") and known.database:
        return known
    raise UsageError(MEANT)


def shown(engine: Engine) -> str:
    """The database as people know it, without a password."""
    return engine.url.database or "" if engine.dialect.name == "sqlite" else repr(engine.url)


def in_our_words(error: SQLAlchemyError, engine: Engine) -> EdgeError | None:
    """What a trouble of the database means to callers; None where it is a fault of ours."""
    if isinstance(error, TimeoutError):
        return Busy("too many calls wait for the database; try again")
    if not isinstance(error, DBAPIError):
        return _in_its_wake(error, engine)
    cause = error.orig
    if cause is None or isinstance(error, IntegrityError):
        return None
    said = str(cause).strip().partition("\n")[0]
    state = getattr(cause, "sqlstate", None) or ""
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, DataError) or "NUL (0x00)" in said:
        return UsageError(f"the database cannot keep this: {said}")
    if state[:2] == "40" or state == "55P03" or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Busy("others change the same just now; try again")
    if state == "53100" or code == sqlite3.SQLITE_FULL:
        return Unavailable(f"the disk of the database {shown(engine)} is full; free some of it, nothing was changed")
    away = isinstance(error, DBAPIError) and error.connection_invalidated
    if away or state[:2] in ("08", "53", "57") or (state == "" and engine.dialect.name == POSTGRESQL):
        return Unavailable(f"the database {shown(engine)} does not answer: {said}")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return Unavailable(f"the database {shown(engine)} cannot be used: {said}")
    return None


def _in_its_wake(error: SQLAlchemyError, engine: Engine) -> EdgeError | None:
    """A transaction that lost its connection fails again where it is taken back: the first failure is what counts."""
    before = error.__cause__ or error.__context__
    if not isinstance(before, SQLAlchemyError):
        return None
    told = in_our_words(before, engine)
    return told if isinstance(told, Unavailable) else None


def _json(value: Any) -> str:
    """As JSON has it: numbers that are none become null."""
    return msgspec.json.encode(value).decode()


def _tune_sqlite(engine: Engine) -> None:
    """WAL with every commit synced; transactions begun by us, for the driver's own would begin too late."""

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={WAIT_S}000", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reading = connection.get_execution_options().get("edgesplit", "write") == "read"
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _tune_postgresql(engine: Engine) -> None:
    """Nobody waits for ever; writers come one at a time."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.execute(f"SET lock_timeout = '{WAIT_S}s'")
        connection.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_S}s'")
        connection.commit()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("edgesplit", "") == "write":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})"))
