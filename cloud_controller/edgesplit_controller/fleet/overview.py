"""Counts over the fleet, computed by the database without loading a row per device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select, true
from sqlalchemy.orm import Session

from edgesplit_controller.fleet import conditions as causes
from edgesplit_controller.history.buckets import SPANS
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import (
    AgentStartsRow,
    CertificateRow,
    ClaimRow,
    Device,
    FloodRow,
    OffloadFloodRow,
    ReleaseRow,
)
from edgesplit_controller.storage.tables.core import Model as ModelRow
from edgesplit_controller.storage.tables.device_state import ConditionRow, DeviceSessionRow, ModelBucketRow, RunningRow

STATES = ("online", "stale", "offline", "revoked")
MAX_ROWS = 200
"""Limit of rows of each count, the largest first."""
RECENT_S = 900
"""Period over which recent requests are summed, in seconds."""
JsonObject = dict[str, Any]


def state_column(now: float, stale_after_s: float) -> ColumnElement[str]:
    """A device's connection state (see `devices.state_of`) as an SQL expression."""
    return case(
        (Device.revoked.is_not(None), "revoked"),
        (or_(Device.alive.is_(False), Device.last_seen.is_(None)), "offline"),
        (Device.last_seen >= now - stale_after_s, "online"),
        else_="stale",
    )


class FleetOverview:
    """Counts over all devices, or over those of some groups."""

    def __init__(self, database: Database, *, stale_after_s: float, now: Callable[[], float]) -> None:
        self._database = database
        self._stale_after_s = stale_after_s
        self._now = now

    def overview(self, groups: Collection[str] | None = None) -> JsonObject:
        """Every count that the dashboard's first page shows. `groups`: only devices of these; None: all."""
        now = self._now()
        with self._database.read() as session:
            view = _FleetCounts(session, now, self._stale_after_s, groups)
            return {
                "at": now, "devices": view.states(), "agents": view.agents(), "classes": view.classes(),
                "models": view.models(), "failures": view.failures(), "conditions": view.conditions(),
                "lately_s": RECENT_S,
            }  # fmt: skip

    def states(self) -> dict[str, int]:
        """Number of devices by state."""
        with self._database.read() as session:
            return _FleetCounts(session, self._now(), self._stale_after_s, None).states()

    def running(self) -> list[tuple[str, str, int]]:
        """Number of online devices by model and state."""
        with self._database.read() as session:
            return _FleetCounts(session, self._now(), self._stale_after_s, None).running()

    def conditions(self) -> list[JsonObject]:
        """Number of devices by condition."""
        with self._database.read() as session:
            return _FleetCounts(session, self._now(), self._stale_after_s, None).conditions()


class _FleetCounts:
    """Counts of one transaction over the devices of some groups."""

    def __init__(self, session: Session, now: float, stale_after_s: float, groups: Collection[str] | None) -> None:
        self._session = session
        self._now = now
        self._state = state_column(now, stale_after_s)
        self._is_visible: ColumnElement[bool] = true() if groups is None else Device.group.in_(sorted(groups))
        self._groups = groups
        self._is_enrolled = and_(self._is_visible, Device.revoked.is_(None))
        self._is_online = and_(self._is_enrolled, Device.alive.is_(True), Device.last_seen >= now - stale_after_s)

    def states(self) -> dict[str, int]:
        """Devices by state, and the open claims of devices that have not enrolled."""
        query = select(self._state, func.count()).where(self._is_visible).group_by(self._state)
        by_state = {str(state): int(count) for state, count in self._session.execute(query)}
        emulation_query = select(DeviceSessionRow.emulated, DeviceSessionRow.simulated, func.count()).group_by(
            DeviceSessionRow.emulated, DeviceSessionRow.simulated
        )
        emulation_query = emulation_query.join(Device, DeviceSessionRow.device == Device.name).where(self._is_enrolled)
        kinds = [(bool(row[0]), bool(row[1]), int(row[2])) for row in self._session.execute(emulation_query)]
        states = {state: by_state.get(state, 0) for state in STATES}
        return {
            **states,
            "claimed": self._claimed(),
            "total": sum(states.values()) - states["revoked"],
            "emulated": sum(count for emulated, simulated, count in kinds if emulated and not simulated),
            "simulated": sum(count for _, simulated, count in kinds if simulated),
        }

    def _claimed(self) -> int:
        enrolled = select(Device.name).where(Device.revoked.is_(None))
        visible = true() if self._groups is None else ClaimRow.group.in_(sorted(self._groups))
        open_claims = select(func.count(func.distinct(ClaimRow.device))).where(
            ClaimRow.is_open(self._now), ClaimRow.device.not_in(enrolled), visible
        )
        return self._session.scalar(open_claims) or 0

    def agents(self) -> list[JsonObject]:
        """Devices by version of the agent."""
        query = select(DeviceSessionRow.agent, func.count()).join(Device, Device.name == DeviceSessionRow.device)
        return self._ranked(query.where(self._is_enrolled).group_by(DeviceSessionRow.agent), ("agent", "devices"))

    def classes(self) -> list[JsonObject]:
        """Devices by device class."""
        query = select(Device.device_class, func.count()).where(self._is_enrolled).group_by(Device.device_class)
        return self._ranked(query, ("device_class", "devices"))

    def models(self) -> list[JsonObject]:
        """By model, as online devices report: releases by state, split points in use, and recent requests."""
        releases = self._by_model(RunningRow.release, RunningRow.state)
        cuts = self._by_model(RunningRow.cut, only=RunningRow.cut != "")
        recent = self._recent_requests()
        versions = self._versions({row[1] for row in releases if row[1]})
        models = sorted({row[0] for row in releases} | set(recent))
        return [
            {
                "model": model,
                "releases": [
                    {"release": release, "version": versions.get(release), "state": state, "devices": count}
                    for name, release, state, count in releases
                    if name == model
                ],
                "cuts": [{"cut": cut, "devices": count} for name, cut, count in cuts if name == model],
                **recent.get(model, {"requests": 0, "failed": 0, "fallbacks": 0}),
            }
            for model in models
        ]

    def running(self) -> list[tuple[str, str, int]]:
        """Online devices by model and state."""
        return [(str(model), str(state), int(count)) for model, state, count in self._by_model(RunningRow.state)]

    def _by_model(self, *columns: Any, only: ColumnElement[bool] | None = None) -> list[Any]:
        query = select(RunningRow.model, *columns, func.count()).join(Device, Device.name == RunningRow.device)
        query = query.where(self._is_online, true() if only is None else only).group_by(RunningRow.model, *columns)
        return list(self._session.execute(query.order_by(func.count().desc()).limit(MAX_ROWS)))

    def _versions(self, releases: Collection[str]) -> dict[str, str]:
        query = select(ReleaseRow.digest, ModelRow.name, ModelRow.version).join(
            ModelRow, ModelRow.id == ReleaseRow.model_id
        )
        rows = self._session.execute(query.where(ReleaseRow.digest.in_(sorted(releases))))
        return {digest: f"{name}@{version}" for digest, name, version in rows}

    def _recent_requests(self) -> dict[str, JsonObject]:
        """Requests of the last `RECENT_S` seconds by model, as far as they were aggregated."""
        names = ("requests", "failed", "fallbacks")
        counts = [func.sum(ModelBucketRow.content[name].as_integer()) for name in names]
        visible = true() if self._groups is None else ModelBucketRow.group.in_(sorted(self._groups))
        query = (
            select(ModelBucketRow.model, *counts)
            .where(visible, ModelBucketRow.span_s == SPANS["minute"].bucket_s)
            .where(ModelBucketRow.begins >= self._now - RECENT_S)
            .group_by(ModelBucketRow.model)
        )
        return {
            str(row[0]): {name: int(value or 0) for name, value in zip(names, tuple(row)[1:], strict=True)}
            for row in self._session.execute(query)
        }

    def failures(self) -> list[JsonObject]:
        """Failed releases grouped by cause, the most frequent first, each with an example device."""
        columns = (RunningRow.model, RunningRow.desired_release, RunningRow.state, RunningRow.cause)
        query = (
            select(*columns, func.count(), func.min(RunningRow.device))
            .join(Device, Device.name == RunningRow.device)
            .where(self._is_enrolled, RunningRow.state.in_(sorted(causes.FAILED_STATES)))
            .group_by(*columns)
            .order_by(func.count().desc())
            .limit(MAX_ROWS)
        )
        return [
            {"model": model, "release": wanted, "state": state, "cause": cause, "devices": count, "example": example}
            for model, wanted, state, cause, count, example in self._session.execute(query)
        ]

    def conditions(self) -> list[JsonObject]:
        """Conditions by kind, each with the device that has had it longest."""
        sources = [self._reported_conditions(), *(self._count_condition(*row) for row in self._derived_conditions())]
        rows = [row for source in sources for row in source if row["devices"]]
        return sorted(rows, key=lambda row: (-row["devices"], row["kind"]))

    def _reported_conditions(self) -> list[JsonObject]:
        """Conditions that devices reported; those of devices that are not online are out of date and left out."""
        query = (
            select(ConditionRow.kind, func.count(), func.min(ConditionRow.since), func.min(ConditionRow.device))
            .join(Device, Device.name == ConditionRow.device)
            .where(self._is_online)
            .group_by(ConditionRow.kind)
        )
        return [
            _condition_to_dict(kind, count, since, example)
            for kind, count, since, example in self._session.execute(query)
        ]

    def _derived_conditions(self) -> list[tuple[str, Any, Any]]:
        """Conditions that the controller detects itself: kind, join condition, and the column with their beginning."""
        now = self._now
        certificate = and_(
            CertificateRow.serial == Device.certificate_serial, CertificateRow.revoked.is_(None),
            CertificateRow.expires > 0, CertificateRow.expires < now + causes.NEAR_EXPIRY_S,
        )  # fmt: skip
        flooding = and_(FloodRow.device == Device.name, FloodRow.held_until > now)
        flooding_offload = and_(
            OffloadFloodRow.device == Device.name, OffloadFloodRow.at > now - causes.OFFLOAD_FLOOD_S
        )
        copied = and_(AgentStartsRow.device == Device.name, AgentStartsRow.copied.is_not(None))
        unresponsive = and_(
            DeviceSessionRow.device == Device.name,
            DeviceSessionRow.unresponsive_since < now - causes.UNRESPONSIVE_S,
            self._is_online,
        )
        expires = CertificateRow.expires - causes.NEAR_EXPIRY_S
        return [
            ("certificate expires", (CertificateRow, certificate), expires),
            ("flooding", (FloodRow, flooding), FloodRow.at),
            ("flooding offload server", (OffloadFloodRow, flooding_offload), OffloadFloodRow.since),
            ("copied", (AgentStartsRow, copied), AgentStartsRow.copied),
            ("unresponsive", (DeviceSessionRow, unresponsive), DeviceSessionRow.unresponsive_since),
        ]

    def _count_condition(self, kind: str, where: tuple[Any, Any], since: Any) -> list[JsonObject]:
        table, condition = where
        query = select(func.count(), func.min(since), func.min(Device.name)).select_from(Device).join(table, condition)
        count, first, example = self._session.execute(query.where(self._is_enrolled)).one()
        return [_condition_to_dict(kind, count, first, example)]

    def _ranked(self, query: Select[str, int], names: tuple[str, str]) -> list[JsonObject]:
        ranked = query.order_by(func.count().desc()).limit(MAX_ROWS)
        return [dict(zip(names, row, strict=True)) for row in self._session.execute(ranked)]


def _condition_to_dict(kind: str, devices: int, since: float | None, example: str | None) -> JsonObject:
    return {
        "kind": kind, "devices": devices, "since": since, "example": example, "remedy": causes.REMEDIES.get(kind, ""),
    }  # fmt: skip
