"""Lists devices a page at a time, filtered, ordered by name; each page costs the same (keyset pagination)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from edgesplit.errors import UsageError
from edgesplit_controller.fleet.overview import STATES, state_column
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import (
    AgentStartsRow,
    CertificateRow,
    ClaimRow,
    Desired,
    Device,
    FloodRow,
    OffloadFloodRow,
)
from edgesplit_controller.storage.tables.device_state import ConditionRow, DeviceSessionRow, RunningRow

T = TypeVar("T", Desired, ConditionRow, RunningRow)
MAX_PAGE = 1_000
"""Limit of devices on a page."""


@dataclass(frozen=True, slots=True)
class ListingQuery:
    """Filter and position of a page."""

    limit: int = MAX_PAGE
    after: str = ""
    """The last name on the previous page."""
    group: str | None = None
    labels: Mapping[str, str] | None = None
    state: str | None = None
    like: str = ""
    """A substring of the name."""
    groups: Collection[str] | None = None
    """Visible groups: devices of others are never returned; None: all are visible."""
    condition: str | None = None
    """Only devices that report a condition of this kind."""
    model: str | None = None
    """Only devices that run this model."""


@dataclass(frozen=True, slots=True)
class DevicePage:
    """Devices and open claims with their related rows. `after` is the name after which the next page begins, empty on
    the last page."""

    devices: Sequence[Device]
    claims: Sequence[ClaimRow]
    desired: Mapping[str, list[Desired]]
    sessions: Mapping[str, DeviceSessionRow]
    conditions: Mapping[str, list[ConditionRow]]
    copied: Mapping[str, float]
    floods: Mapping[str, FloodRow]
    offload_floods: Mapping[str, OffloadFloodRow]
    running: Mapping[str, list[RunningRow]]
    certificates: Mapping[str, float]
    """Unix time at which the certificate in use expires, by device."""
    after: str


class Listing:
    """Pages of one controller's devices."""

    def __init__(self, database: Database, *, stale_after_s: float, now: Callable[[], float]) -> None:
        self._database = database
        self._stale_after_s = stale_after_s
        self._now = now

    def page(self, query: ListingQuery) -> DevicePage:
        """One page; UsageError for an unknown state."""
        states = (*STATES, "claimed")
        if query.state is not None and query.state not in states:
            raise UsageError(f"no state {query.state[:40]!r}: one of {', '.join(states)}")
        limit = max(1, min(query.limit, MAX_PAGE))
        with self._database.read() as session:
            devices = self._devices(session, query, limit + 1) if query.state != "claimed" else []
            claims = self._claims(session, query, limit + 1)
            names = sorted({*(row.name for row in devices), *(row.device for row in claims)})[:limit]
            has_more = len({*(row.name for row in devices), *(row.device for row in claims)}) > limit
            on_page = set(names)
            claimed = {row.device for row in claims}
            devices = [row for row in devices if row.name in on_page and row.name not in claimed]
            return load_page(
                session, devices, [row for row in claims if row.device in on_page], names[-1] if has_more else ""
            )

    def page_of_device(self, device: Device) -> DevicePage:
        """A page with that device alone."""
        with self._database.read() as session:
            return load_page(session, [device])

    def _devices(self, session: Session, asked: ListingQuery, most: int) -> list[Device]:
        query = select(Device).where(Device.name > asked.after).order_by(Device.name).limit(most)
        for condition in self._filters(asked):
            query = query.where(condition)
        return list(session.scalars(query))

    def _filters(self, query: ListingQuery) -> list[ColumnElement[bool]]:
        filters: list[ColumnElement[bool]] = []
        if query.group is not None:
            filters.append(Device.group == query.group)
        if query.groups is not None:
            filters.append(Device.group.in_(sorted(query.groups)))
        for key, value in (query.labels or {}).items():
            filters.append(Device.labels[key].as_string() == value)
        if query.state is not None:
            filters.append(state_column(self._now(), self._stale_after_s) == query.state)
        if query.like:
            filters.append(Device.name.contains(query.like, autoescape=True))
        if query.condition is not None:
            with_condition = select(ConditionRow.device).where(ConditionRow.kind == query.condition)
            filters.append(Device.name.in_(with_condition))
        if query.model is not None:
            filters.append(Device.name.in_(select(RunningRow.device).where(RunningRow.model == query.model)))
        return filters

    def _claims(self, session: Session, asked: ListingQuery, most: int) -> list[ClaimRow]:
        """Open claims of names without an enrolled device, the newest claim of each name."""
        if asked.state not in (None, "claimed") or asked.condition is not None or asked.model is not None:
            return []
        enrolled = select(Device.name).where(Device.revoked.is_(None))
        query = select(ClaimRow).where(ClaimRow.is_open(self._now()), ClaimRow.device.not_in(enrolled))
        query = query.where(ClaimRow.device > asked.after)
        if asked.group is not None:
            query = query.where(ClaimRow.group == asked.group)
        if asked.groups is not None:
            query = query.where(ClaimRow.group.in_(sorted(asked.groups)))
        for key, value in (asked.labels or {}).items():
            query = query.where(ClaimRow.labels[key].as_string() == value)
        if asked.like:
            query = query.where(ClaimRow.device.contains(asked.like, autoescape=True))
        newest: dict[str, ClaimRow] = {}
        for claim in session.scalars(query.order_by(ClaimRow.device, ClaimRow.expires)):
            newest[claim.device] = claim
            if len(newest) > most:
                break
        return list(newest.values())


def load_page(
    session: Session, devices: Sequence[Device], claims: Sequence[ClaimRow] = (), after: str = ""
) -> DevicePage:
    """A page of these devices and claims, with their related rows read from the database."""
    names = [entry.name for entry in devices]
    desired = select(Desired).where(Desired.device.in_(names)).order_by(Desired.model)
    conditions = select(ConditionRow).where(ConditionRow.device.in_(names)).order_by(ConditionRow.since)
    running = select(RunningRow).where(RunningRow.device.in_(names)).order_by(RunningRow.model)
    session_rows = session.scalars(select(DeviceSessionRow).where(DeviceSessionRow.device.in_(names)))
    starts = session.scalars(select(AgentStartsRow).where(AgentStartsRow.device.in_(names)))
    floods = session.scalars(select(FloodRow).where(FloodRow.device.in_(names)))
    offload_floods = session.scalars(select(OffloadFloodRow).where(OffloadFloodRow.device.in_(names)))
    return DevicePage(
        devices, claims, after=after, certificates=_expiries(session, devices),
        desired=_by_device(session.scalars(desired)), conditions=_by_device(session.scalars(conditions)),
        running=_by_device(session.scalars(running)), sessions={row.device: row for row in session_rows},
        floods={row.device: row for row in floods},
        offload_floods={row.device: row for row in offload_floods},
        copied={row.device: row.copied for row in starts if row.copied is not None},
    )  # fmt: skip


def _by_device(rows: Iterable[T]) -> dict[str, list[T]]:
    grouped: dict[str, list[T]] = {}
    for row in rows:
        grouped.setdefault(row.device, []).append(row)
    return grouped


def _expiries(session: Session, devices: Sequence[Device]) -> dict[str, float]:
    serials = {device.certificate_serial: device.name for device in devices}
    rows = session.scalars(select(CertificateRow).where(CertificateRow.serial.in_(sorted(serials))))
    return {serials[row.serial]: row.expires for row in rows if row.expires > 0}
