"""Schema migrations: brings a database to the tables of this program, step by step (`migrations/`), at every start and
under a lock.

Promises: all pending steps are taken in one transaction, or none. Of several controllers that start at once one takes
them and the others wait. A database changed by a newer program is refused before anything is read from it. A database
that is at the newest step needs no alembic (`migration_steps`), whose import takes a tenth of a second.
"""

from __future__ import annotations

import logging
import pkgutil
import threading
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, inspect, text

from edgesplit.errors import UsageError
from edgesplit_controller.storage import migrations, tables
from edgesplit_controller.storage.engines import POSTGRESQL, display_name
from edgesplit_controller.storage.tables.base import Table

SCHEMA_LOCK = 0x65646765_73706C69
"""Key of the PostgreSQL advisory lock for schema changes."""
logging.getLogger("alembic").setLevel(logging.WARNING)  # before its import, which logs too
STEPS_FOLDER = Path(migrations.__file__).parent
STEP_TABLE = "alembic_version"
"""Alembic's table of the step that a database is at."""
_alembic_lock = threading.Lock()
"""alembic keeps its current context in module globals."""


def known_tables() -> MetaData:
    """Metadata of every table: those in `storage.database` and in each module of `storage.tables`."""
    for module in pkgutil.iter_modules(tables.__path__):
        import_module(f"{tables.__name__}.{module.name}")
    return Table.metadata


def migrate(engine: Engine, until: str = "head", *, in_connection: Connection | None = None) -> None:
    """Take every pending step, up to the newest or to `until`; with `in_connection` in that connection's transaction.
    UsageError for a database of a newer program, or of one before migrations."""
    with ExitStack() as stack:
        stack.enter_context(_alembic_lock)
        connection = in_connection if in_connection is not None else stack.enter_context(engine.begin())
        if engine.dialect.name == POSTGRESQL:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": SCHEMA_LOCK})
        _migrate(connection, engine, until)


@cache
def newest_step() -> str:
    """Id of the step to which this program's tables correspond."""
    return max(file.name.partition("_")[0] for file in (STEPS_FOLDER / "versions").glob("[0-9]*.py"))


def step_of(connection: Connection) -> str:
    """Id of the step a database is at; empty for none."""
    if not inspect(connection).has_table(STEP_TABLE):
        return ""
    return connection.scalar(text(f"SELECT version_num FROM {STEP_TABLE}")) or ""


def _migrate(connection: Connection, engine: Engine, until: str) -> None:
    current = step_of(connection)
    if current == (newest_step() if until == "head" else until):
        return
    from edgesplit_controller.storage.migration_steps import known_steps, run_steps

    known = known_steps(STEPS_FOLDER)
    _refuse_unknown(current, known, engine)
    _refuse_unknown("" if until == "head" else until, known, engine)
    is_unversioned = not current and until == "head" and inspect(connection).has_table("models")
    run_steps(STEPS_FOLDER, connection, until)
    if is_unversioned:
        _refuse_older_than_first(connection, engine)


def _refuse_unknown(step: str, known: frozenset[str], engine: Engine) -> None:
    if step and step not in known:
        raise UsageError(
            f"{display_name(engine)} was changed by a newer edgesplit (its tables are at step {step}, this program"
            f" knows up to {max(known)}): install that version again, or restore a backup made before"
        )


def _refuse_older_than_first(connection: Connection, engine: Engine) -> None:
    """Refuse a database from before migrations whose tables are older than the first step assumes."""
    inspector = inspect(connection)
    for table in known_tables().sorted_tables:
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        if missing := sorted({column.name for column in table.columns} - columns):
            raise UsageError(
                f"the table {table.name} of {display_name(engine)} lacks {', '.join(missing)}: it was made by an"
                " edgesplit before 0.1; begin with an empty data folder"
            )
