"""Storage of rollouts: converts rows to and from the values that `decide` works on. Every function runs in the caller's
transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, case, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased, load_only

from edgesplit_controller.rollout.decide import states_to_load
from edgesplit_controller.rollout.states import (
    ENDED,
    IN_PROGRESS,
    NOTHING,
    OPEN,
    DeviceFacts,
    Member,
    MemberState,
    ModelReport,
    RollbackOutlook,
    Rollout,
    Tally,
)
from edgesplit_controller.rollout.terms import BATCH, FETCHING_S, RateState, Terms
from edgesplit_controller.storage.database import batched
from edgesplit_controller.storage.tables.core import Deployment, Desired, Device, ReleaseRow
from edgesplit_controller.storage.tables.device_state import DeviceSessionRow, RunningRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow

_ROLLOUT_FIELDS = ("state", "stage", "approved", "excused", "reason", "outcome", "following", "began", "ended")
"""Fields of `Rollout` that are columns of the same name."""
_MEMBER_FIELDS = tuple(name for name in Member.__struct_fields__ if name != "name")
"""Fields of `Member` that are columns of the same name."""
_Device = RolloutDeviceRow
REPORT_DRIVEN = ("running", "waiting", "paused")
"""States of a rollout in which a device changes only by its own report, by its timeout, or by another rollout."""


def rollout_from_row(row: RolloutRow) -> Rollout:
    """The rollout stored in a row."""
    terms = msgspec.convert(row.terms, Terms)
    fields: dict[str, Any] = {name: getattr(row, name) for name in _ROLLOUT_FIELDS}
    pace = msgspec.convert(row.rate_state, RateState)
    return Rollout(
        id=row.id, model=row.model, release=row.release, terms=terms, stages=len(terms.stages), rate_state=pace,
        **fields,
    )  # fmt: skip


def save_rollout(session: Session, row: RolloutRow, rollout: Rollout, now: float) -> None:
    """Write the fields of a rollout that a step changed, and the begin of new stages."""
    for number in range(row.stage + 1, rollout.stage + 1):
        stage = session.get(RolloutStageRow, (row.id, number))
        if stage is not None:
            stage.began = now
    for name in _ROLLOUT_FIELDS:
        setattr(row, name, getattr(rollout, name))
    row.rate_state = msgspec.to_builtins(rollout.rate_state)
    row.changed = now


def add_members(session: Session, rollout: int, members: Iterable[Member]) -> None:
    """Add devices to a rollout."""
    session.add_all(RolloutDeviceRow(rollout=rollout, device=member.name, **_fields(member)) for member in members)
    session.flush()


def save_members(session: Session, rollout: int, members: Collection[Member]) -> None:
    """Write the devices that a step changed."""
    rows = [{"rollout": rollout, "device": member.name, **_fields(member)} for member in members]
    if rows:
        session.execute(update(RolloutDeviceRow), rows)


def member_from_row(row: RolloutDeviceRow) -> Member:
    """The member stored in a row."""
    return Member(name=row.device, **{name: getattr(row, name) for name in _MEMBER_FIELDS})


def _fields(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in _MEMBER_FIELDS}


def members_for_step(session: Session, rollout: Rollout, now: float, since: float | None = None) -> list[Member]:
    """The devices that a step needs: those whose state may have changed, and the next in the queue. `since`: reports
    before this Unix time were inspected already; None: none were."""
    states = states_to_load(rollout)
    query = select(_Device).where(_Device.rollout == rollout.id)
    moving = query.where(or_(_Device.state.in_(states), _Device.rolls_back))
    if since is not None and rollout.state in REPORT_DRIVEN:
        moving = _only_changed(moving, rollout, now, since)
    queue: Sequence[RolloutDeviceRow] = ()
    if "queued" not in states:
        queue = session.scalars(query.where(_Device.state == "queued").order_by(_Device.position).limit(BATCH)).all()
    return [member_from_row(row) for row in (*session.scalars(moving).all(), *queue)]


def _only_changed(
    moving: Select[RolloutDeviceRow], rollout: Rollout, now: float, since: float
) -> Select[RolloutDeviceRow]:
    """Narrow the query to devices that have reported since then, whose timeout may have passed, or that are no longer
    governed by this rollout."""
    desired = (Desired.device == _Device.device) & (Desired.model == rollout.model)
    # `reported_at` comes from the device's session row. A device on trial is always loaded, because its gates are
    # judged by telemetry and by time, not only by its reports.
    joined = moving.join(Device, Device.name == _Device.device).outerjoin(
        DeviceSessionRow, DeviceSessionRow.device == _Device.device
    )
    is_overdue = _Device.state.in_(IN_PROGRESS) & (_Device.assigned_at <= now - rollout.terms.device_timeout_s)
    needs_rollback = (_Device.state == "failed") & (_Device.previous != "") & ~_Device.sent_back
    is_lost = Device.revoked.is_not(None) | (Desired.deployment > rollout.id)
    return joined.outerjoin(Desired, desired).where(
        or_(
            DeviceSessionRow.reported_at >= since, _Device.state == "trial", _Device.rolls_back, is_overdue,
            needs_rollback, is_lost,
        )
    )  # fmt: skip


def count_fetching(session: Session, rollout: int, now: float) -> int:
    """Number of a rollout's online devices that were assigned the release lately and do not run it yet."""
    conditions = (
        _Device.rollout == rollout,
        _Device.state.in_(("assigned", "fetching")),
        _Device.assigned_at > now - FETCHING_S,
    )
    query = select(func.count()).select_from(_Device).join(Device, Device.name == _Device.device)
    return session.scalar(query.where(*conditions, Device.alive)) or 0


def tallies(session: Session, rollout: int) -> dict[int, Tally]:
    """Tally of each stage, counted by the database."""
    lenient = (_Device.state == "timed out") & ~_Device.counts
    judged = (_Device.state == "succeeded") & ~_Device.unjudged
    is_open = _Device.state.in_(OPEN) | _Device.rolls_back
    counted = (func.sum(case((condition, 1), else_=0)) for condition in (_Device.counts, lenient, judged, is_open))
    rows = session.execute(
        select(_Device.stage, _Device.state, func.count(), *counted)
        .where(_Device.rollout == rollout)
        .group_by(_Device.stage, _Device.state)
    )
    states: dict[int, dict[MemberState, int]] = {}
    sums: dict[int, list[int]] = {}
    for row in rows:
        stage, state, count, *parts = tuple(row)
        states.setdefault(stage, {})[state] = count
        sums[stage] = [old + int(new or 0) for old, new in zip(sums.get(stage, [0] * 4), parts, strict=True)]
    return {stage: Tally(states[stage], *sums[stage]) for stage in states}


def load_facts(session: Session, rollout: Rollout, names: Collection[str]) -> dict[str, DeviceFacts]:
    """Facts about these devices, by name."""
    facts: dict[str, DeviceFacts] = {}
    for batch in batched(names):
        rows = session.execute(
            select(Device.name, Device.revoked, Device.reported, Desired.deployment)
            .outerjoin(Desired, (Desired.device == Device.name) & (Desired.model == rollout.model))
            .where(Device.name.in_(batch))
        ).all()
        undesired = [row.name for row in rows if row.deployment is None]
        withdrawn_by = _newest_assignments(session, rollout.model, undesired) if undesired else {}
        for name, revoked, reported, deployment in rows:
            # The deployment in the desired row governs the model on this device. A newer one (higher id) means that
            # this rollout was superseded there; with an older one this rollout has not assigned the device yet, and
            # its reports are about the older release.
            # Without a desired row the model was withdrawn, and the newest rollout that reached the device governs it.
            governing = max(rollout.id, withdrawn_by.get(name, 0)) if deployment is None else deployment
            facts[name] = DeviceFacts(_report(reported, rollout.model), governing == rollout.id, revoked is not None)
            if governing < rollout.id:
                facts[name] = msgspec.structs.replace(facts[name], ours=True, report=None)
    return facts


def _newest_assignments(session: Session, model: str, names: Collection[str]) -> dict[str, int]:
    """The newest rollout of the model that assigned something to each of these devices."""
    query = (
        select(_Device.device, func.max(_Device.rollout).label("newest"))
        .join(RolloutRow, RolloutRow.id == _Device.rollout)
        .where(RolloutRow.model == model, _Device.device.in_(names), _Device.counter > 0)
        .group_by(_Device.device)
    )
    return {row.device: row.newest for row in session.execute(query)}


def _report(reported: Mapping[str, Any] | None, model: str) -> ModelReport | None:
    """What the device reports of the model; None if it has never reported. A model that it does not name neither runs
    there nor is assigned."""
    if reported is None:
        return None
    for entry in reported.get("models", ()):
        if entry["model"] == model:
            return ModelReport(
                int(reported["statement_counter"]), entry["state"], entry["release"], entry["desired_release"],
                entry.get("detail", ""),
            )  # fmt: skip
    return ModelReport(int(reported["statement_counter"]), "running", "", "")


def rollback_releases(session: Session, model: str, names: Collection[str]) -> dict[str, str]:
    """The release to which each device would be rolled back from here: its desired release; or, if that has not proved
    itself yet, the one to which the rollout that assigned it would roll back."""
    releases: dict[str, str] = {}
    for batch in batched(names):
        rows = session.execute(
            select(Desired.device, Desired.release, _Device.previous, _Device.state, _Device.sent_back)
            .outerjoin(_Device, (_Device.rollout == Desired.deployment) & (_Device.device == Desired.device))
            .where(Desired.model == model, Desired.device.in_(batch))
        )
        for name, release, older_release, state, sent_back in rows:
            # Chains of rollouts: if the release to be replaced has not proved itself on this device, rolling back to
            # it would be no safer, so the last proven one before it is taken.
            is_unproved = not sent_back and (state in IN_PROGRESS or state in ("timed out", "failed", "superseded"))
            releases[name] = older_release if is_unproved else release
    return releases


def active_rollouts(session: Session) -> list[int]:
    """Ids of the rollouts that have not ended, oldest first."""
    return list(session.scalars(select(RolloutRow.id).where(RolloutRow.state.not_in(ENDED)).order_by(RolloutRow.id)))


def overlapping(session: Session, model: str, names: Collection[str]) -> dict[int, int]:
    """Number of these devices that are still open in other rollouts of the model, by rollout."""
    counts: dict[int, int] = {}
    for batch in batched(names):
        query = (
            select(_Device.rollout, func.count())
            .join(RolloutRow, RolloutRow.id == _Device.rollout)
            .where(RolloutRow.model == model, RolloutRow.state.not_in(ENDED), _Device.device.in_(batch))
            .where(_Device.state.in_(OPEN))
            .group_by(_Device.rollout)
        )
        for rollout, count in session.execute(query):
            counts[rollout] = counts.get(rollout, 0) + count
    return counts


def assigned_releases(session: Session, model: str, names: Collection[str]) -> dict[str, str]:
    """The release of the model that each of these devices shall run, else reports to run; empty where a rollout in
    progress has not reached the device yet. Devices that have nothing to do with the model are left out."""
    releases: dict[str, str] = {}
    for batch in batched(names):
        waiting = (
            select(_Device.device)
            .join(RolloutRow, RolloutRow.id == _Device.rollout)
            .where(RolloutRow.model == model, RolloutRow.release != NOTHING, RolloutRow.state.not_in(ENDED))
            .where(_Device.state == "queued", _Device.device.in_(batch))
        )
        releases |= dict.fromkeys(session.scalars(waiting), "")
        for table in (RunningRow, Desired):  # what is desired takes precedence
            rows = select(table.device, table.release).where(
                table.model == model, table.release != "", table.device.in_(batch)
            )
            releases |= {row.device: row.release for row in session.execute(rows)}
    return releases


def supersede(session: Session, rollout: Rollout) -> list[int]:
    """Make this rollout the governing one for its devices: older ones assign nothing to them any more, and add no new
    devices if they share any. Returns the ids of the older rollouts."""
    own_devices = select(_Device.device).where(_Device.rollout == rollout.id)
    older = select(RolloutRow.id).where(
        RolloutRow.model == rollout.model, RolloutRow.id < rollout.id, RolloutRow.state.not_in(ENDED)
    )
    touched = select(_Device.rollout).where(_Device.rollout.in_(older), _Device.device.in_(own_devices)).distinct()
    superseded = list(session.scalars(touched))
    queued = (_Device.rollout.in_(superseded), _Device.device.in_(own_devices), _Device.state == "queued")
    devices = update(_Device).where(*queued).values(state="superseded")
    session.execute(devices.execution_options(synchronize_session=False))
    rollouts = update(RolloutRow).where(RolloutRow.id.in_(superseded))
    session.execute(rollouts.values(following=False, superseded_by=rollout.id))
    return sorted(superseded)


def supersede_on_device(session: Session, rollout: Rollout, device: str) -> None:
    """Take a device away from older rollouts of the model that are still in progress."""
    older = select(RolloutRow.id).where(
        RolloutRow.model == rollout.model, RolloutRow.id < rollout.id, RolloutRow.state.not_in(ENDED)
    )
    lost = update(_Device).where(
        _Device.rollout.in_(older), _Device.device == device, _Device.state.not_in(("skipped", "rolled back"))
    )
    changes = {"state": "superseded", "rolls_back": False}
    session.execute(lost.values(changes).execution_options(synchronize_session=False))


def rollback_outlook(session: Session, rollout: Rollout) -> RollbackOutlook:
    """How many of the rollout's devices a rollback would change, and why it would leave the others alone."""
    desired = (Desired.device == _Device.device) & (Desired.model == rollout.model)
    later, later_rollout = aliased(RolloutDeviceRow), aliased(RolloutRow)
    withdrawn_by = (
        select(func.max(later.rollout))
        .join(later_rollout, later_rollout.id == later.rollout)
        .where(later_rollout.model == rollout.model, later.device == _Device.device, later.counter > 0)
        .scalar_subquery()
    )
    governing = func.coalesce(Desired.deployment, withdrawn_by, 0)
    is_taken = (_Device.state == "superseded") | (governing > rollout.id)
    is_reached = _Device.state.in_(("succeeded", "failed", "timed out", *IN_PROGRESS)) & Device.revoked.is_(None)
    is_undone = _Device.sent_back | (_Device.state == "rolled back")
    may_go = is_reached & ~is_taken & ~is_undone
    is_kept = (_Device.previous == NOTHING) | exists().where(ReleaseRow.digest == _Device.previous)
    returns = may_go & (_Device.previous != "")
    counted = (
        returns & is_kept, may_go & (_Device.previous == ""), is_taken, returns & ~is_kept, is_undone,
    )  # fmt: skip
    row = session.execute(
        select(*(func.sum(case((condition, 1), else_=0)) for condition in counted), func.max(
            case((is_taken, governing), else_=0)
        ))
        .select_from(_Device)
        .join(Device, Device.name == _Device.device)
        .outerjoin(Desired, desired)
        .where(_Device.rollout == rollout.id)
    ).one()  # fmt: skip
    return RollbackOutlook(*(int(count or 0) for count in row))


def lock_and_prefetch(session: Session, names: Collection[str]) -> list[object]:
    """Lock the devices and load the rows that assigning them will need one by one; they stay in the session while the
    list is referenced. Devices are locked in the order of their names, as in `Database.write_concurrent`, so that the
    two cannot deadlock."""
    rows: list[object] = []
    deployments: set[int] = set()
    for batch in batched(names):
        devices = select(Device).where(Device.name.in_(batch)).order_by(Device.name)
        rows += session.scalars(devices.with_for_update(key_share=True)).all()
        wanted = session.scalars(select(Desired).where(Desired.device.in_(batch))).all()
        deployments |= {row.deployment for row in wanted}
        rows += wanted
    options = select(Deployment).options(load_only(Deployment.options)).where(Deployment.id.in_(deployments))
    return [*rows, *session.scalars(options)]


def last_activity(session: Session) -> float:
    """Unix time at which the controller last received a message of a device or changed a rollout."""
    heard = session.scalar(select(func.max(Device.last_seen))) or 0.0
    return max(float(heard), session.scalar(select(func.max(RolloutRow.changed))) or 0.0)


def extend_timeouts(session: Session, seconds: float) -> None:
    """Give devices in progress, or being rolled back, that many more seconds."""
    conditions = _Device.rollout.in_(active_rollouts(session)), _Device.state.in_(IN_PROGRESS) | _Device.rolls_back
    shifted = {
        "assigned_at": _Device.assigned_at + seconds,
        "ran_at": case((_Device.ran_at > 0, _Device.ran_at + seconds), else_=0.0),
    }
    session.execute(update(_Device).where(*conditions).values(shifted).execution_options(synchronize_session=False))
