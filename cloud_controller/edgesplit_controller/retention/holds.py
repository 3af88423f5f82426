"""Holds: jobs in progress that store blobs before the rows that refer to them.

A job's blobs look unused until its rows are written. While it runs, blobs stored since it began are not collected,
whatever the retention rules say. The hold of a killed process is void once the process's lease has expired.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from edgesplit.errors import EdgeError
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease, database_time
from edgesplit_controller.storage.tables.leases import LeaseRow
from edgesplit_controller.storage.tables.retention import HoldRow

log = logging.getLogger(__name__)


class Holds:
    """The holds of one installation, as one process takes them."""

    def __init__(self, database: Database, lease: Lease, *, now: Callable[[], float]) -> None:
        """`lease` is one that this process keeps as long as it lives."""
        self._database = database
        self._lease = lease
        self._now = now

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Protect the blobs that are stored while the block runs."""
        token = uuid.uuid4().hex
        with self._database.write() as session:
            session.add(HoldRow(id=token, holder=self._lease.holder, since=self._now()))
        try:
            yield
        finally:
            try:
                with self._database.write() as session:
                    session.execute(delete(HoldRow).where(HoldRow.id == token))
            except EdgeError as error:
                log.warning("a hold on blobs could not be released, and ends with this process: %s", error)


def oldest_hold(session: Session) -> float | None:
    """Unix time since which blobs are protected; None if no job stores any."""
    return session.scalar(select(func.min(HoldRow.since)).where(HoldRow.holder.in_(_live_holders(session))))


def delete_void_holds(session: Session) -> None:
    """Delete the holds of processes that have ended."""
    void = delete(HoldRow).where(HoldRow.holder.not_in(_live_holders(session)))
    session.execute(void.execution_options(synchronize_session=False))


def _live_holders(session: Session) -> list[str]:
    live = select(LeaseRow.holder).where(LeaseRow.holder != "", LeaseRow.expires > database_time(session))
    return list(session.scalars(live))
