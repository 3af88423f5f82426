"""The controller's database as JSON lines, exported from and imported into SQLite or PostgreSQL.

The export is a consistent snapshot: a line per table names its columns, and a line for each row follows. The import
takes the same migrations as an old database: tables are created at the backup's schema revision, filled, and migrated
to the newest.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, LargeBinary, Table
from sqlalchemy.exc import SQLAlchemyError

from edgesplit.errors import MalformedMessage, UsageError
from edgesplit_controller.storage.engines import POSTGRESQL, display_name, open_engine, translate_error
from edgesplit_controller.storage.schema import known_tables, migrate, newest_step, step_of

SKIPPED_TABLES: Final = frozenset({"leases", "holds"})
"""Tables that are only about running processes."""
BATCH: Final = 500
"""Rows per statement."""


class TableLine(msgspec.Struct, frozen=True):
    """Header of a table: the rows that follow belong to it."""

    table: str
    columns: tuple[str, ...]
    kinds: tuple[str, ...]
    """`plain`, `json` or `bytes` (base64), by column."""


class RestoredOperator(msgspec.Struct, frozen=True):
    """An operator as it comes back from a backup."""

    name: str
    role: str
    groups: tuple[str, ...]
    """Groups of devices; empty: all groups."""
    is_active: bool
    """Whether its credentials are accepted: neither revoked nor expired."""


def export_rows(url: str) -> Iterator[bytes]:
    """The schema revision and then every table, in one transaction, while others write. UsageError if the database is
    not at the newest revision."""
    engine = open_engine(url)
    try:
        reading = engine.execution_options(edgesplit="read", **_snapshot_options(engine))
        with reading.connect() as connection:
            step = step_of(connection)
            if step != newest_step():
                raise UsageError(
                    f"{display_name(engine)} is at step {step or 'none'} of its tables and this program at"
                    f" {newest_step()}: start the controller with this version once, then make the backup"
                )
            yield _line({"step": step})
            for table in known_tables().sorted_tables:
                if table.name not in SKIPPED_TABLES:
                    yield from _export_table(connection, table)
    except SQLAlchemyError as error:
        raise translate_error(error, engine) or error from error
    finally:
        engine.dispose()


def _snapshot_options(engine: Engine) -> dict[str, Any]:
    postgresql = engine.dialect.name == POSTGRESQL
    return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if postgresql else {}


def _export_table(connection: Connection, table: Table) -> Iterator[bytes]:
    columns = list(table.columns)
    kinds = tuple(_kind(column.type) for column in columns)
    yield _line(TableLine(str(table.name), tuple(str(column.name) for column in columns), kinds))
    order = [column for column in columns if column.primary_key]
    for row in connection.execution_options(yield_per=BATCH).execute(sa.select(table).order_by(*order)):
        yield _line(list(row))


def _kind(type_: Any) -> str:
    if isinstance(type_, sa.JSON):
        return "json"
    return "bytes" if isinstance(type_, LargeBinary) else "plain"


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def import_rows(url: str, lines: Iterable[bytes], now: float, *, replace: bool) -> int:
    """Fill the database at `url` in one transaction and return the number of devices, which are marked as restored.
    UsageError if it holds rows and `replace` is false."""
    engine = open_engine(url)
    try:
        remaining = iter(lines)
        step = _decode(next(remaining, b""), dict[str, str]).get("step", "")
        with engine.execution_options(edgesplit="write").begin() as connection:
            _drop_tables(connection, engine, replace=replace)
            # The tables are created as old as the backup, filled, and then migrated like any old database.
            migrate(engine, until=step, in_connection=connection)
            _insert_tables(connection, remaining)
            migrate(engine, in_connection=connection)
            return _pause_restored(connection, now)
    except SQLAlchemyError as error:
        malformed = MalformedMessage(f"the backup's rows cannot be stored: {error}")
        raise translate_error(error, engine) or malformed from error
    finally:
        engine.dispose()


def preview_operators(lines: Iterable[bytes], now: float) -> list[RestoredOperator]:
    """The operators that `import_rows` would bring from the same lines, by name."""
    engine = open_engine("sqlite:///:memory:")
    try:
        remaining = iter(lines)
        step = _decode(next(remaining, b""), dict[str, str]).get("step", "")
        table = known_tables().tables["operators"]
        with engine.execution_options(edgesplit="write").begin() as connection:
            migrate(engine, until=step, in_connection=connection)
            _insert_tables(connection, remaining, only=frozenset({str(table.name)}))
            migrate(engine, in_connection=connection)
            columns = table.c
            rows = connection.execute(
                sa.select(columns.name, columns.role, columns.groups, columns.expires, columns.revoked)
                .order_by(columns.name)
            ).all()  # fmt: skip
    except SQLAlchemyError as error:
        raise MalformedMessage(f"the backup's operators cannot be read: {error}") from error
    finally:
        engine.dispose()
    return [
        RestoredOperator(
            str(name), str(role), tuple(str(group) for group in groups or ()),
            not revoked and (expires is None or expires > now),
        )
        for name, role, groups, expires, revoked in rows
    ]  # fmt: skip


def _pause_restored(connection: Connection, now: float) -> int:
    """Pause what would continue by itself: devices may have newer state than the backup, rollouts wait for an operator,
    and browser sessions end, because one that was ended since the backup would live again. Returns the number of
    devices."""
    tables = known_tables().tables
    sessions = tables["browser_sessions"]
    connection.execute(sessions.update().where(sessions.c.ended.is_(None)).values(ended=now))
    connection.execute(tables["login_codes"].delete())
    devices, rollouts = tables["devices"], tables["rollouts"]
    connection.execute(devices.update().values(restored=now))
    active = rollouts.c.state.in_(("scheduled", "waiting", "running"))
    paused = {"state": "paused", "reason": "restored from a backup: resume it if it is still wanted"}
    connection.execute(rollouts.update().where(active).values(paused))
    return int(connection.execute(sa.select(sa.func.count()).select_from(devices)).scalar_one())


def _drop_tables(connection: Connection, engine: Engine, *, replace: bool) -> None:
    """Drop the controller's tables; UsageError if they hold rows and `replace` is false."""
    inspector = sa.inspect(connection)
    tables = [table for table in known_tables().sorted_tables if inspector.has_table(table.name)]
    non_empty = [
        table.name for table in tables if connection.execute(sa.select(sa.literal(1)).select_from(table)).first()
    ]
    if non_empty and not replace:
        raise UsageError(
            f"{display_name(engine)} is not empty ({', '.join(non_empty[:4])}, ...): --force replaces what it holds"
        )
    for table in reversed(tables):
        table.drop(connection)
    if engine.dialect.name == POSTGRESQL:
        connection.execute(sa.text("DROP FUNCTION IF EXISTS audit_refuse()"))  # made by migration 0003
    connection.execute(sa.text("DROP TABLE IF EXISTS alembic_version"))


def _insert_tables(connection: Connection, lines: Iterator[bytes], only: frozenset[str] | None = None) -> None:
    """Insert every row that follows, table by table; with `only` those of these tables."""
    present = set(sa.inspect(connection).get_table_names()) - SKIPPED_TABLES - {"alembic_version"}
    header: TableLine | None = None
    batch: list[list[Any]] = []
    is_wanted = True
    for line in lines:
        if line.startswith(b"{"):
            _insert_batch(connection, header, batch)
            next_header = _decode(line, TableLine)
            if next_header.table not in present:
                raise MalformedMessage(f"the backup has rows of an unknown table: {next_header.table[:80]!r}")
            is_wanted = only is None or next_header.table in only
            if is_wanted:
                _delete_rows(connection, next_header.table)
            header, batch = next_header, []
            continue
        if not is_wanted:
            continue
        values = _decode(line, list[Any])
        if header is None or len(values) != len(header.columns):
            raise MalformedMessage("the backup's rows fit no table")
        batch.append(values)
        if len(batch) == BATCH:
            _insert_batch(connection, header, batch)
            batch = []
    _insert_batch(connection, header, batch)


def _delete_rows(connection: Connection, name: str) -> None:
    """Delete the rows that a migration inserted into the table: the backup has its own."""
    table = sa.table(name)
    if connection.execute(sa.select(sa.literal(1)).select_from(table)).first():
        connection.execute(sa.delete(table))


def _insert_batch(connection: Connection, header: TableLine | None, batch: Sequence[Sequence[Any]]) -> None:
    if header is None or not batch:
        return
    columns = [sa.column(name, _TYPES.get(kind)) for name, kind in zip(header.columns, header.kinds, strict=True)]
    rows = [
        {name: _value(value, kind) for name, value, kind in zip(header.columns, row, header.kinds, strict=True)}
        for row in batch
    ]
    connection.execute(sa.table(header.table, *columns).insert(), rows)
    _advance_sequence(connection, header)


_TYPES: Final[dict[str, Any]] = {"json": sa.JSON(none_as_null=True), "bytes": LargeBinary()}


def _value(value: Any, kind: str) -> Any:
    return base64.b64decode(value) if kind == "bytes" and value is not None else value


def _advance_sequence(connection: Connection, header: TableLine) -> None:
    """Set PostgreSQL's id sequence to the highest inserted id; explicit ids do not advance it."""
    if connection.dialect.name != POSTGRESQL or "id" not in header.columns:
        return
    sequence = connection.execute(
        sa.text("SELECT pg_get_serial_sequence(:table, 'id')"), {"table": header.table}
    ).scalar_one()
    if sequence is not None:
        newest: sa.Select[Any] = sa.select(sa.func.max(sa.column("id"))).select_from(sa.table(header.table))
        count = connection.execute(newest).scalar_one()
        if count is not None:
            connection.execute(sa.text("SELECT setval(:sequence, :count)"), {"sequence": sequence, "count": count})


def _decode(line: bytes, type_: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=type_)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"the backup's rows cannot be read: {error}") from error
