"""Brings a database to the tables of this program, step by step (`migrations/`), at every start and under a lock.

Promises: every step that is due is taken in one transaction, or none is; of several controllers that start at once one
takes them and the others wait; a database that a newer program has changed is refused before anything is read from it.
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
from edgesplit_controller.storage.engines import POSTGRESQL, shown

LOCK = 0x65646765_73706C69
"""PostgreSQL's number of the lock that changes of the schema take."""
logging.getLogger("alembic").setLevel(logging.WARNING)
_one_at_a_time = threading.Lock()
"""alembic keeps what it works on in its module."""


def known_tables() -> MetaData:
    """Every table of this program: those in `storage.database` and in each module of `storage.tables`."""
    for module in pkgutil.iter_modules(tables.__path__):
        import_module(f"{tables.__name__}.{module.name}")
    from edgesplit_controller.storage.database import Table

    return Table.metadata


def bring_up_to_date(engine: Engine, until: str = "head", *, over: Connection | None = None) -> None:
    """Take every step that this database has not taken yet, to the newest or `until` an older one; with `over` in that
    connection's transaction."""
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        connection = over if over is not None else stack.enter_context(engine.begin())
        if engine.dialect.name == POSTGRESQL:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        _bring_up_to_date(connection, engine, until)


def newest_step() -> str:
    """The step that this program's tables are at."""
    return _steps().get_current_head() or ""


def step_of(connection: Connection) -> str:
    """The step that a database is at; empty for none."""
    return MigrationContext.configure(connection).get_current_revision() or ""


@cache
def _steps() -> ScriptDirectory:
    """Read once: they are this program's."""
    return ScriptDirectory(str(Path(migrations.__file__).parent))


def _bring_up_to_date(connection: Connection, engine: Engine, until: str) -> None:
    steps, taken = _steps(), step_of(connection)
    if taken == (steps.get_current_head() if until == "head" else until):
        return
    _refuse_unknown(taken, steps, engine)
    _refuse_unknown("" if until == "head" else until, steps, engine)
    adopted = not taken and until == "head" and inspect(connection).has_table("models")
    _take(steps, connection, until)
    if adopted:
        _refuse_older_than_first(connection, engine)


def _take(steps: ScriptDirectory, connection: Connection, until: str) -> None:
    """Every step that is due, in the connection's transaction."""
    due = {"fn": lambda taken, _context: steps._upgrade_revs(until, taken)}
    context = MigrationContext.configure(connection, opts=due)
    with Operations.context(context):
        context.run_migrations()


def _refuse_unknown(step: str, steps: ScriptDirectory, engine: Engine) -> None:
    known = {one.revision for one in steps.walk_revisions()}
    if step and step not in known:
        raise UsageError(
            f"{shown(engine)} was changed by a newer edgesplit (its tables are at step {step}, this program knows up to"
            f" {max(known)}): install that version again, or restore a backup made before"
        )


def _refuse_older_than_first(connection: Connection, engine: Engine) -> None:
    """A database from before migrations may have tables that are older than the first step says."""
    there = inspect(connection)
    for table in known_tables().sorted_tables:
        columns = {column["name"] for column in there.get_columns(table.name)}
        if missing := sorted({column.name for column in table.columns} - columns):
            raise UsageError(
                f"the table {table.name} of {shown(engine)} lacks {', '.join(missing)}: it was made by an edgesplit"
                " before 0.1; begin with an empty data folder"
            )
