"""The migration steps in a folder, and taking them, with alembic; `schema` decides whether there are any to take."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def known_steps(folder: Path) -> frozenset[str]:
    """Ids of the steps in that folder."""
    return frozenset(revision.revision for revision in _steps(folder).walk_revisions())


def run_steps(folder: Path, connection: Connection, until: str) -> None:
    """Take every pending step up to `until`, in the connection's transaction."""
    steps = _steps(folder)
    due = {"fn": lambda taken, _context: steps._upgrade_revs(until, taken)}
    context = MigrationContext.configure(connection, opts=due)
    with Operations.context(context):
        context.run_migrations()


@cache
def _steps(folder: Path) -> ScriptDirectory:
    """Read once."""
    return ScriptDirectory(str(folder))
