"""Excludes garbage collection and backups from each other, over all processes: a backup reads files by the rows that it
has read before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgesplit.errors import Busy
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease

NAME = "collection"


@contextmanager
def collection_lock(database: Database) -> Iterator[Lease]:
    """Hold the lock while the block runs; Busy if another process has it."""
    lease = Lease(database, NAME)
    if not lease.held():
        raise Busy("a garbage collection or a backup is running: try again when it has ended")
    try:
        lease.keep_renewed()
        yield lease
    finally:
        lease.release()
