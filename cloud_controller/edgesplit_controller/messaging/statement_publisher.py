"""Tracks which signed statements the broker has acknowledged, so that after a crash of any process the stored statement
is the published one.

Each process confirms a statement after publishing it. If another was stored meanwhile, the process that finds out
publishes again, so an older statement never stays retained. Statements that no process has published are `due`, and the
process with the lease publishes them. Leaves to others: the content of a statement (`releases.director`) and the
publishing (`messaging.delivery`).
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import and_, or_, select, update

from edgesplit_controller.storage.database import Database, batched
from edgesplit_controller.storage.tables.core import Device, RemovedDeviceRow

CLEARED = -1
"""Value of `Device.stated` for a revoked device whose retained topics were cleared."""


class StatementPublisher:
    """Publication state of the statements in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def confirm(self, published: Mapping[str, bytes]) -> list[str]:
        """Note the statements that the broker acknowledged, by device; return the devices for which a different one is
        stored by now."""
        changed: list[str] = []
        for names in batched(published):
            with self._database.write_concurrent(names) as session:
                rows = select(Device.name, Device.counter, Device.statement, Device.revoked)
                stated: dict[int, list[str]] = {}
                for name, counter, statement, revoked in session.execute(rows.where(Device.name.in_(names))):
                    if published[name] == (b"" if revoked else statement or b""):
                        stated.setdefault(CLEARED if revoked else counter, []).append(name)
                    else:
                        changed.append(name)
                if cleared := [name for name in names if not published[name]]:
                    removed = update(RemovedDeviceRow).where(RemovedDeviceRow.device.in_(cleared)).values(cleared=True)
                    session.execute(removed.execution_options(synchronize_session=False))
                # Counters follow the Unix time, so devices that were assigned together share one: few statements.
                for counter, with_counter in stated.items():
                    statement_update = update(Device).where(Device.name.in_(with_counter)).values(published=counter)
                    session.execute(statement_update.execution_options(synchronize_session=False))
        return changed

    def due(self) -> list[str]:
        """Devices whose stored statement was not published yet, including revoked and removed devices whose topics were
        not cleared."""
        is_unpublished = and_(
            Device.revoked.is_(None), Device.statement.is_not(None), Device.published != Device.counter
        )
        is_uncleared = and_(Device.revoked.is_not(None), Device.published != CLEARED)
        with self._database.read() as session:
            query = select(Device.name).where(Device.restored.is_(None), or_(is_unpublished, is_uncleared))
            removed = select(RemovedDeviceRow.device).where(~RemovedDeviceRow.cleared)
            return sorted({*session.scalars(query), *session.scalars(removed)})
