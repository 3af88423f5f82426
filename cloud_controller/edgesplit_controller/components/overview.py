"""Health of all components: what each process recorded, and what the database and the data folder show directly."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal

from sqlalchemy import and_, func, select, text
from sqlalchemy.orm import Session

from edgesplit.process import confinement
from edgesplit_controller.components.offload_status import LISTS, SERVING
from edgesplit_controller.components.probes import State
from edgesplit_controller.components.recorder import REFRESH_S
from edgesplit_controller.fleet.overview import state_column
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import database_time
from edgesplit_controller.storage.tables.components import ComponentStateRow
from edgesplit_controller.storage.tables.core import Device, GatewayRouteRow, GatewayRow
from edgesplit_controller.storage.tables.leases import LeaseRow

OUTDATED_S = 3 * REFRESH_S
"""Seconds after which a record without a refresh is out of date."""
HIDDEN_AFTER_S = 3_600.0
"""Seconds after which a record is not shown: its process is gone for good."""
SLOW_S = 0.5
"""Query time in seconds from which the database is reported as bad."""
MAX_UNAGGREGATED = 100_000
"""Messages that are not aggregated, from which histories are reported as bad: they are about an hour late."""
LOW_DISK_PART, LOW_DISK_BYTES = 0.05, 2**30
SANDBOX: Final = "model processes"
"""Name of the component that says how far processes that load pushed models are confined."""
REMEDIES: Mapping[str, str] = {
    "broker": "read the controller's log, which has mosquitto's messages, or check the broker that you gave"
    " with --broker",
    "offload server": "read offload/offload.log in the data folder; devices finish locally meanwhile",
    SERVING: "docs/security.md says what its machine's kernel needs; where it asks the next tier or sends traces, that"
    " is meant",
    LISTS: "copy offload/revoked.pem of the data folder to that server, or repair what copies it; for the"
    " broker repair --on-revocation, whose error is in the log",
    "object store": "until it answers, models cannot be pushed, planned or deployed, and devices fetch what the cache"
    " has; docs/operations.md lists its messages",
    "database": "check its machine and its log: every other component depends on it",
    "disk": "free space in the data folder: `edgectl model list` says what is stored",
    "histories": "telemetry arrives faster than it is aggregated: give the controller more CPU time, or another"
    " process",
    SANDBOX: "until then let only operators push models whom you would give the controller's own keys; docs/security.md"
    " says what this machine's kernel needs",
    "processes": "see processes/*.log in the data folder; `edgectl up --processes` starts as many as it names",
    "gateway": "see its page: devices behind it offload to the cloud directly, or finish locally",
    "way to the cloud": "devices finish locally: check the offload server, and the links to it",
}
"""What an operator does about a bad component, by its name."""


@dataclass(frozen=True, slots=True)
class ComponentHealth:
    """Health of one component."""

    name: str
    subject: str
    """Name of the gateway or process; empty for a component of which there is only one."""
    state: State
    text: str
    since: float | None = None
    at: float | None = None
    """Unix time of this observation."""


class HealthOverview:
    """Reads the health of every component."""

    def __init__(
        self, database: Database, data: Path, *, stale_after_s: float, unaggregated: Callable[[], int],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._database = database
        self._data = data
        self._stale_after_s = stale_after_s
        self._unaggregated = unaggregated
        self._now = now

    def to_dicts(self, groups: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Every component, the bad ones first. `groups`: only gateways and devices of these groups; None: all."""
        now, began = self._now(), perf_counter()
        with self._database.read() as session:
            session.execute(text("SELECT 1"))
            query_s = perf_counter() - began
            parts = [
                *_recorded(session, now),
                _processes(session),
                *self._gateways(session, now, groups),
                *self._offload_reachability(session, now, groups),
            ]
            dialect = session.get_bind().dialect.name
        parts += [_database(dialect, query_s, now), self._disk(now), self._histories(now), _sandbox(now)]
        ordered = sorted(parts, key=lambda part: ({"bad": 0, "unknown": 1}.get(part.state, 2), part.name, part.subject))
        return [{**asdict(part), "remedy": "" if part.state == "good" else REMEDIES[part.name]} for part in ordered]

    def _gateways(self, session: Session, now: float, groups: Collection[str] | None) -> list[ComponentHealth]:
        state = state_column(now, self._stale_after_s)
        behind = select(func.count()).select_from(GatewayRouteRow).where(GatewayRouteRow.gateway == GatewayRow.device)
        query = select(GatewayRow.device, state, Device.last_seen, GatewayRow.address, behind.scalar_subquery()).join(
            Device, Device.name == GatewayRow.device
        )
        if groups is not None:
            query = query.where(Device.group.in_(sorted(groups)))
        rows = session.execute(query.where(Device.revoked.is_(None)).order_by(GatewayRow.device))
        return [
            ComponentHealth(
                "gateway", name, "good" if device_state == "online" else "bad",
                f"{device_state}, at {address}, with {count} device{'s' * (count != 1)} behind it", at=seen,
            )
            for name, device_state, seen, address, count in rows
        ]  # fmt: skip

    def _offload_reachability(
        self, session: Session, now: float, groups: Collection[str] | None
    ) -> list[ComponentHealth]:
        """Whether online devices reach their next tier, as they report it."""
        online = and_(Device.revoked.is_(None), Device.alive, Device.last_seen >= now - self._stale_after_s)
        reaches = Device.telemetry["remote_usable"].as_boolean()
        query = select(func.count(), func.count().filter(reaches)).where(online, reaches.is_not(None))
        if groups is not None:
            query = query.where(Device.group.in_(sorted(groups)))
        count, reached = session.execute(query).one()
        if not count:
            return []
        state: Literal["good", "bad"] = "good" if 2 * reached >= count else "bad"
        summary = f"{reached} of {count} online devices reach it"
        return [ComponentHealth("way to the cloud", "", state, summary, at=now)]

    def _disk(self, now: float) -> ComponentHealth:
        usage = shutil.disk_usage(self._data)
        low = usage.free < min(LOW_DISK_PART * usage.total, LOW_DISK_BYTES)
        summary = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.0f} GiB are free for the data folder"
        return ComponentHealth("disk", "", "bad" if low else "good", summary, at=now)

    def _histories(self, now: float) -> ComponentHealth:
        behind = self._unaggregated()
        text = f"{behind} messages are not aggregated yet" if behind else "every message is aggregated"
        return ComponentHealth("histories", "", "bad" if behind > MAX_UNAGGREGATED else "good", text, at=now)


def _sandbox(now: float) -> ComponentHealth:
    """What the kernel of this machine takes from processes that load pushed models."""
    missing = confinement.unavailable()
    if not missing:
        return ComponentHealth(SANDBOX, "", "good", "without network, and with no files but their own", at=now)
    summary = "; ".join(f"not confined: {item.what} ({item.reason}): {item.remedy}" for item in missing)
    return ComponentHealth(SANDBOX, "", "unknown", summary, at=now)


def _recorded(session: Session, now: float) -> list[ComponentHealth]:
    """Components that processes probe; the first bad record of a component counts, else the first one."""
    query = (
        select(ComponentStateRow)
        .where(ComponentStateRow.at > now - HIDDEN_AFTER_S)
        .order_by(ComponentStateRow.name, ComponentStateRow.process)
    )
    rows = list(session.scalars(query))
    fresh = {row.process for row in rows if row.at > now - OUTDATED_S}
    parts = []
    for name in dict.fromkeys(row.name for row in rows):
        of_component = [row for row in rows if row.name == name]
        up_to_date = [row for row in of_component if row.process in fresh]
        if not up_to_date:
            last = max(of_component, key=lambda row: row.at)
            summary = f"not checked lately; the last result: {last.text}"
            parts.append(ComponentHealth(name, "", "unknown", summary, at=last.at))
            continue
        bad = [row for row in up_to_date if row.state != "good"]
        chosen = (bad or up_to_date)[0]
        prefix = f"process {chosen.process} of {len(up_to_date)}: " if bad and len(up_to_date) > 1 else ""
        state: State = "good" if not bad else "unknown" if chosen.state == "unknown" else "bad"
        parts.append(ComponentHealth(name, "", state, prefix + chosen.text, chosen.since, chosen.at))
    return parts


def _processes(session: Session) -> ComponentHealth:
    """The controller processes, by their leases."""
    now = database_time(session)
    rows = session.scalars(select(LeaseRow).where(LeaseRow.holder != "", LeaseRow.expires > now)).all()
    numbers = sorted(int(row.name.removeprefix("process ")) for row in rows if row.name.startswith("process "))
    has_leader = any(row.name == "controller" for row in rows)
    suffix = "" if has_leader else "; none of them is the leader yet"
    summary = f"{len(numbers)} {'process runs' if len(numbers) == 1 else 'processes run'}{suffix}"
    return ComponentHealth("processes", "", "good" if has_leader else "bad", summary)


def _database(dialect: str, query_s: float, now: float) -> ComponentHealth:
    name = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(dialect, dialect)
    duration = f"{1e3 * query_s:.1f} ms" if query_s < 1 else f"{query_s:.1f} s"
    state: Literal["good", "bad"] = "bad" if query_s > SLOW_S else "good"
    return ComponentHealth("database", "", state, f"{name}, answers in {duration}", at=now)
