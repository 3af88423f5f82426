"""Log bundles of devices: requested, received in pieces in any order, verified, bounded, read.

A log bundle is what a device reports about itself: gzip of one JSON object. It is unpacked within limits when it is
read. Its content is trusted for nothing but its sender, the device in the topic; pieces that were not requested from
that device are dropped.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zlib
from collections.abc import Callable
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from edgesplit.errors import MalformedMessage, NotFound
from edgesplit.mqtt.messages import DeviceJob, JobRefused, LogPiece
from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.fleet.connection_state import offline_text
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Device
from edgesplit_controller.storage.tables.device_state import LogBundleRow, LogPieceRow

MAX_BUNDLES = 3
"""Newest log bundles that are kept per device."""
MAX_PIECES = 64
"""Limit of pieces of one log bundle."""
REQUEST_TIMEOUT_S = 120.0
"""Seconds without an answer after which a device may be asked again."""
RETENTION_S = {"requested": 3_600.0, "complete": 30 * 86_400.0}
"""Seconds after which log bundles are deleted: those without all pieces (`requested`), complete ones (`complete`)."""
MAX_UNPACKED_BYTES = 16 * 2**20
"""Limit of the unpacked size, in bytes."""
SendJob = Callable[[str, DeviceJob], None]
"""Sends a job to a device."""


class LogBundleStore:
    """The log bundles of one controller. `send_job` sends a job to a device."""

    def __init__(self, database: Database, send_job: SendJob, *, now: Callable[[], float]) -> None:
        self._database = database
        self._send_job = send_job
        self._now = now

    def request(self, name: str, who: str) -> dict[str, Any]:
        """Request a device's logs; Conflict if it is offline. A request that is still open is returned instead of a new
        one."""
        job = DeviceJob(id=secrets.token_hex(8), kind="logs")
        now = self._now()
        with self._database.write() as session:
            device = session.get(Device, name)
            if device is None:
                raise not_found("device", name, session.scalars(select(Device.name)))
            if device.revoked or not device.alive:
                raise Conflict(f"{offline_text(session, device, now)}: request its logs when it is online")
            open_requests = select(LogBundleRow).where(
                LogBundleRow.device == name,
                LogBundleRow.state.in_(("requested", "receiving")),
                LogBundleRow.requested > now - REQUEST_TIMEOUT_S,
            )
            if (existing := session.scalars(open_requests).first()) is not None:
                return to_dict(existing)
            row = LogBundleRow(
                id=job.id, device=name, who=who, requested=now, state="requested", reason="", total=0, received=0,
                sha256="",
            )  # fmt: skip
            session.add(row)
            session.flush()
            _delete_old(session, name)
            record_event(session, now, who, "device.logs", name, bundle=job.id)
        self._send_job(name, job)
        return to_dict(row)

    def trim(self) -> None:
        """Delete old log bundles, and mark those that never became complete as failed."""
        with self._database.write() as session:
            now = self._now()
            overdue = (
                LogBundleRow.state.in_(("requested", "receiving")),
                LogBundleRow.requested < now - RETENTION_S["requested"],
            )
            for row in session.scalars(select(LogBundleRow).where(*overdue)):
                _fail(session, row, "it did not arrive in time")
            old = list(
                session.scalars(select(LogBundleRow.id).where(LogBundleRow.requested < now - RETENTION_S["complete"]))
            )
            session.execute(delete(LogPieceRow).where(LogPieceRow.bundle.in_(old)))
            session.execute(delete(LogBundleRow).where(LogBundleRow.id.in_(old)))

    def of_device(self, name: str) -> list[dict[str, Any]]:
        """The log bundles of a device, newest first."""
        with self._database.read() as session:
            query = select(LogBundleRow).where(LogBundleRow.device == name).order_by(LogBundleRow.requested.desc())
            return [to_dict(row) for row in session.scalars(query)]

    def get(self, name: str, number: str) -> dict[str, Any]:
        """One log bundle, with its content once it is complete."""
        with self._database.read() as session:
            row = session.get(LogBundleRow, number)
            if row is None or row.device != name:
                raise NotFound(f"no bundle {number[:40]!r} of {name}: `edgectl device logs {name}` requests one")
            content = unpack(row.content) if row.content is not None else None
            return {**to_dict(row), "content": content}


def on_message(session: Session, name: str, message: LogPiece | JobRefused) -> None:
    """Process a piece of a log bundle, or a device's refusal. Ignored if it was not requested from this device."""
    row = session.get(LogBundleRow, message.id)
    if row is None or row.device != name or row.state not in ("requested", "receiving"):
        return
    if isinstance(message, JobRefused):
        row.state, row.reason = "refused", message.reason
        return
    if row.state == "requested":
        row.state, row.total, row.sha256 = "receiving", message.total, message.sha256
    if (row.total, row.sha256) != (message.total, message.sha256) or message.offset + len(message.data) > row.total:
        _fail(session, row, "its pieces contradict each other")
        return
    if session.get(LogPieceRow, (row.id, message.offset)) is not None:
        return
    session.add(LogPieceRow(bundle=row.id, offset=message.offset, data=message.data))
    session.flush()
    _complete(session, row)


def _complete(session: Session, row: LogBundleRow) -> None:
    """Join the pieces once all have arrived, and verify size and SHA-256."""
    of_bundle = LogPieceRow.bundle == row.id
    count, received = session.execute(
        select(func.count(), func.sum(func.length(LogPieceRow.data))).where(of_bundle)
    ).one()  # fmt: skip
    row.received = int(received or 0)
    if row.received < row.total and count < MAX_PIECES:
        return
    pieces = session.scalars(select(LogPieceRow).where(of_bundle).order_by(LogPieceRow.offset)).all()
    whole = b"".join(piece.data for piece in pieces)
    session.execute(delete(LogPieceRow).where(of_bundle))
    if len(whole) != row.total or hashlib.sha256(whole).hexdigest() != row.sha256:
        _fail(session, row, "its content does not match its digest")
        return
    row.content, row.state = whole, "complete"


def _fail(session: Session, row: LogBundleRow, why: str) -> None:
    session.execute(delete(LogPieceRow).where(LogPieceRow.bundle == row.id))
    row.state, row.reason, row.content = "corrupt", why, None


def _delete_old(session: Session, name: str) -> None:
    order = (
        select(LogBundleRow.id)
        .where(LogBundleRow.device == name)
        .order_by(LogBundleRow.requested.desc(), LogBundleRow.id)
    )
    old = list(session.scalars(order.offset(MAX_BUNDLES)))
    session.execute(delete(LogPieceRow).where(LogPieceRow.bundle.in_(old)))
    session.execute(delete(LogBundleRow).where(LogBundleRow.id.in_(old)))


def unpack(content: bytes) -> dict[str, Any]:
    """The JSON object in a log bundle; MalformedMessage for anything else, and for more than `MAX_UNPACKED_BYTES`."""
    decompressor = zlib.decompressobj(wbits=31)
    try:
        raw = decompressor.decompress(content, MAX_UNPACKED_BYTES)
        if not decompressor.eof:
            raise MalformedMessage(f"the bundle is longer than {MAX_UNPACKED_BYTES} bytes, or was cut off")
        content_object = json.loads(raw)
    except (zlib.error, ValueError, RecursionError) as error:
        raise MalformedMessage(f"the bundle cannot be read: {error}") from error
    if not isinstance(content_object, dict):
        raise MalformedMessage("the bundle is no JSON object")
    return content_object


def to_dict(row: LogBundleRow) -> dict[str, Any]:
    """A log bundle as the API returns it, without its content."""
    names = ("id", "device", "requested", "state", "reason", "total", "received")
    return {**{name: getattr(row, name) for name in names}, "requested_by": row.who}
