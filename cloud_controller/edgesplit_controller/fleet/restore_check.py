"""Checks a device row from a backup against the device's report: did the device receive a newer statement since?"""

from __future__ import annotations

from sqlalchemy.orm import Session

from edgesplit.mqtt import messages
from edgesplit.release.manifest import Signed, Statement
from edgesplit_controller.storage.database import record_event
from edgesplit_controller.storage.tables.core import Device


def check_restored(session: Session, device: Device, acted_upon: int, now: float) -> None:
    """Process a report that the device acts on the statement with counter `acted_upon`.

    If that is not newer than the statement in the restored row, the row is current again. If it is newer, new
    statements continue from its counter, and the row stays marked as restored until an operator decides.
    """
    if acted_upon <= _counter_of(device.statement):
        device.restored = None
    elif acted_upon > device.counter:
        device.counter = acted_upon
        record_event(session, now, device.name, "device.ahead", device.name, counter=acted_upon)


def _counter_of(statement: bytes | None) -> int:
    """Counter of the statement; 0 for a device without one."""
    return messages.decode(messages.decode(statement, Signed).payload, Statement).counter if statement else 0
