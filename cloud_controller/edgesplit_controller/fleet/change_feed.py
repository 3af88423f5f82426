"""What changed in the fleet, read from the database that every controller process shares.

Nothing has to announce a change: rows carry the time they were last written (`Device.changed`), events are numbered,
and silence is counted here. So a change is seen whichever process made it, and one that nobody watches costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit_controller.storage.database import Database, Device, Event

Kind = Literal["device", "rollout", "model", "alert"]
OVERLAP_S = 5.0
"""A change may be committed so much later than it was stamped, and clocks of several machines differ by so much."""
EVENTS_AGAIN = 200
"""Events are numbered before they are committed: so many of the newest are looked through again."""
KINDS: tuple[tuple[str, Kind], ...] = (
    ("device.flooding", "alert"),
    ("device.copied", "alert"),
    ("device.", "device"),
    ("gateway.", "device"),
    ("model.", "model"),
    ("agent.", "model"),
    ("release.", "model"),
    ("replan.", "model"),
    ("deployment.", "rollout"),
    ("rollout.", "rollout"),
)
"""By the beginning of an event's name; what is not here (keys) changes no page but the list of events."""


class Change(msgspec.Struct, frozen=True):
    """What changed. Named, never sent: a reader fetches what it may see."""

    kind: Kind
    subject: str
    group: str | None = None
    """Of the device that it is about; None where it is about none."""


class Changes:
    """The changes since the last reading. Blocking; one caller."""

    def __init__(self, database: Database, *, stale_after_s: float, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._stale_after_s = stale_after_s
        self._now = now
        self._since: float | None = None
        self._stamps: dict[str, float] = {}
        self._events: set[int] = set()

    def begin(self) -> None:
        """Note where the world stands: what comes after is a change."""
        self._since = self._now()
        with self._database.read() as session:
            self._stamps = {name: changed for name, _, changed in self._written(session, self._since)}
            self._events = {number for number, _, _ in _newest_events(session)}

    def read(self) -> list[Change]:
        """What changed since the last call, each once."""
        if self._since is None:
            self.begin()
            return []
        since, now = self._since, self._now()
        with self._database.read() as session:
            found = [*self._devices(session, since), *self._silent(session, since, now), *self._told(session)]
        self._since = now
        return list(dict.fromkeys(found))

    def _devices(self, session: Session, since: float) -> Iterable[Change]:
        """Devices whose row was written."""
        rows = self._written(session, since)
        before, self._stamps = self._stamps, {name: changed for name, _, changed in rows}
        return [Change("device", name, group) for name, group, changed in rows if before.get(name) != changed]

    def _written(self, session: Session, since: float) -> list[tuple[str, str, float]]:
        written = select(Device.name, Device.group, Device.changed).where(Device.changed > since - OVERLAP_S)
        return [(name, group, changed) for name, group, changed in session.execute(written)]

    def _silent(self, session: Session, since: float, now: float) -> Iterable[Change]:
        """Devices that became stale meanwhile, which nobody writes down."""
        last = (Device.last_seen >= since - self._stale_after_s, Device.last_seen < now - self._stale_after_s)
        silent = select(Device.name, Device.group).where(Device.alive, *last)
        return [Change("device", name, group) for name, group in session.execute(silent)]

    def _told(self, session: Session) -> Iterable[Change]:
        """Events, which name what else was done."""
        newest = _newest_events(session)
        fresh = [(what, subject) for number, what, subject in newest if number not in self._events]
        self._events = {number for number, _, _ in newest}
        told = [Change(kind, subject) for what, subject in reversed(fresh) if (kind := kind_of(what)) is not None]
        about = {one.subject for one in told if one.kind in ("device", "alert")}
        known = select(Device.name, Device.group).where(Device.name.in_(about))
        rows = session.execute(known).all() if about else []
        groups = {row.name: row.group for row in rows}
        return [msgspec.structs.replace(one, group=groups.get(one.subject)) for one in told]


def kind_of(what: str) -> Kind | None:
    """The kind of change that an event of this name is; None for one that no page but the list of events shows."""
    return next((kind for beginning, kind in KINDS if what.startswith(beginning)), None)


def _newest_events(session: Session) -> list[tuple[int, str, str]]:
    """Number, name and subject, newest first."""
    newest = select(Event.id, Event.what, Event.subject).order_by(Event.id.desc()).limit(EVENTS_AGAIN)
    return [(number, what, subject) for number, what, subject in session.execute(newest)]
