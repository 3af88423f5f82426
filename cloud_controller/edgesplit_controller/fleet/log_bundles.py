"""Log bundles of devices: asked for, received in pieces in any order, checked, bounded, read.

A bundle is what a device says of itself: gzip of one JSON object. It is unpacked within bounds when somebody reads it,
and nothing in it is believed but that the device of that name sent it: pieces that nobody asked that device for are
dropped.
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
from edgesplit.mqtt.messages import BundlePiece, Job, JobRefused
from edgesplit_controller.errors import Conflict, unknown
from edgesplit_controller.storage.database import Database, Device, record
from edgesplit_controller.storage.tables.device_state import BundlePieceRow, BundleRow

KEPT = 3
"""Newest bundles of each device."""
MOST_PIECES = 64
ANSWER_S = 120.0
"""A device that has not answered by then may be asked again."""
KEPT_S = {"asked": 3_600.0, "here": 30 * 86_400.0}
MOST_UNPACKED = 16 * 2**20
Ask = Callable[[str, Job], None]


class Bundles:
    """The log bundles of one controller. `ask` sends a job to a device."""

    def __init__(self, database: Database, ask: Ask, *, now: Callable[[], float]) -> None:
        self._database = database
        self._ask = ask
        self._now = now

    def request(self, name: str, who: str) -> dict[str, Any]:
        """Ask a device for its logs; Conflict where it is not here, or was asked a moment ago."""
        job = Job(id=secrets.token_hex(8), what="logs")
        now = self._now()
        with self._database.write() as session:
            device = session.get(Device, name)
            if device is None:
                raise unknown("device", name, session.scalars(select(Device.name)))
            if device.revoked or not device.alive:
                raise Conflict(f"{name} is not here: its logs can be asked for when it is online")
            waits = select(BundleRow).where(
                BundleRow.device == name, BundleRow.state.in_(("asked", "coming")), BundleRow.asked > now - ANSWER_S
            )
            if (before := session.scalars(waits).first()) is not None:
                return shown(before)
            row = BundleRow(
                id=job.id, device=name, who=who, asked=now, state="asked", why="", total=0, received=0, sha256="",
            )  # fmt: skip
            session.add(row)
            session.flush()
            _forget_old(session, name)
            record(session, now, who, "device.logs", name, bundle=job.id)
        self._ask(name, job)
        return shown(row)

    def trim(self) -> None:
        """Drop bundles that are old, and pieces of those that never became whole."""
        with self._database.write() as session:
            now = self._now()
            waits = (BundleRow.state.in_(("asked", "coming")), BundleRow.asked < now - KEPT_S["asked"])
            for row in session.scalars(select(BundleRow).where(*waits)):
                _spoil(session, row, "it never came")
            old = list(session.scalars(select(BundleRow.id).where(BundleRow.asked < now - KEPT_S["here"])))
            session.execute(delete(BundlePieceRow).where(BundlePieceRow.bundle.in_(old)))
            session.execute(delete(BundleRow).where(BundleRow.id.in_(old)))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The bundles of a device, newest first."""
        with self._database.read() as session:
            wanted = select(BundleRow).where(BundleRow.device == name).order_by(BundleRow.asked.desc())
            return [shown(row) for row in session.scalars(wanted)]

    def get(self, name: str, number: str) -> dict[str, Any]:
        """One bundle, with what is in it once it is here."""
        with self._database.read() as session:
            row = session.get(BundleRow, number)
            if row is None or row.device != name:
                raise NotFound(f"no bundle {number[:40]!r} of {name}: `edgectl device logs {name}` asks for one")
            content = unpacked(row.content) if row.content is not None else None
            return {**shown(row), "content": content}


def take_in(session: Session, name: str, message: BundlePiece | JobRefused) -> None:
    """A piece came, or word that none will. What nobody asked this device for changes nothing."""
    row = session.get(BundleRow, message.id)
    if row is None or row.device != name or row.state not in ("asked", "coming"):
        return
    if isinstance(message, JobRefused):
        row.state, row.why = "refused", message.why
        return
    if row.state == "asked":
        row.state, row.total, row.sha256 = "coming", message.total, message.sha256
    if (row.total, row.sha256) != (message.total, message.sha256) or message.offset + len(message.data) > row.total:
        _spoil(session, row, "its pieces do not fit together")
        return
    if session.get(BundlePieceRow, (row.id, message.offset)) is not None:
        return
    session.add(BundlePieceRow(bundle=row.id, offset=message.offset, data=message.data))
    session.flush()
    _complete(session, row)


def _complete(session: Session, row: BundleRow) -> None:
    """Put the pieces together once all are here."""
    mine = BundlePieceRow.bundle == row.id
    count, received = session.execute(
        select(func.count(), func.sum(func.length(BundlePieceRow.data))).where(mine)
    ).one()  # fmt: skip
    row.received = int(received or 0)
    if row.received < row.total and count < MOST_PIECES:
        return
    pieces = session.scalars(select(BundlePieceRow).where(mine).order_by(BundlePieceRow.offset)).all()
    whole = b"".join(piece.data for piece in pieces)
    session.execute(delete(BundlePieceRow).where(mine))
    if len(whole) != row.total or hashlib.sha256(whole).hexdigest() != row.sha256:
        _spoil(session, row, "its pieces do not make what they should")
        return
    row.content, row.state = whole, "here"


def _spoil(session: Session, row: BundleRow, why: str) -> None:
    session.execute(delete(BundlePieceRow).where(BundlePieceRow.bundle == row.id))
    row.state, row.why, row.content = "spoilt", why, None


def _forget_old(session: Session, name: str) -> None:
    order = select(BundleRow.id).where(BundleRow.device == name).order_by(BundleRow.asked.desc(), BundleRow.id)
    old = list(session.scalars(order.offset(KEPT)))
    session.execute(delete(BundlePieceRow).where(BundlePieceRow.bundle.in_(old)))
    session.execute(delete(BundleRow).where(BundleRow.id.in_(old)))


def unpacked(content: bytes) -> dict[str, Any]:
    """The JSON object in a bundle; MalformedMessage for anything else, and for what grows beyond bounds."""
    unpack = zlib.decompressobj(wbits=31)
    try:
        raw = unpack.decompress(content, MOST_UNPACKED)
        if not unpack.eof:
            raise MalformedMessage(f"the bundle is longer than {MOST_UNPACKED} bytes, or was cut off")
        found = json.loads(raw)
    except (zlib.error, ValueError, RecursionError) as error:
        raise MalformedMessage(f"the bundle cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise MalformedMessage("the bundle is no JSON object")
    return found


def shown(row: BundleRow) -> dict[str, Any]:
    """A bundle, without what is in it."""
    names = ("id", "device", "who", "asked", "state", "why", "total", "received")
    return {name: getattr(row, name) for name in names}
