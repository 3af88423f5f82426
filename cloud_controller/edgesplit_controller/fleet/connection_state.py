"""What operators are told about devices that are offline: since when, and when they were last seen."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from sqlalchemy.orm import Session

from edgesplit.quantities import format_duration
from edgesplit_controller.storage.tables.core import Device
from edgesplit_controller.storage.tables.device_state import DeviceSessionRow


def format_time(at: float) -> str:
    """Unix seconds as a UTC time in ISO 8601, to the second."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def offline_text(session: Session, device: Device, now: float) -> str:
    """Why a device without a living session cannot be reached, as a clause for an error."""
    if device.revoked:
        return f"{device.name} is revoked"
    if device.last_seen is None:
        return f"{device.name} is offline: it has not connected since it enrolled"
    row = session.get(DeviceSessionRow, device.name)
    since = row.died_at if row is not None and row.died_at is not None else device.last_seen
    seen = format_duration(max(1.0, now - device.last_seen))
    return f"{device.name} is offline since {format_time(since)} (last seen {seen} ago)"


def offline_devices(devices: Iterable[Device]) -> list[dict[str, Any]]:
    """Those of the devices that are offline, by name, and when each was last seen (Unix seconds; None: never)."""
    offline = sorted((device for device in devices if not device.alive), key=lambda device: device.name)
    return [{"device": device.name, "last_seen": device.last_seen} for device in offline]
