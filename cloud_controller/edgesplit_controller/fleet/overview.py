"""The fleet at a glance: how many devices are how, counted by the database; nobody loads ten thousand rows for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select, true
from sqlalchemy.orm import Session

from edgesplit_controller.fleet import conditions as causes
from edgesplit_controller.history.buckets import SPANS
from edgesplit_controller.storage.database import CertificateRow, ClaimRow, Database, Device, Flood, Release, Starts
from edgesplit_controller.storage.database import Model as ModelRow
from edgesplit_controller.storage.tables.device_state import ConditionRow, HeardRow, ModelRolledRow, RunningRow

STATES = ("online", "stale", "offline", "revoked")
MOST_GROUPS = 200
"""Of each kind that are told of, the largest first."""
LATELY_S = 900
"""Requests are added up over so long."""
Shown = dict[str, Any]


def state_column(now: float, stale_after_s: float) -> ColumnElement[str]:
    """A device's state (`devices.state_of`) as the database computes it."""
    return case(
        (Device.revoked.is_not(None), "revoked"),
        (or_(Device.alive.is_(False), Device.last_seen.is_(None)), "offline"),
        (Device.last_seen >= now - stale_after_s, "online"),
        else_="stale",
    )


class Fleet:
    """Counts over all devices, or over those of some groups."""

    def __init__(self, database: Database, *, stale_after_s: float, now: Callable[[], float]) -> None:
        self._database = database
        self._stale_after_s = stale_after_s
        self._now = now

    def overview(self, groups: Collection[str] | None = None) -> Shown:
        """Everything that the first page shows. `groups`: only devices of these; None: all."""
        now = self._now()
        with self._database.read() as session:
            view = _View(session, now, self._stale_after_s, groups)
            return {
                "at": now,
                "devices": view.states(),
                "agents": view.agents(),
                "classes": view.classes(),
                "models": view.models(),
                "failures": view.failures(),
                "conditions": view.conditions(),
                "lately_s": LATELY_S,
            }

    def states(self) -> dict[str, int]:
        """Devices by state."""
        with self._database.read() as session:
            return _View(session, self._now(), self._stale_after_s, None).states()

    def running(self) -> list[tuple[str, str, int]]:
        """Devices that are online by model and state."""
        with self._database.read() as session:
            return _View(session, self._now(), self._stale_after_s, None).running()

    def conditions(self) -> list[Shown]:
        """What is wrong, by kind."""
        with self._database.read() as session:
            return _View(session, self._now(), self._stale_after_s, None).conditions()


class _View:
    def __init__(self, session: Session, now: float, stale_after_s: float, groups: Collection[str] | None) -> None:
        self._session = session
        self._now = now
        self._state = state_column(now, stale_after_s)
        self._mine: ColumnElement[bool] = true() if groups is None else Device.group.in_(sorted(groups))
        self._groups = groups
        self._here = and_(self._mine, Device.revoked.is_(None))
        self._living = and_(self._here, Device.alive.is_(True), Device.last_seen >= now - stale_after_s)

    def states(self) -> dict[str, int]:
        """By state, with those that were claimed and have not come."""
        counted = select(self._state, func.count()).where(self._mine).group_by(self._state)
        found = {str(state): int(count) for state, count in self._session.execute(counted)}
        made_up = select(HeardRow.emulated, HeardRow.simulated, func.count()).group_by(
            HeardRow.emulated, HeardRow.simulated
        )
        made_up = made_up.join(Device, HeardRow.device == Device.name).where(self._here)
        kinds = [(bool(one[0]), bool(one[1]), int(one[2])) for one in self._session.execute(made_up)]
        states = {state: found.get(state, 0) for state in STATES}
        return {
            **states,
            "claimed": self._claimed(),
            "total": sum(states.values()) - states["revoked"],
            "emulated": sum(count for emulated, simulated, count in kinds if emulated and not simulated),
            "simulated": sum(count for _, simulated, count in kinds if simulated),
        }

    def _claimed(self) -> int:
        living = select(Device.name).where(Device.revoked.is_(None))
        mine = true() if self._groups is None else ClaimRow.group.in_(sorted(self._groups))
        open_claims = select(func.count(func.distinct(ClaimRow.device))).where(
            ClaimRow.used.is_(None), ClaimRow.expires > self._now, ClaimRow.device.not_in(living), mine
        )
        return self._session.scalar(open_claims) or 0

    def agents(self) -> list[Shown]:
        """Versions of the agent."""
        asked = select(HeardRow.agent, func.count()).join(Device, Device.name == HeardRow.device)
        return self._grouped(asked.where(self._here).group_by(HeardRow.agent), ("agent", "devices"))

    def classes(self) -> list[Shown]:
        """Device classes."""
        asked = select(Device.device_class, func.count()).where(self._here).group_by(Device.device_class)
        return self._grouped(asked, ("device_class", "devices"))

    def models(self) -> list[Shown]:
        """By model: releases by the state they are in, and cuts in use; by the word of devices that are online."""
        releases = self._by_model(RunningRow.release, RunningRow.state)
        cuts = self._by_model(RunningRow.cut, only=RunningRow.cut != "")
        lately = self._lately()
        refs = self._refs({row[1] for row in releases if row[1]})
        models = sorted({row[0] for row in releases} | set(lately))
        return [
            {
                "model": model,
                "releases": [
                    {"release": release, "version": refs.get(release), "state": state, "devices": count}
                    for name, release, state, count in releases
                    if name == model
                ],
                "cuts": [{"cut": cut, "devices": count} for name, cut, count in cuts if name == model],
                **lately.get(model, {"requests": 0, "failed": 0, "fallbacks": 0}),
            }
            for model in models
        ]

    def running(self) -> list[tuple[str, str, int]]:
        """By model and state."""
        return [(str(model), str(state), int(count)) for model, state, count in self._by_model(RunningRow.state)]

    def _by_model(self, *columns: Any, only: ColumnElement[bool] | None = None) -> list[Any]:
        asked = select(RunningRow.model, *columns, func.count()).join(Device, Device.name == RunningRow.device)
        asked = asked.where(self._living, true() if only is None else only).group_by(RunningRow.model, *columns)
        return list(self._session.execute(asked.order_by(func.count().desc()).limit(MOST_GROUPS)))

    def _refs(self, releases: Collection[str]) -> dict[str, str]:
        asked = select(Release.digest, ModelRow.name, ModelRow.version).join(ModelRow, ModelRow.id == Release.model_id)
        found = self._session.execute(asked.where(Release.digest.in_(sorted(releases))))
        return {digest: f"{name}@{version}" for digest, name, version in found}

    def _lately(self) -> dict[str, Shown]:
        """Requests of the last minutes, as far as they were added up."""
        names = ("requests", "failed", "fallbacks")
        counts = [func.sum(ModelRolledRow.content[name].as_integer()) for name in names]
        mine = true() if self._groups is None else ModelRolledRow.group.in_(sorted(self._groups))
        asked = (
            select(ModelRolledRow.model, *counts)
            .where(mine, ModelRolledRow.span_s == SPANS["minute"].seconds)
            .where(ModelRolledRow.begins >= self._now - LATELY_S)
            .group_by(ModelRolledRow.model)
        )
        return {
            str(row[0]): {name: int(value or 0) for name, value in zip(names, tuple(row)[1:], strict=True)}
            for row in self._session.execute(asked)
        }

    def failures(self) -> list[Shown]:
        """Releases that failed, grouped by cause, the commonest first; each with a device to look at."""
        columns = (RunningRow.model, RunningRow.wanted, RunningRow.state, RunningRow.cause)
        asked = (
            select(*columns, func.count(), func.min(RunningRow.device))
            .join(Device, Device.name == RunningRow.device)
            .where(self._here, RunningRow.state.in_(sorted(causes.FAILED)))
            .group_by(*columns)
            .order_by(func.count().desc())
            .limit(MOST_GROUPS)
        )
        return [
            {"model": model, "release": wanted, "state": state, "cause": cause, "devices": count, "example": example}
            for model, wanted, state, cause, count, example in self._session.execute(asked)
        ]

    def conditions(self) -> list[Shown]:
        """What is wrong, grouped by kind, with the device that has had it longest."""
        found = [self._said(), *(self._counted(*one) for one in self._derived())]
        every = [one for some in found for one in some if one["devices"]]
        return sorted(every, key=lambda one: (-one["devices"], one["kind"]))

    def _said(self) -> list[Shown]:
        """By devices' own word; of one that is gone, what it said is no longer known to be so."""
        asked = (
            select(ConditionRow.kind, func.count(), func.min(ConditionRow.since), func.min(ConditionRow.device))
            .join(Device, Device.name == ConditionRow.device)
            .where(self._living)
            .group_by(ConditionRow.kind)
        )
        return [_shown(kind, count, since, example) for kind, count, since, example in self._session.execute(asked)]

    def _derived(self) -> list[tuple[str, Any, Any]]:
        """What the controller knows by itself: kind, condition, and the column that says since when."""
        now = self._now
        certificate = and_(
            CertificateRow.serial == Device.certificate_serial, CertificateRow.revoked.is_(None),
            CertificateRow.expires > 0, CertificateRow.expires < now + causes.NEAR_EXPIRY_S,
        )  # fmt: skip
        flooding = and_(Flood.device == Device.name, Flood.held_until > now)
        copied = and_(Starts.device == Device.name, Starts.copied.is_not(None))
        deaf = and_(HeardRow.device == Device.name, HeardRow.deaf_since < now - causes.DEAF_S, self._living)
        expires = CertificateRow.expires - causes.NEAR_EXPIRY_S
        return [
            ("certificate expires", (CertificateRow, certificate), expires),
            ("flooding", (Flood, flooding), Flood.at),
            ("copied", (Starts, copied), Starts.copied),
            ("deaf", (HeardRow, deaf), HeardRow.deaf_since),
        ]

    def _counted(self, kind: str, where: tuple[Any, Any], since: Any) -> list[Shown]:
        table, condition = where
        asked = select(func.count(), func.min(since), func.min(Device.name)).select_from(Device).join(table, condition)
        count, first, example = self._session.execute(asked.where(self._here)).one()
        return [_shown(kind, count, first, example)]

    def _grouped(self, asked: Select[str, int], names: tuple[str, str]) -> list[Shown]:
        ranked = asked.order_by(func.count().desc()).limit(MOST_GROUPS)
        return [dict(zip(names, row, strict=True)) for row in self._session.execute(ranked)]


def _shown(kind: str, devices: int, since: float | None, example: str | None) -> Shown:
    return {"kind": kind, "devices": devices, "since": since, "example": example, "do": causes.DO.get(kind, "")}
