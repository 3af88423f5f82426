"""Rollouts as the API returns them: stages, what they wait for, failures grouped by cause. Read-only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from edgesplit.quantities import format_duration
from edgesplit_controller.rollout import store
from edgesplit_controller.rollout.states import IN_PROGRESS, MEMBER_STATES, Rollout, Tally
from edgesplit_controller.rollout.terms import Terms
from edgesplit_controller.rollout.wait_reason import MAX_NAMED, reason_to_wait
from edgesplit_controller.storage.tables.core import Deployment, Device
from edgesplit_controller.storage.tables.device_state import DeviceSessionRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow

MOST_CAUSES = 20
FEW_DEVICES = 5
ORIGINS = ("emulated", "simulated")


def rollout_view(session: Session, row: RolloutRow, now: float) -> dict[str, Any]:
    """One rollout as JSON, without its devices."""
    rollout, deployment = store.rollout_from_row(row), session.get(Deployment, row.id)
    assert deployment is not None
    tallies = store.tallies(session, row.id)
    states = [tally.states for tally in tallies.values()]
    origins = _origins_by_stage(session, row.id)
    offline, named = (0, []) if rollout.has_ended else _offline(session, row.id)
    return {
        "id": row.id, "state": row.state, "reason": row.reason, "offline": offline,
        "waits_for": reason_to_wait(rollout, tallies, now, named, offline), "withdraws": rollout.withdraws,
        "model": deployment.model, "release": row.release, "targets": deployment.targets, "created_by": row.who,
        "created": row.created, "began": row.began or None, "ended": row.ended or None, "changed": row.changed,
        "following": row.following, "superseded_by": row.superseded_by or None, "stage": row.stage + 1,
        "devices": sum(tally.size for tally in tallies.values()),
        **{kind: sum(counts[kind] for counts in origins.values()) for kind in ORIGINS},
        "states": {state: sum(counts_of_stage.get(state, 0) for counts_of_stage in states) for state in MEMBER_STATES},
        "stages": _stages(session, rollout, tallies, origins), "failures": _failures(session, row.id),
        "terms": terms_view(rollout.terms),
    }  # fmt: skip


def terms_view(terms: Terms) -> dict[str, Any]:
    """The terms as JSON, spelt so that they can be used in a new request."""
    gates = terms.gates
    return {
        "stages": [str(stage) for stage in terms.stages], "rate": str(terms.rate) if terms.rate else None,
        "abort_when_failed": str(terms.abort_when_failed) if terms.abort_when_failed else None,
        "next_when_succeeded": str(terms.next_when_succeeded) if terms.next_when_succeeded else None,
        "device_timeout": format_duration(terms.device_timeout_s), "timeouts_count": terms.timeouts_count,
        "approve": [stage + 1 for stage in terms.approve], "starts_at": terms.starts_at or None,
        "between": str(terms.hours) if terms.hours else None, "gates": [gate.text for gate in gates.gates],
        "gate_after": f"{gates.requests} requests / {format_duration(gates.seconds)}" if gates.gates else None,
        "prefer": terms.prefer, "follow": terms.follow, "when_failed": terms.when_failed,
    }  # fmt: skip


def device_views(
    session: Session, number: int, *, states: Sequence[str], after: int, most: int
) -> list[dict[str, Any]]:
    """Devices of a rollout in the order of their assignment, after the position `after`."""
    columns = (RolloutDeviceRow, DeviceSessionRow.emulated, DeviceSessionRow.simulated, Device.alive, Device.last_seen)
    rows = select(*columns).outerjoin(DeviceSessionRow, DeviceSessionRow.device == RolloutDeviceRow.device)
    rows = rows.outerjoin(Device, Device.name == RolloutDeviceRow.device)
    rows = rows.where(RolloutDeviceRow.rollout == number, RolloutDeviceRow.position > after)
    if states:
        rows = rows.where(RolloutDeviceRow.state.in_(states))
    results = session.execute(rows.order_by(RolloutDeviceRow.position).limit(most))
    return [
        {
            "device": row.device, "emulated": bool(emulated), "simulated": bool(simulated), "position": row.position,
            "stage": row.stage + 1, "state": row.state, "cause": row.cause, "kind": row.kind,
            "previous": row.previous or None, "counter": row.counter, "assigned_at": row.assigned_at or None,
            "ran_at": row.ran_at or None, "rolls_back": row.rolls_back, "counts": row.counts,
            "online": bool(alive), "last_seen": last_seen,
        }
        for row, emulated, simulated, alive, last_seen in results
    ]  # fmt: skip


def _offline(session: Session, number: int) -> tuple[int, list[str]]:
    """Number of devices that were assigned the release, or are to roll back, and are offline; and some of their
    names."""
    is_awaited = or_(RolloutDeviceRow.state.in_(IN_PROGRESS), RolloutDeviceRow.rolls_back)
    query = (
        select(RolloutDeviceRow.device)
        .join(Device, Device.name == RolloutDeviceRow.device)
        .where(RolloutDeviceRow.rollout == number, is_awaited, ~Device.alive)
    )
    count = session.scalar(select(func.count()).select_from(query.subquery())) or 0
    return count, list(session.scalars(query.order_by(RolloutDeviceRow.position).limit(MAX_NAMED)))


def _origins_by_stage(session: Session, number: int) -> Mapping[int, Counter[str]]:
    """Number of emulated and simulated devices by stage, as the devices declared themselves."""
    query = (
        select(RolloutDeviceRow.stage, DeviceSessionRow.simulated, func.count())
        .join(DeviceSessionRow, DeviceSessionRow.device == RolloutDeviceRow.device)
        .where(RolloutDeviceRow.rollout == number, or_(DeviceSessionRow.emulated, DeviceSessionRow.simulated))
        .group_by(RolloutDeviceRow.stage, DeviceSessionRow.simulated)
    )
    by_stage: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for stage, simulated, count in session.execute(query):
        by_stage[stage]["simulated" if simulated else "emulated"] += count
    return by_stage


def _stages(
    session: Session, rollout: Rollout, tallies: dict[int, Tally], origins: Mapping[int, Counter[str]]
) -> list[dict[str, Any]]:
    rows = session.scalars(
        select(RolloutStageRow).where(RolloutStageRow.rollout == rollout.id).order_by(RolloutStageRow.number)
    )
    views = []
    for row in rows:
        tally = tallies.get(row.number, Tally({}))
        views.append(
            {
                "number": row.number + 1, "size": row.size, "devices": tally.size,
                **{kind: origins[row.number][kind] for kind in ORIGINS}, "began": row.began or None,
                "states": dict(tally.states), "succeeded": tally.succeeded, "failures": tally.failures,
                "open": tally.open,
                "needs_approval": row.number in rollout.terms.approve and rollout.approved < row.number,
            }
        )  # fmt: skip
    return views


def _failures(session: Session, number: int) -> list[dict[str, Any]]:
    """Failures by kind, the most frequent first, each with an example and some devices."""
    failed = (RolloutDeviceRow.rollout == number, RolloutDeviceRow.kind != "", RolloutDeviceRow.state != "skipped")
    query = (
        select(RolloutDeviceRow.kind, func.count())
        .where(*failed)
        .group_by(RolloutDeviceRow.kind)
        .order_by(func.count().desc(), RolloutDeviceRow.kind)
        .limit(MOST_CAUSES)
    )
    views = []
    for kind, count in session.execute(query):
        rows = session.scalars(
            select(RolloutDeviceRow)
            .where(*failed, RolloutDeviceRow.kind == kind)
            .order_by(RolloutDeviceRow.position)
            .limit(FEW_DEVICES)
        ).all()
        names = [row.device for row in rows]
        views.append({"kind": kind, "count": count, "example": rows[0].cause, "devices": names})
    return views
