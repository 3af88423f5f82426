"""What a device's word says of a row that came from a backup: whether the device was told something newer since."""

from __future__ import annotations

from sqlalchemy.orm import Session

from edgesplit.mqtt import messages
from edgesplit.release.manifest import Signed, Statement
from edgesplit_controller.storage.database import Device, record


def compare(session: Session, device: Device, acted_upon: int, now: float) -> None:
    """The device acts upon the statement with that counter. A restored row is as good as any other once that is no
    newer than the one in it; a newer one is counted from, and stays until an operator says otherwise."""
    if acted_upon <= _counter_of(device.statement):
        device.restored = None
    elif acted_upon > device.counter:
        device.counter = acted_upon
        record(session, now, device.name, "device.ahead", device.name, counter=acted_upon)


def _counter_of(statement: bytes | None) -> int:
    """0 for a device that was never told anything."""
    return messages.decode(messages.decode(statement, Signed).payload, Statement).counter if statement else 0
