"""Transactions of the controller's database. The tables are in `storage.tables`.

SQLite (WAL, every commit synced) by default, or PostgreSQL by URL; only portable SQL is used (`engines` opens both).
Times are Unix seconds. A write transaction takes the write lock when it begins, so that what it has read is still true
when it commits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, defer, sessionmaker
from sqlalchemy.orm.util import identity_key

from edgesplit.errors import UsageError
from edgesplit_controller.caller import OWNER, current_operator
from edgesplit_controller.storage.engines import (
    DEFAULT_LIMITS,
    POSTGRESQL,
    EngineLimits,
    display_name,
    open_engine,
    translate_error,
)
from edgesplit_controller.storage.schema import migrate
from edgesplit_controller.storage.tables.core import Device, Event

COMPACT_BYTES = 8 * 2**20
"""Unused bytes below which SQLite's file is left as it is."""
COMPACT_PART = 0.25
"""Part of SQLite's file that must be unused for it to be rewritten."""
_PAGE_PRAGMAS = ("page_count", "freelist_count", "page_size")
NAMES_PER_QUERY = 500
"""Names in one query, because databases bound the number of parameters."""
_DEFERRED = tuple(defer(column) for column in (Device.birth, Device.reported, Device.telemetry, Device.labels))
"""Large columns that concurrent write transactions do not load."""


class Database:
    """Transactions over the tables: `with database.write() as session`, `with database.read() as session`.

    Errors of the database are raised as `Unavailable` or `Busy`, and then nothing was changed.
    """

    def __init__(self, url: str, limits: EngineLimits = DEFAULT_LIMITS, *, migrated: bool = True) -> None:
        """`url`: `sqlite:///FILE`, or `postgresql://USER:PASSWORD@HOST/NAME`. UsageError if it cannot be opened.
        `migrated`: bring it to the newest step first."""
        self._engine = open_engine(url, limits)
        try:
            if migrated:
                migrate(self._engine)
        except SQLAlchemyError as error:
            why = str(error.__cause__ or error).strip().partition("\n")[0]
            raise UsageError(f"cannot open the database {display_name(self._engine)}: {why}") from error
        isolation = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self.shared else {}
        self._writers = self._sessions(edgesplit="write")
        self._concurrent_writers = self._sessions(edgesplit="hear")
        self._readers = self._sessions(edgesplit="read", **isolation)

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine, for instrumentation."""
        return self._engine

    @property
    def shared(self) -> bool:
        """Whether controllers on other machines can use the database too."""
        return self._engine.dialect.name == POSTGRESQL

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits when the block ends, and is rolled back if it raises.

        Writers are serialised, so what one has read is still true when it commits. Columns of a device that
        `write_concurrent` changes are excepted, unless the writer has locked the device (`lock_device`).
        """
        with self._translated(), self._writers.begin() as session:
            yield session

    @contextmanager
    def write_concurrent(self, devices: Iterable[str] = ()) -> Iterator[Session]:
        """A write transaction for frequent small writes such as ingested messages, not serialised with others. It waits
        only for transactions that changed one of `devices`, which it locks at its begin. On SQLite it is serialised
        like any other writer. The last messages of the devices (large columns) are loaded only on access."""
        with self._translated(), self._concurrent_writers.begin() as session:
            names = sorted(set(devices))
            held = select(Device).options(*_DEFERRED).where(Device.name.in_(names)).order_by(Device.name)
            # Loaded by one query, in the order of names, so that two such transactions cannot deadlock. The session
            # references rows only weakly, so the list keeps them in its identity map.
            rows = session.scalars(held.with_for_update(key_share=True)).all() if names else []
            yield session
            del rows

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent snapshot; rows stay readable after the block."""
        with self._translated(), self._readers() as session:
            yield session

    def compact(self) -> int:
        """Return unused pages of SQLite's file to the file system, where that is worth rewriting it; return the bytes.
        PostgreSQL does so by itself."""
        if self.shared:
            return 0
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            pages, free, size = (int(cursor.execute(f"PRAGMA {name}").fetchone()[0]) for name in _PAGE_PRAGMAS)
            if free * size < COMPACT_BYTES or free < COMPACT_PART * pages:
                return 0
            cursor.execute("VACUUM")
            return free * size
        except sqlite3.OperationalError:  # another process is writing: the next call does it
            return 0
        finally:
            connection.close()

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _sessions(self, **options: Any) -> sessionmaker[Session]:
        return sessionmaker(self._engine.execution_options(**options), expire_on_commit=False)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            translated = translate_error(error, self._engine)
            if translated is None:
                raise
            raise translated from error


def locked_devices(session: Session, devices: Iterable[str]) -> dict[str, Device]:
    """Those of these devices that the transaction locked at its begin (`Database.write_concurrent`), by name."""
    rows = {name: session.identity_map.get(identity_key(Device, name)) for name in devices}
    return {name: device for name, device in rows.items() if device is not None}


def lock_device(session: Session, device: str) -> Device | None:
    """The current device, locked until this transaction ends; None if there is none."""
    return session.get(Device, device, with_for_update={"key_share": True})


def batched(names: Iterable[str]) -> Iterator[list[str]]:
    """The names, sorted, in batches of at most `NAMES_PER_QUERY`."""
    ordered = sorted(names)
    return (ordered[at : at + NAMES_PER_QUERY] for at in range(0, len(ordered), NAMES_PER_QUERY))


def record_event(session: Session, at: float, who: str, what: str, subject: str, /, **detail: Any) -> None:
    """Add an event to the audit trail, in the caller's transaction. The actor `operator` stands for the authenticated
    caller."""
    actor = current_operator() if who == OWNER else who
    session.add(Event(at=at, who=actor, what=what, subject=subject, detail=detail))
