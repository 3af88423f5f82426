"""Opens database engines (SQLite in a file, or PostgreSQL by URL) and translates their errors.

Leaves to others: which transactions there are (`database`), and which tables (`schema`).
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError, TimeoutError

from edgesplit.errors import Busy, EdgeError, LinkError, UsageError

POSTGRESQL = "postgresql"
URL_HELP = "--database is postgresql://USER:PASSWORD@HOST/NAME or sqlite:////PATH/FILE"
"""Error text for an unusable database URL."""
WRITER_LOCK = 0x65646765_73706C70
"""Key of the PostgreSQL advisory lock that `Database.write` takes."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Time-outs and connections of an engine."""

    lock_timeout_s: int = 30
    """How long a transaction waits for a lock, or for a connection, before it fails as `Busy`."""
    idle_timeout_s: int = 120
    """PostgreSQL aborts a transaction that is idle for this long, as when its process was suspended, so that others
    continue."""
    pool_size: int = 4
    """PostgreSQL connections that a process keeps open."""
    pool_overflow: int = 12
    """PostgreSQL connections that a process opens beyond these under load."""


DEFAULT_LIMITS = EngineLimits()


class Unavailable(LinkError):
    """The database does not answer or has no space. Nothing was changed; the same call may succeed later."""


def open_engine(url: str, limits: EngineLimits = DEFAULT_LIMITS) -> Engine:
    """The engine for `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`; UsageError for anything else."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == POSTGRESQL:
        arguments: dict[str, Any] = {"connect_timeout": "5", "application_name": "edgesplit"}
        arguments = {name: value for name, value in arguments.items() if name not in parsed.query}
        engine = create_engine(
            parsed, connect_args=arguments, pool_size=limits.pool_size, max_overflow=limits.pool_overflow,
            pool_timeout=limits.lock_timeout_s, pool_pre_ping=True,
            json_serializer=_json, json_deserializer=msgspec.json.decode,
        )  # fmt: skip
        _tune_postgresql(engine, limits)
    else:
        engine = create_engine(parsed, json_serializer=_json, json_deserializer=msgspec.json.decode)
        _tune_sqlite(engine, limits)
    return engine


def parse_url(url: str) -> URL:
    """A database URL with the driver that is installed; UsageError for an unsupported one."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise UsageError(URL_HELP) from error
    if parsed.get_backend_name() in ("postgres", POSTGRESQL):
        if not parsed.database:
            raise UsageError(f"the database URL {parsed!r} names no database, as in postgresql://HOST/edgesplit")
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite") and parsed.database:
        return parsed
    raise UsageError(URL_HELP)


def display_name(engine: Engine) -> str:
    """The database's file or URL without a password, for messages."""
    return engine.url.database or "" if engine.dialect.name == "sqlite" else repr(engine.url)


def translate_error(error: SQLAlchemyError, engine: Engine) -> EdgeError | None:
    """The error that callers receive for a database error; None for a bug of ours, which is not translated."""
    if isinstance(error, TimeoutError):
        return Busy("too many calls wait for the database; try again")
    if not isinstance(error, DBAPIError):
        return _translate_original(error, engine)
    cause = error.orig
    if cause is None or isinstance(error, IntegrityError):
        return None
    message = str(cause).strip().partition("\n")[0]
    state = getattr(cause, "sqlstate", None) or ""
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, DataError) or "NUL (0x00)" in message:
        return UsageError(f"the database cannot store this: {message}")
    if state[:2] == "40" or state == "55P03" or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Busy("the same rows are being changed by another call; try again")
    if state == "53100" or code == sqlite3.SQLITE_FULL:
        return Unavailable(
            f"the disk of the database {display_name(engine)} is full; free some of it, nothing was changed"
        )
    is_disconnected = isinstance(error, DBAPIError) and error.connection_invalidated
    if is_disconnected or state[:2] in ("08", "53", "57") or (state == "" and engine.dialect.name == POSTGRESQL):
        return Unavailable(f"the database {display_name(engine)} does not answer: {message}")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return Unavailable(f"the database {display_name(engine)} cannot be used: {message}")
    return None


def _translate_original(error: SQLAlchemyError, engine: Engine) -> EdgeError | None:
    """A transaction that lost its connection fails again when it is rolled back; the original error is the one that
    counts."""
    original = error.__cause__ or error.__context__
    if not isinstance(original, SQLAlchemyError):
        return None
    translated = translate_error(original, engine)
    return translated if isinstance(translated, Unavailable) else None


def _json(value: Any) -> str:
    """Strict JSON: NaN and infinity become null."""
    return msgspec.json.encode(value).decode()


def _tune_sqlite(engine: Engine, limits: EngineLimits) -> None:
    """WAL with every commit synced. Transactions are begun here, because the driver's own would take the write lock too
    late."""

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        wait = f"busy_timeout={limits.lock_timeout_s}000"
        for pragma in ("journal_mode=WAL", "synchronous=FULL", wait, "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reading = connection.get_execution_options().get("edgesplit", "write") == "read"
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _tune_postgresql(engine: Engine, limits: EngineLimits) -> None:
    """Bounded waits; writers are serialised by an advisory lock."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.execute(f"SET lock_timeout = '{limits.lock_timeout_s}s'")
        connection.execute(f"SET idle_in_transaction_session_timeout = '{limits.idle_timeout_s}s'")
        connection.commit()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("edgesplit", "") == "write":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})"))
