"""Reads telemetry back from the database: a bounded number of messages, evenly spread over the requested time."""

from __future__ import annotations

from sqlalchemy import select

from edgesplit_controller.replan.evidence import TelemetryEvidence, parse_message
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import TelemetryRow

MOST_MESSAGES = 96
"""Messages of one device in one read."""


class TelemetryHistory:
    """Stored telemetry messages."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def messages_of(self, device: str, since: float) -> list[TelemetryEvidence]:
        """Messages of a device since a Unix time, oldest first; thinned out evenly above `MOST_MESSAGES`, keeping the
        newest."""
        query = select(TelemetryRow.id).where(TelemetryRow.device == device, TelemetryRow.at >= since)
        with self._database.read() as session:
            ids = session.scalars(query.order_by(TelemetryRow.at)).all()
            step = max(1, -(-len(ids) // MOST_MESSAGES))
            chosen = ids[::-1][::step]
            rows = session.scalars(select(TelemetryRow).where(TelemetryRow.id.in_(chosen)).order_by(TelemetryRow.at))
            return [message for row in rows if (message := parse_message({"at": row.at, **row.content})) is not None]
