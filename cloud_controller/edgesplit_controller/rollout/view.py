"""Rollouts as the API shows them: stages, what they wait for, failures grouped by cause. Reads only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from edgesplit_controller.rollout import store
from edgesplit_controller.rollout.states import MEMBER_STATES, Rollout, Tally
from edgesplit_controller.rollout.terms import Terms, spell_s
from edgesplit_controller.rollout.wait_reason import waits_for
from edgesplit_controller.storage.database import Deployment
from edgesplit_controller.storage.tables.device_state import HeardRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow

MOST_CAUSES = 20
FEW_DEVICES = 5
MADE_UP = ("emulated", "simulated")


def shown_rollout(session: Session, row: RolloutRow, now: float) -> dict[str, Any]:
    """One rollout, whole but for its devices."""
    rollout, deployment = store.rollout_of(row), session.get(Deployment, row.id)
    assert deployment is not None
    tallies = store.tallies(session, row.id)
    states = [tally.states for tally in tallies.values()]
    made_up = _made_up(session, row.id)
    return {
        "id": row.id,
        "state": row.state,
        "why": row.why,
        "waits_for": waits_for(rollout, tallies, now),
        "model": deployment.model,
        "release": row.release,
        "targets": deployment.targets,
        "who": row.who,
        "created": row.created,
        "began": row.began or None,
        "ended": row.ended or None,
        "changed": row.changed,
        "following": row.following,
        "superseded_by": row.superseded_by or None,
        "stage": row.stage + 1,
        "devices": sum(tally.size for tally in tallies.values()),
        **{kind: sum(one[kind] for one in made_up.values()) for kind in MADE_UP},
        "states": {state: sum(some.get(state, 0) for some in states) for state in MEMBER_STATES},
        "stages": _stages(session, rollout, tallies, made_up),
        "failures": _failures(session, row.id),
        "terms": shown_terms(rollout.terms),
    }


def shown_terms(terms: Terms) -> dict[str, Any]:
    """What was asked for, spelt as it can be asked for again."""
    gates = terms.gates
    return {
        "stages": [str(stage) for stage in terms.stages],
        "rate": str(terms.rate) if terms.rate else None,
        "abort_when_failed": str(terms.abort_when_failed) if terms.abort_when_failed else None,
        "next_when_succeeded": str(terms.next_when_succeeded) if terms.next_when_succeeded else None,
        "device_timeout": spell_s(terms.device_timeout_s),
        "timeouts_count": terms.timeouts_count,
        "approve": [stage + 1 for stage in terms.approve],
        "starts_at": terms.starts_at or None,
        "between": str(terms.hours) if terms.hours else None,
        "gates": [gate.text for gate in gates.gates],
        "gate_after": f"{gates.requests} requests / {spell_s(gates.seconds)}" if gates.gates else None,
        "prefer": terms.prefer,
        "follow": terms.follow,
        "when_failed": terms.when_failed,
    }


def shown_devices(
    session: Session, number: int, *, states: Sequence[str], after: int, most: int
) -> list[dict[str, Any]]:
    """Devices of a rollout in the order in which they are told, those after the position `after`."""
    rows = select(RolloutDeviceRow, HeardRow.emulated, HeardRow.simulated).outerjoin(
        HeardRow, HeardRow.device == RolloutDeviceRow.device
    )
    rows = rows.where(RolloutDeviceRow.rollout == number, RolloutDeviceRow.position > after)
    if states:
        rows = rows.where(RolloutDeviceRow.state.in_(states))
    found = session.execute(rows.order_by(RolloutDeviceRow.position).limit(most))
    return [
        {
            "device": row.device,
            "emulated": bool(emulated),
            "simulated": bool(simulated),
            "position": row.position,
            "stage": row.stage + 1,
            "state": row.state,
            "cause": row.cause,
            "kind": row.kind,
            "previous": row.previous or None,
            "counter": row.counter,
            "told_at": row.told_at or None,
            "ran_at": row.ran_at or None,
            "goes_back": row.goes_back,
            "counts": row.counts,
        }
        for row, emulated, simulated in found
    ]


def _made_up(session: Session, number: int) -> Mapping[int, Counter[str]]:
    """By stage, how many of its devices are emulated and how many simulated, by their own word."""
    counted = (
        select(RolloutDeviceRow.stage, HeardRow.simulated, func.count())
        .join(HeardRow, HeardRow.device == RolloutDeviceRow.device)
        .where(RolloutDeviceRow.rollout == number, or_(HeardRow.emulated, HeardRow.simulated))
        .group_by(RolloutDeviceRow.stage, HeardRow.simulated)
    )
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for stage, simulated, count in session.execute(counted):
        found[stage]["simulated" if simulated else "emulated"] += count
    return found


def _stages(
    session: Session, rollout: Rollout, tallies: dict[int, Tally], made_up: Mapping[int, Counter[str]]
) -> list[dict[str, Any]]:
    rows = session.scalars(
        select(RolloutStageRow).where(RolloutStageRow.rollout == rollout.id).order_by(RolloutStageRow.number)
    )
    shown = []
    for row in rows:
        tally = tallies.get(row.number, Tally({}))
        shown.append(
            {
                "number": row.number + 1,
                "asked": row.asked,
                "devices": tally.size,
                **{kind: made_up[row.number][kind] for kind in MADE_UP},
                "began": row.began or None,
                "states": dict(tally.states),
                "succeeded": tally.succeeded,
                "failures": tally.failures,
                "open": tally.open,
                "needs_approval": row.number in rollout.terms.approve and rollout.approved < row.number,
            }
        )
    return shown


def _failures(session: Session, number: int) -> list[dict[str, Any]]:
    """Failures by what they have in common, the most frequent first, each with an example and a few devices."""
    failed = (RolloutDeviceRow.rollout == number, RolloutDeviceRow.kind != "", RolloutDeviceRow.state != "skipped")
    counted = (
        select(RolloutDeviceRow.kind, func.count())
        .where(*failed)
        .group_by(RolloutDeviceRow.kind)
        .order_by(func.count().desc(), RolloutDeviceRow.kind)
        .limit(MOST_CAUSES)
    )
    shown = []
    for kind, count in session.execute(counted):
        rows = session.scalars(
            select(RolloutDeviceRow)
            .where(*failed, RolloutDeviceRow.kind == kind)
            .order_by(RolloutDeviceRow.position)
            .limit(FEW_DEVICES)
        ).all()
        names = [row.device for row in rows]
        shown.append({"kind": kind, "count": count, "example": rows[0].cause, "devices": names})
    return shown
