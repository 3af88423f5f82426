"""Which statements the broker retains: what is stored is what is published, whichever process was killed in between.

Each process publishes what it was told to, and confirms it afterwards. What was stored meanwhile is published again by
whoever finds that out, so that an older statement never stays; what nobody published is `due`, and the process with
the lease sees to it. Leaves to others: what a statement says (`director`) and the publishing (`delivery`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import and_, or_, select, update

from edgesplit_controller.storage.database import Database, Device

FORGOTTEN = -1
"""`Device.stated` of a revoked device whose topics were cleared."""
BATCH = 500


class Stating:
    """What was published of the statements in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def confirm(self, published: Mapping[str, bytes]) -> list[str]:
        """Remember what the broker has acknowledged, by device; those for whom something else is stored by now."""
        changed: list[str] = []
        for names in _batches(published):
            with self._database.hear(names) as session:
                rows = select(Device.name, Device.counter, Device.statement, Device.revoked)
                stated: dict[int, list[str]] = {}
                for name, counter, statement, revoked in session.execute(rows.where(Device.name.in_(names))):
                    if published[name] == (b"" if revoked else statement or b""):
                        stated.setdefault(FORGOTTEN if revoked else counter, []).append(name)
                    else:
                        changed.append(name)
                for counter, alike in stated.items():  # counters are about the time: devices told together share one
                    these = update(Device).where(Device.name.in_(alike)).values(stated=counter)
                    session.execute(these.execution_options(synchronize_session=False))
        return changed

    def due(self) -> list[str]:
        """Devices for whom something is stored that nobody has published."""
        told = and_(Device.revoked.is_(None), Device.statement.is_not(None), Device.stated != Device.counter)
        gone = and_(Device.revoked.is_not(None), Device.stated != FORGOTTEN)
        with self._database.read() as session:
            ours = select(Device.name).where(Device.restored.is_(None), or_(told, gone))
            return list(session.scalars(ours.order_by(Device.name)))


def _batches(names: Collection[str]) -> list[list[str]]:
    ordered = sorted(names)
    return [ordered[at : at + BATCH] for at in range(0, len(ordered), BATCH)]
