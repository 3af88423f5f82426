"""Brings a database to the tables of this program, step by step (`migrations/`), at every start and under a lock.

Promises: every step that is due is taken in one transaction, or none is; of several controllers that start at once one
takes them and the others wait; a database that a newer program has changed is refused before anything is read from it.
"""

from __future__ import annotations

import pkgutil
import threading
from importlib import import_module

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, inspect, text

import edgesplit_controller
from edgesplit.errors import UsageError

LOCK = 0x65646765_73706C69
"""PostgreSQL's number of the lock that changes of the schema take."""
_one_at_a_time = threading.Lock()
"""alembic keeps what it works on in its module."""


def known_tables() -> MetaData:
    """Every table of this program: those in `database` and in each `*_tables` module beside it."""
    for module in pkgutil.iter_modules(edgesplit_controller.__path__):
        if module.name.endswith("_tables"):
            import_module(f"edgesplit_controller.{module.name}")
    from edgesplit_controller.database import Table

    return Table.metadata


def bring_up_to_date(engine: Engine) -> None:
    """Take every step that this database has not taken yet."""
    steps = _steps()
    newest = ScriptDirectory.from_config(steps).get_current_head()
    with _one_at_a_time, engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        taken = MigrationContext.configure(connection).get_current_revision()
        if taken == newest:
            return
        _refuse_newer(taken, steps, engine)
        adopted = taken is None and inspect(connection).has_table("models")
        steps.attributes["connection"] = connection
        command.upgrade(steps, "head")
        if adopted:
            _refuse_older_than_first(connection, engine)


def _steps() -> Config:
    config = Config()
    config.set_main_option("script_location", "edgesplit_controller:migrations")
    return config


def _refuse_newer(taken: str | None, steps: Config, engine: Engine) -> None:
    known = {step.revision for step in ScriptDirectory.from_config(steps).walk_revisions()}
    if taken is not None and taken not in known:
        raise UsageError(
            f"the database {shown(engine)} was changed by a newer edgesplit (its tables are at step {taken}, this"
            f" program knows up to {max(known)}): install that version again, or restore a backup made before"
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


def shown(engine: Engine) -> str:
    """The database as people know it, without a password."""
    return engine.url.database or "" if engine.dialect.name == "sqlite" else repr(engine.url)
