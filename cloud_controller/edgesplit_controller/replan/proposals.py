"""Replanning proposals: stored, updated, decided. At most one is open for a release on a device class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.replan.finding import Unit
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.replan import ProposalRow

NEWEST = 200
"""Proposals that are listed."""
CONTROLLER = "replan"
"""Name recorded as the decider where the controller decided by itself."""
OPEN, APPLIED, DISMISSED, WITHDRAWN, SUPERSEDED, FAILED = (
    "open", "applied", "dismissed", "withdrawn", "superseded", "failed"
)  # fmt: skip


class Proposals:
    """The proposals of one installation."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, *, open_only: bool = False) -> list[ProposalRow]:
        """The newest proposals, oldest first."""
        query = select(ProposalRow).order_by(ProposalRow.id.desc()).limit(NEWEST)
        with self._database.read() as session:
            rows = session.scalars(query.where(ProposalRow.state == OPEN) if open_only else query).all()
        return list(reversed(rows))

    def get(self, number: int) -> ProposalRow:
        """The proposal of that number; NotFound lists the existing ones."""
        with self._database.read() as session:
            return _get(session, number)

    def for_unit(self, unit: Unit) -> list[ProposalRow]:
        """All proposals for a unit's release and class, oldest first."""
        with self._database.read() as session:
            return list(session.scalars(_query(unit).order_by(ProposalRow.id)))

    def change_times(self, model: str, device_class: str) -> list[float]:
        """Unix times at which a proposal changed tables of a model (by name) on that class, oldest first."""
        applied = select(ProposalRow.decided).where(
            ProposalRow.model.startswith(f"{model}@", autoescape=True),
            ProposalRow.device_class == device_class,
            ProposalRow.state == APPLIED,
        )
        with self._database.read() as session:
            return sorted(at for at in session.scalars(applied) if at is not None)

    def propose(self, unit: Unit, view: dict[str, Any], measured: dict[str, Any], now: float) -> ProposalRow:
        """Store a proposal, or update the open one."""
        with self._database.write() as session:
            row = session.scalars(_query(unit).where(ProposalRow.state == OPEN)).first()
            if row is None:
                row = ProposalRow(
                    model=unit.model.ref, release=unit.release, device_class=unit.device_class,
                    group=unit.policy.group, state=OPEN, created=now, decided=None,
                )  # fmt: skip
                row.devices, row.summary, row.measured = unit.names, view, measured
                session.add(row)
                session.flush()
                detail = {"model": unit.model.ref, "device_class": unit.device_class, "reason": view["reason"]}
                record_event(session, now, CONTROLLER, "replan.proposed", str(row.id), release=unit.release, **detail)
            row.devices, row.summary, row.measured = unit.names, view, measured
            return row

    def decide(self, number: int, state: str, who: str, now: float, *, result: str = "", why: str = "") -> ProposalRow:
        """Close an open proposal; Conflict if it is closed already."""
        with self._database.write() as session:
            row = _get(session, number)
            if row.state != OPEN:
                raise Conflict(f"proposal {number} is {row.state} already")
            row.state, row.decided, row.who, row.result = state, now, who, result
            if why:
                row.summary = {**row.summary, "ended": why}
            record_event(session, now, who, f"replan.{state}", str(number), model=row.model, release=result, why=why)
            return row

    def supersede(self, units: Sequence[Unit], now: float) -> None:
        """Close open proposals for devices that run another release by now."""
        current = {(unit.release, unit.device_class, unit.policy.group) for unit in units}
        for row in self.all(open_only=True):
            if (row.release, row.device_class, row.group) not in current:
                self.decide(row.id, SUPERSEDED, CONTROLLER, now, why="the devices are assigned another release by now")


def proposal_view(row: ProposalRow) -> dict[str, Any]:
    """A proposal as JSON."""
    return {
        "id": row.id, "state": row.state, "model": row.model, "release": row.release, "device_class": row.device_class,
        "group": row.group or None, "devices": row.devices, "created": row.created, "decided": row.decided,
        "decided_by": row.who or None, "result": row.result or None, **row.summary,
    }  # fmt: skip


def _query(unit: Unit) -> Any:
    return select(ProposalRow).where(
        ProposalRow.release == unit.release,
        ProposalRow.device_class == unit.device_class,
        ProposalRow.group == unit.policy.group,
    )


def _get(session: Session, number: int) -> ProposalRow:
    row = session.get(ProposalRow, number)
    if row is None:
        raise not_found("proposal", str(number), map(str, session.scalars(select(ProposalRow.id))))
    return row
