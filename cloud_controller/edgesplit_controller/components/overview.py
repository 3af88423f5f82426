"""All parts at a glance: what every process noted, and what the database and the folder say by themselves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from sqlalchemy import and_, func, select, text
from sqlalchemy.orm import Session

from edgesplit_controller.components.recorder import AGAIN_S
from edgesplit_controller.fleet.overview import state_column
from edgesplit_controller.storage.database import Behind, Database, Device, GatewayRow
from edgesplit_controller.storage.leases import clock_of
from edgesplit_controller.storage.tables.components import PartRow
from edgesplit_controller.storage.tables.leases import LeaseRow

SILENT_S = 3 * AGAIN_S
"""What was noted longer ago is nobody's word any more."""
FORGOTTEN_S = 3_600.0
"""What was noted longer ago is not shown: whoever noted it is gone for good."""
SLOW_S = 0.5
BEHIND = 100_000
"""Messages not added up, with which histories are an hour or so late."""
LOW_DISK_PART, LOW_DISK_BYTES = 0.05, 2**30
DO: Mapping[str, str] = {
    "broker": "look at the controller's log, which has mosquitto's words, or at the broker that you gave with --broker",
    "offload server": "look at offload/offload.log in the data folder; devices finish alone meanwhile",
    "database": "look at its machine and its log: every other part waits for it",
    "disk": "free space in the data folder: `edgectl model list` says what is stored",
    "histories": "the controller adds up less than devices say: give it more time on a processor, or another process",
    "processes": "see processes/*.log in the data folder; `edgectl up --processes` starts as many as it is told",
    "gateway": "look at its page: devices behind it go to the cloud by themselves, or finish alone",
    "way to the cloud": "devices finish alone: look at the offload server, and at the links in between",
}
"""By part: what an operator does about a bad one."""


@dataclass(frozen=True, slots=True)
class Part:
    """How one part is."""

    name: str
    subject: str
    """Which gateway or process; empty where there is but one."""
    state: Literal["good", "bad", "unknown"]
    text: str
    since: float | None = None
    at: float | None = None
    """When that was seen."""


class Parts:
    """Reads them, for whoever asks."""

    def __init__(
        self, database: Database, data: Path, *, stale_after_s: float, behind: Callable[[], int],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._database = database
        self._data = data
        self._stale_after_s = stale_after_s
        self._behind = behind
        self._now = now

    def shown(self, groups: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Every part, the bad ones first; gateways and devices of these groups alone (None: of all)."""
        now, began = self._now(), perf_counter()
        with self._database.read() as session:
            session.execute(text("SELECT 1"))
            asked_s = perf_counter() - began
            found = [
                *_noted(session, now),
                _processes(session),
                *self._gateways(session, now, groups),
                *self._way(session, now, groups),
            ]
            dialect = session.get_bind().dialect.name
        found += [_database(dialect, asked_s, now), self._disk(now), self._histories(now)]
        ordered = sorted(found, key=lambda one: ({"bad": 0, "unknown": 1}.get(one.state, 2), one.name, one.subject))
        return [{**asdict(one), "do": "" if one.state == "good" else DO[one.name]} for one in ordered]

    def _gateways(self, session: Session, now: float, groups: Collection[str] | None) -> list[Part]:
        state = state_column(now, self._stale_after_s)
        behind = select(func.count()).select_from(Behind).where(Behind.gateway == GatewayRow.device)
        asked = select(GatewayRow.device, state, Device.last_seen, GatewayRow.address, behind.scalar_subquery()).join(
            Device, Device.name == GatewayRow.device
        )
        if groups is not None:
            asked = asked.where(Device.group.in_(sorted(groups)))
        rows = session.execute(asked.where(Device.revoked.is_(None)).order_by(GatewayRow.device))
        return [
            Part(
                "gateway", name, "good" if how == "online" else "bad",
                f"{how}, at {address}, with {count} device{'s' * (count != 1)} behind it", at=seen,
            )
            for name, how, seen, address, count in rows
        ]  # fmt: skip

    def _way(self, session: Session, now: float, groups: Collection[str] | None) -> list[Part]:
        """Whether devices that are here reach their next tier, by their own word."""
        living = and_(Device.revoked.is_(None), Device.alive, Device.last_seen >= now - self._stale_after_s)
        reaches = Device.telemetry["remote_ok"].as_boolean()
        asked = select(func.count(), func.count().filter(reaches)).where(living, reaches.is_not(None))
        if groups is not None:
            asked = asked.where(Device.group.in_(sorted(groups)))
        here, well = session.execute(asked).one()
        if not here:
            return []
        state: Literal["good", "bad"] = "good" if 2 * well >= here else "bad"
        return [Part("way to the cloud", "", state, f"{well} of {here} devices that are online reach it", at=now)]

    def _disk(self, now: float) -> Part:
        found = shutil.disk_usage(self._data)
        low = found.free < min(LOW_DISK_PART * found.total, LOW_DISK_BYTES)
        told = f"{found.free / 2**30:.1f} of {found.total / 2**30:.0f} GiB are free for the data folder"
        return Part("disk", "", "bad" if low else "good", told, at=now)

    def _histories(self, now: float) -> Part:
        behind = self._behind()
        text = f"{behind} messages are not added up yet" if behind else "every message is added up"
        return Part("histories", "", "bad" if behind > BEHIND else "good", text, at=now)


def _noted(session: Session, now: float) -> list[Part]:
    """What processes noted; of several one where they say the same."""
    lately = select(PartRow).where(PartRow.at > now - FORGOTTEN_S).order_by(PartRow.name, PartRow.process)
    every = list(session.scalars(lately))
    fresh = {row.process for row in every if row.at > now - SILENT_S}
    found = []
    for name in dict.fromkeys(row.name for row in every):
        mine = [row for row in every if row.name == name]
        spoken = [row for row in mine if row.process in fresh]
        if not spoken:
            last = max(mine, key=lambda row: row.at)
            found.append(Part(name, "", "unknown", f"nobody has looked at it lately; then: {last.text}", at=last.at))
            continue
        bad = [row for row in spoken if row.state != "good"]
        told = (bad or spoken)[0]
        of = f"process {told.process} of {len(spoken)}: " if bad and len(spoken) > 1 else ""
        found.append(Part(name, "", "bad" if bad else "good", of + told.text, told.since, told.at))
    return found


def _processes(session: Session) -> Part:
    """Who is there, by the leases."""
    now = clock_of(session)
    rows = session.scalars(select(LeaseRow).where(LeaseRow.holder != "", LeaseRow.expires > now)).all()
    numbers = sorted(int(row.name.removeprefix("process ")) for row in rows if row.name.startswith("process "))
    leads = any(row.name == "controller" for row in rows)
    told = f"{len(numbers)} {'is' if len(numbers) == 1 else 'are'} here" + ("" if leads else "; none of them leads yet")
    return Part("processes", "", "good" if leads else "bad", told)


def _database(dialect: str, asked_s: float, now: float) -> Part:
    name = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(dialect, dialect)
    spelt = f"{1e3 * asked_s:.1f} ms" if asked_s < 1 else f"{asked_s:.1f} s"
    return Part("database", "", "bad" if asked_s > SLOW_S else "good", f"{name}, answers in {spelt}", at=now)
