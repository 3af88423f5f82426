"""Devices page by page: those that were asked for, in the order of their names, each page as cheap as the first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from edgesplit.errors import UsageError
from edgesplit_controller.fleet.overview import STATES, state_column
from edgesplit_controller.storage.database import CertificateRow, ClaimRow, Database, Desired, Device, Flood, Starts
from edgesplit_controller.storage.tables.device_state import ConditionRow, HeardRow, RunningRow

MOST = 1_000
"""Devices on a page."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which devices, and which page of them."""

    limit: int = MOST
    after: str = ""
    """The last name of the page before."""
    group: str | None = None
    labels: Mapping[str, str] | None = None
    state: str | None = None
    like: str = ""
    """A part of the name."""
    groups: Collection[str] | None = None
    """Nothing of other groups, whatever is asked; None: of all."""
    condition: str | None = None
    """Devices that say that this is wrong with them."""
    model: str | None = None
    """Devices that run this model."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some devices and claims with what is known of them, and the name to go on after (empty: there are no more)."""

    devices: Sequence[Device]
    claims: Sequence[ClaimRow]
    desired: Mapping[str, list[Desired]]
    heard: Mapping[str, HeardRow]
    conditions: Mapping[str, list[ConditionRow]]
    copied: Mapping[str, float]
    floods: Mapping[str, Flood]
    running: Mapping[str, list[RunningRow]]
    certificates: Mapping[str, float]
    """When the certificate in use expires."""
    after: str


class Listing:
    """Pages of one controller's devices."""

    def __init__(self, database: Database, *, stale_after_s: float, now: Callable[[], float]) -> None:
        self._database = database
        self._stale_after_s = stale_after_s
        self._now = now

    def page(self, asked: Asked) -> Page:
        """One page; UsageError for a state that is none."""
        known = (*STATES, "claimed")
        if asked.state is not None and asked.state not in known:
            raise UsageError(f"no state {asked.state[:40]!r}: one of {', '.join(known)}")
        limit = max(1, min(asked.limit, MOST))
        with self._database.read() as session:
            devices = self._devices(session, asked, limit + 1) if asked.state != "claimed" else []
            claims = self._claims(session, asked, limit + 1)
            names = sorted({*(one.name for one in devices), *(one.device for one in claims)})[:limit]
            more = len({*(one.name for one in devices), *(one.device for one in claims)}) > limit
            shown = set(names)
            claimed = {one.device for one in claims}
            devices = [one for one in devices if one.name in shown and one.name not in claimed]
            return page_of(session, devices, [one for one in claims if one.device in shown], names[-1] if more else "")

    def of(self, device: Device) -> Page:
        """That device alone."""
        with self._database.read() as session:
            return page_of(session, [device])

    def _devices(self, session: Session, asked: Asked, most: int) -> list[Device]:
        wanted = select(Device).where(Device.name > asked.after).order_by(Device.name).limit(most)
        for condition in self._conditions(asked):
            wanted = wanted.where(condition)
        return list(session.scalars(wanted))

    def _conditions(self, asked: Asked) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        if asked.group is not None:
            found.append(Device.group == asked.group)
        if asked.groups is not None:
            found.append(Device.group.in_(sorted(asked.groups)))
        for key, value in (asked.labels or {}).items():
            found.append(Device.labels[key].as_string() == value)
        if asked.state is not None:
            found.append(state_column(self._now(), self._stale_after_s) == asked.state)
        if asked.like:
            found.append(Device.name.contains(asked.like, autoescape=True))
        if asked.condition is not None:
            having = select(ConditionRow.device).where(ConditionRow.kind == asked.condition)
            found.append(Device.name.in_(having))
        if asked.model is not None:
            found.append(Device.name.in_(select(RunningRow.device).where(RunningRow.model == asked.model)))
        return found

    def _claims(self, session: Session, asked: Asked, most: int) -> list[ClaimRow]:
        """Open claims of devices that do not live, the newest of each name."""
        if asked.state not in (None, "claimed") or asked.condition is not None or asked.model is not None:
            return []
        living = select(Device.name).where(Device.revoked.is_(None))
        wanted = select(ClaimRow).where(
            ClaimRow.used.is_(None), ClaimRow.expires > self._now(), ClaimRow.device > asked.after,
            ClaimRow.device.not_in(living),
        )  # fmt: skip
        if asked.group is not None:
            wanted = wanted.where(ClaimRow.group == asked.group)
        if asked.groups is not None:
            wanted = wanted.where(ClaimRow.group.in_(sorted(asked.groups)))
        for key, value in (asked.labels or {}).items():
            wanted = wanted.where(ClaimRow.labels[key].as_string() == value)
        if asked.like:
            wanted = wanted.where(ClaimRow.device.contains(asked.like, autoescape=True))
        newest: dict[str, ClaimRow] = {}
        for claim in session.scalars(wanted.order_by(ClaimRow.device, ClaimRow.expires)):
            newest[claim.device] = claim
            if len(newest) > most:
                break
        return list(newest.values())


def page_of(session: Session, devices: Sequence[Device], claims: Sequence[ClaimRow] = (), after: str = "") -> Page:
    """These, with what is known of them beside their own rows."""
    names = [one.name for one in devices]
    desired: dict[str, list[Desired]] = {}
    for row in session.scalars(
        select(Desired).where(Desired.device.in_(names)).order_by(Desired.device, Desired.model)
    ):
        desired.setdefault(row.device, []).append(row)
    conditions: dict[str, list[ConditionRow]] = {}
    for one in session.scalars(select(ConditionRow).where(ConditionRow.device.in_(names)).order_by(ConditionRow.since)):
        conditions.setdefault(one.device, []).append(one)
    running: dict[str, list[RunningRow]] = {}
    for runs in session.scalars(select(RunningRow).where(RunningRow.device.in_(names)).order_by(RunningRow.model)):
        running.setdefault(runs.device, []).append(runs)
    starts = session.scalars(select(Starts).where(Starts.device.in_(names), Starts.copied.is_not(None)))
    return Page(
        devices=devices,
        claims=claims,
        desired=desired,
        heard={row.device: row for row in session.scalars(select(HeardRow).where(HeardRow.device.in_(names)))},
        conditions=conditions,
        running=running,
        copied={row.device: row.copied for row in starts if row.copied is not None},
        floods={row.device: row for row in session.scalars(select(Flood).where(Flood.device.in_(names)))},
        certificates=_expiries(session, devices),
        after=after,
    )


def _expiries(session: Session, devices: Sequence[Device]) -> dict[str, float]:
    serials = {one.certificate_serial: one.name for one in devices}
    rows = session.scalars(select(CertificateRow).where(CertificateRow.serial.in_(sorted(serials))))
    return {serials[row.serial]: row.expires for row in rows if row.expires > 0}
