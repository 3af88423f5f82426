"""The database of a controller as lines of JSON, from either database and into either.

One moment of it: a table's line names its columns, a line for each row follows. What is put back goes through the same
steps as a database that was always here: its tables are made as old as the backup is, filled, and brought up to date.
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
from edgesplit_controller.storage.engines import POSTGRESQL, in_our_words, open_engine, shown
from edgesplit_controller.storage.schema import bring_up_to_date, known_tables, newest_step, step_of

LEFT_OUT: Final = frozenset({"leases"})
"""Tables that say something of running processes only."""
BATCH: Final = 500


class TableLine(msgspec.Struct, frozen=True):
    """The rows that follow are of this table."""

    table: str
    columns: tuple[str, ...]
    kinds: tuple[str, ...]
    """`plain`, `json` or `bytes` (base64), by column."""


def export_rows(url: str) -> Iterator[bytes]:
    """The step that the database is at, then every table: one consistent moment, while others write."""
    engine = open_engine(url)
    try:
        reading = engine.execution_options(edgesplit="read", **_one_moment(engine))
        with reading.connect() as connection:
            step = step_of(connection)
            if step != newest_step():
                raise UsageError(
                    f"{shown(engine)} is at step {step or 'none'} of its tables and this program at {newest_step()}:"
                    " start the controller with this version once, then make the backup"
                )
            yield _line({"step": step})
            for table in known_tables().sorted_tables:
                if table.name not in LEFT_OUT:
                    yield from _table(connection, table)
    except SQLAlchemyError as error:
        raise in_our_words(error, engine) or error from error
    finally:
        engine.dispose()


def _one_moment(engine: Engine) -> dict[str, Any]:
    postgresql = engine.dialect.name == POSTGRESQL
    return {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if postgresql else {}


def _table(connection: Connection, table: Table) -> Iterator[bytes]:
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
    """Fill the database at `url`, all of it or nothing; how many devices it has. Its rows of devices say that they come
    from a backup. UsageError where there is something already, unless that is to be replaced."""
    engine = open_engine(url)
    try:
        coming = iter(lines)
        step = _decoded(next(coming, b""), dict[str, str]).get("step", "")
        with engine.execution_options(edgesplit="write").begin() as connection:
            _empty(connection, engine, replace=replace)
            bring_up_to_date(engine, until=step, over=connection)
            _fill(connection, coming)
            bring_up_to_date(engine, over=connection)
            return _hold(connection, now)
    except SQLAlchemyError as error:
        raise in_our_words(error, engine) or MalformedMessage(f"the backup's rows cannot be kept: {error}") from error
    finally:
        engine.dispose()


def _hold(connection: Connection, now: float) -> int:
    """Nothing goes on by itself from where it was then: devices may know better, and rollouts wait for an operator.
    The number of devices."""
    tables = known_tables().tables
    devices, rollouts = tables["devices"], tables["rollouts"]
    connection.execute(devices.update().values(restored=now))
    going_on = rollouts.c.state.in_(("scheduled", "waiting", "running"))
    held = {"state": "paused", "why": "restored from a backup: resume it if it is still wanted"}
    connection.execute(rollouts.update().where(going_on).values(held))
    return int(connection.execute(sa.select(sa.func.count()).select_from(devices)).scalar_one())


def _empty(connection: Connection, engine: Engine, *, replace: bool) -> None:
    """Make sure that nothing of ours is there."""
    there = sa.inspect(connection)
    ours = [table for table in known_tables().sorted_tables if there.has_table(table.name)]
    full = [table.name for table in ours if connection.execute(sa.select(sa.literal(1)).select_from(table)).first()]
    if full and not replace:
        raise UsageError(f"{shown(engine)} is not empty ({', '.join(full[:4])}, ...): --force replaces what it holds")
    for table in reversed(ours):
        table.drop(connection)
    if engine.dialect.name == POSTGRESQL:
        connection.execute(sa.text("DROP FUNCTION IF EXISTS audit_refuse()"))  # of step 0003
    connection.execute(sa.text("DROP TABLE IF EXISTS alembic_version"))


def _fill(connection: Connection, lines: Iterator[bytes]) -> None:
    """Every row that follows, table by table."""
    header: TableLine | None = None
    batch: list[list[Any]] = []
    for line in lines:
        if line.startswith(b"{"):
            _keep(connection, header, batch)
            begun = _decoded(line, TableLine)
            _clear(connection, begun.table)
            header, batch = begun, []
            continue
        values = _decoded(line, list[Any])
        if header is None or len(values) != len(header.columns):
            raise MalformedMessage("the backup's rows fit no table")
        batch.append(values)
        if len(batch) == BATCH:
            _keep(connection, header, batch)
            batch = []
    _keep(connection, header, batch)


def _clear(connection: Connection, name: str) -> None:
    """Drop the rows that a step put into the table: the backup has its own."""
    table = sa.table(name)
    if connection.execute(sa.select(sa.literal(1)).select_from(table)).first():
        connection.execute(sa.delete(table))


def _keep(connection: Connection, header: TableLine | None, batch: Sequence[Sequence[Any]]) -> None:
    if header is None or not batch:
        return
    columns = [sa.column(name, _TYPES.get(kind)) for name, kind in zip(header.columns, header.kinds, strict=True)]
    rows = [
        {name: _value(one, kind) for name, one, kind in zip(header.columns, row, header.kinds, strict=True)}
        for row in batch
    ]
    connection.execute(sa.table(header.table, *columns).insert(), rows)
    _go_on_counting(connection, header)


_TYPES: Final[dict[str, Any]] = {"json": sa.JSON(none_as_null=True), "bytes": LargeBinary()}


def _value(value: Any, kind: str) -> Any:
    return base64.b64decode(value) if kind == "bytes" and value is not None else value


def _go_on_counting(connection: Connection, header: TableLine) -> None:
    """PostgreSQL counts ids by a sequence, which knows nothing of rows that brought their own."""
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


def _decoded(line: bytes, type_: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=type_)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(f"the backup's rows cannot be read: {error}") from error
