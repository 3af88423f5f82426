"""Changes in the fleet, read from the database that all controller processes share.

No writer announces its change: device rows carry the time of their last write (`Device.changed`), events are numbered,
and devices that become stale are computed here. So a change is seen whichever process made it, and without a reader
there is no cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device, Event

Kind = Literal["device", "rollout", "model", "alert"]
OVERLAP_S = 5.0
"""Seconds by which readings overlap: a change may be committed that much later than its time stamp, and clocks of
several machines may differ by that much."""
REMOVED = "device.removed"
"""Event of a device's removal; its detail has the device's group."""
EVENT_OVERLAP = 200
"""Newest events that each reading looks through again, because events are numbered before they are committed."""
KIND_BY_PREFIX: tuple[tuple[str, Kind], ...] = (
    ("device.flooding", "alert"), ("device.copied", "alert"), ("device.endpoint_flooded", "alert"),
    ("device.gateway_flooded", "alert"), ("device.revocation_list_expired", "alert"),
    ("device.repeated_answers_changed", "alert"),
    ("device.", "device"), ("gateway.", "device"),
    ("model.", "model"), ("agent.", "model"), ("release.", "model"), ("replan.", "model"),
    ("deployment.", "rollout"), ("rollout.", "rollout"),
)  # fmt: skip
"""Kind of change by the prefix of an event's name. An event with none of them (keys) changes no page but the list of
events."""


class Change(msgspec.Struct, frozen=True):
    """Names a subject that changed, without its content: a reader fetches what it may see."""

    kind: Kind
    subject: str
    group: str | None = None
    """Group of the device; None if the subject is not a device."""


class ChangeFeed:
    """Reads the changes since the last reading. Blocking; not thread-safe."""

    def __init__(self, database: Database, *, stale_after_s: float, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._stale_after_s = stale_after_s
        self._now = now
        self._since: float | None = None
        self._stamps: dict[str, float] = {}
        self._events: set[int] = set()

    def start(self) -> None:
        """Set the starting point: later writes are changes."""
        self._since = self._now()
        with self._database.read() as session:
            self._stamps = {name: changed for name, _, changed in self._written_since(session, self._since)}
            self._events = {number for number, _, _ in _newest_events(session)}

    def read(self) -> list[Change]:
        """The changes since the last call, without duplicates."""
        if self._since is None:
            self.start()
            return []
        since, now = self._since, self._now()
        with self._database.read() as session:
            changes = [
                *self._from_device_rows(session, since),
                *self._newly_stale(session, since, now),
                *self._from_events(session),
            ]
        self._since = now
        return list(dict.fromkeys(changes))

    def _from_device_rows(self, session: Session, since: float) -> Iterable[Change]:
        """Devices whose row was written."""
        rows = self._written_since(session, since)
        # The overlap returns rows again: a row is a change only if its time stamp differs from the last reading's.
        before, self._stamps = self._stamps, {name: changed for name, _, changed in rows}
        return [Change("device", name, group) for name, group, changed in rows if before.get(name) != changed]

    def _written_since(self, session: Session, since: float) -> list[tuple[str, str, float]]:
        written = select(Device.name, Device.group, Device.changed).where(Device.changed > since - OVERLAP_S)
        return [(name, group, changed) for name, group, changed in session.execute(written)]

    def _newly_stale(self, session: Session, since: float, now: float) -> Iterable[Change]:
        """Devices that became stale, for which no row is written."""
        became_stale = (Device.last_seen >= since - self._stale_after_s, Device.last_seen < now - self._stale_after_s)
        silent = select(Device.name, Device.group).where(Device.alive, *became_stale)
        return [Change("device", name, group) for name, group in session.execute(silent)]

    def _from_events(self, session: Session) -> Iterable[Change]:
        """New events, as changes of their subjects."""
        newest = _newest_events(session)
        fresh = [(what, subject) for number, what, subject in newest if number not in self._events]
        removals = [number for number, what, _ in newest if what == REMOVED and number not in self._events]
        self._events = {number for number, _, _ in newest}
        changes = [Change(kind, subject) for what, subject in reversed(fresh) if (kind := kind_of(what)) is not None]
        subjects = {change.subject for change in changes if change.kind in ("device", "alert")}
        device_query = select(Device.name, Device.group).where(Device.name.in_(subjects))
        rows = session.execute(device_query).all() if subjects else []
        groups = {row.name: row.group for row in rows}
        if removals:
            # A removed device has no row any more; its removal says whose pages show it.
            gone = session.execute(select(Event.subject, Event.detail).where(Event.id.in_(removals)))
            groups = {name: detail.get("group", "") for name, detail in gone} | groups
        return [msgspec.structs.replace(change, group=groups.get(change.subject)) for change in changes]


def kind_of(what: str) -> Kind | None:
    """The kind of change of an event with this name; None if only the list of events shows it."""
    return next((kind for beginning, kind in KIND_BY_PREFIX if what.startswith(beginning)), None)


def _newest_events(session: Session) -> list[tuple[int, str, str]]:
    """Number, name and subject of the newest events, newest first."""
    newest = select(Event.id, Event.what, Event.subject).order_by(Event.id.desc()).limit(EVENT_OVERLAP)
    return [(number, what, subject) for number, what, subject in session.execute(newest)]
