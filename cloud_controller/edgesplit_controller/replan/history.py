"""What devices told, read back from the database: a bounded number of messages, evenly over the time asked for."""

from __future__ import annotations

from sqlalchemy import select

from edgesplit_controller.replan.evidence import Told, read
from edgesplit_controller.storage.database import Database, TelemetryRow

MOST_MESSAGES = 96
"""Of one device, read at a time."""


class History:
    """The telemetry that is kept."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, device: str, since: float) -> list[Told]:
        """What that device told since then, oldest first; of very many messages some."""
        wanted = select(TelemetryRow.id).where(TelemetryRow.device == device, TelemetryRow.at >= since)
        with self._database.read() as session:
            ids = session.scalars(wanted.order_by(TelemetryRow.at)).all()
            step = max(1, -(-len(ids) // MOST_MESSAGES))
            chosen = ids[::-1][::step]
            rows = session.scalars(select(TelemetryRow).where(TelemetryRow.id.in_(chosen)).order_by(TelemetryRow.at))
            return [told for row in rows if (told := read({"at": row.at, **row.content})) is not None]
