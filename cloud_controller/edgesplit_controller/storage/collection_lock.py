"""Excludes garbage collection and backups from each other, over all processes: a backup reads files by the rows that it
has read before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgesplit.errors import Busy
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease

NAME = "collection"
LIFE_S = 120.0
"""The lock of a killed process is free after so many seconds; the longest that one step of a collection may take."""


@contextmanager
def collection_lock(database: Database) -> Iterator[Lease]:
    """Hold the lock while the block runs; Busy if another process has it. `held` renews it where it is due.

    Only a block that does not call `check` may have it renewed by a thread: with SQLite the thread would wait for the
    transaction of `check`, and that for the thread.
    """
    lease = Lease(database, NAME, life_s=LIFE_S)
    if not lease.held():
        raise Busy("a garbage collection or a backup is running: try again when it has ended")
    try:
        yield lease
    finally:
        lease.release()
