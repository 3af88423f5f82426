"""Schema migrations: brings a database to the tables of this program, step by step (`migrations/`), at every start and
under a lock.

Promises: all pending steps are taken in one transaction, or none. Of several controllers that start at once one takes
them and the others wait. A database changed by a newer program is refused before anything is read from it.
"""

from __future__ import annotations

import logging
import pkgutil
import threading
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, inspect, text

from edgesplit.errors import UsageError
from edgesplit_controller.storage import migrations, tables
from edgesplit_controller.storage.engines import POSTGRESQL, display_name
from edgesplit_controller.storage.tables.base import Table

SCHEMA_LOCK = 0x65646765_73706C69
"""Key of the PostgreSQL advisory lock for schema changes."""
logging.getLogger("alembic").setLevel(logging.WARNING)
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


def newest_step() -> str:
    """Id of the step to which this program's tables correspond."""
    return _steps().get_current_head() or ""


def step_of(connection: Connection) -> str:
    """Id of the step a database is at; empty for none."""
    return MigrationContext.configure(connection).get_current_revision() or ""


@cache
def _steps() -> ScriptDirectory:
    """The migration steps of this program, read once."""
    return ScriptDirectory(str(Path(migrations.__file__).parent))


def _migrate(connection: Connection, engine: Engine, until: str) -> None:
    steps, current = _steps(), step_of(connection)
    if current == (steps.get_current_head() if until == "head" else until):
        return
    _refuse_unknown(current, steps, engine)
    _refuse_unknown("" if until == "head" else until, steps, engine)
    is_unversioned = not current and until == "head" and inspect(connection).has_table("models")
    _run_steps(steps, connection, until)
    if is_unversioned:
        _refuse_older_than_first(connection, engine)


def _run_steps(steps: ScriptDirectory, connection: Connection, until: str) -> None:
    """Take every pending step, in the connection's transaction."""
    due = {"fn": lambda taken, _context: steps._upgrade_revs(until, taken)}
    context = MigrationContext.configure(connection, opts=due)
    with Operations.context(context):
        context.run_migrations()


def _refuse_unknown(step: str, steps: ScriptDirectory, engine: Engine) -> None:
    known = {revision.revision for revision in steps.walk_revisions()}
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
