"""Deletes what the database holds of one device, for good.

What stays: its certificates, because the revocation list is made of them; the audit trail; sums over all devices of a
group; and the counter of its statements (`RemovedDeviceRow`). A device that has the name later gets a higher counter,
so that an agent that returns with its old data folder is not refused as if it were sent an old statement.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from edgesplit_controller.storage.tables.base import Table
from edgesplit_controller.storage.tables.core import (
    AgentStartsRow,
    CertificateRow,
    ClaimRow,
    Desired,
    Device,
    FloodRow,
    GatewayRouteRow,
    GatewayRow,
    OffloadFloodRow,
    RemovedDeviceRow,
    TelemetryRow,
)
from edgesplit_controller.storage.tables.device_state import (
    ConditionRow,
    DeviceBucketRow,
    DeviceSessionRow,
    LogBundleRow,
    LogPieceRow,
    RunningRow,
)
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow

DELETED: tuple[type[Table], ...] = (
    Desired, AgentStartsRow, FloodRow, OffloadFloodRow, DeviceSessionRow, RunningRow, ConditionRow, DeviceBucketRow,
    TelemetryRow, RolloutDeviceRow, LogBundleRow, GatewayRouteRow, GatewayRow, ClaimRow,
)  # fmt: skip
"""Tables whose rows of a removed device are deleted, in an order that references allow."""
KEPT: tuple[type[Table], ...] = (CertificateRow, RemovedDeviceRow)
"""Tables that keep rows of a removed device."""


def delete_device(session: Session, device: Device, now: float) -> None:
    """Delete a device whose certificates are revoked, and note its counter. The caller has locked the row."""
    name, counter = device.name, device.counter
    delete_rows(session, name)
    session.delete(device)
    session.flush()
    session.merge(RemovedDeviceRow(device=name, counter=counter, removed=now, cleared=False))


def delete_rows(session: Session, name: str) -> None:
    """Delete every row about the device of this name, also of one that was claimed and never enrolled. Devices behind
    it, if it is a gateway, offload to the cloud again."""
    session.flush()
    bundles = select(LogBundleRow.id).where(LogBundleRow.device == name)
    _execute(session, delete(LogPieceRow).where(LogPieceRow.bundle.in_(bundles)))
    _execute(session, update(GatewayRouteRow).where(GatewayRouteRow.gateway == name).values(gateway=None))
    for table in DELETED:
        _execute(session, delete(table).where(table.__table__.c.device == name))


def take_counter(session: Session, name: str) -> int:
    """The counter of a removed device whose name enrols again; 0 for a new name."""
    removed = session.get(RemovedDeviceRow, name)
    if removed is None:
        return 0
    session.delete(removed)
    return removed.counter


def _execute(session: Session, statement: Any) -> None:
    session.execute(statement.execution_options(synchronize_session=False))
