"""A controller's database with nothing in it: the steps to its tables are taken once a process, and then copied."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from edgesplit_controller.storage.database import Database


def fresh_database(file: Path) -> Database:
    """A new SQLite database in that file."""
    file.write_bytes(_empty())
    return Database(f"sqlite:///{file}")


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "empty.db"
        Database(f"sqlite:///{file}").close()  # the last one that leaves puts the log into the file
        return file.read_bytes()
