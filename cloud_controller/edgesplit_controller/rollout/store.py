"""Rollouts in the database: rows from and to the values that are decided over. In the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, case, func, or_, select, update
from sqlalchemy.orm import Session, load_only

from edgesplit_controller.releases.director import AT_ONCE, batched
from edgesplit_controller.rollout.decide import looked_at
from edgesplit_controller.rollout.states import (
    ENDED,
    ON_THE_WAY,
    OPEN,
    Member,
    MemberState,
    Report,
    Rollout,
    Seen,
    Tally,
)
from edgesplit_controller.rollout.terms import BATCH, FETCHING_S, Pace, Terms
from edgesplit_controller.storage.database import Deployment, Desired, Device
from edgesplit_controller.storage.tables.device_state import HeardRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow

_KEPT = ("state", "stage", "approved", "excused", "why", "outcome", "following", "began", "ended")
_OF_MEMBER = tuple(name for name in Member.__struct_fields__ if name != "name")
_Device = RolloutDeviceRow
QUIET = ("running", "waiting", "paused")
"""States in which nothing becomes of a device but by its own word, by its time or by another rollout."""


def rollout_of(row: RolloutRow) -> Rollout:
    """The rollout that a row keeps."""
    terms = msgspec.convert(row.terms, Terms)
    kept: dict[str, Any] = {name: getattr(row, name) for name in _KEPT}
    pace = msgspec.convert(row.pace, Pace)
    return Rollout(
        id=row.id, model=row.model, release=row.release, terms=terms, stages=len(terms.stages), pace=pace, **kept
    )


def keep(session: Session, row: RolloutRow, rollout: Rollout, now: float) -> None:
    """Write what a step changed of a rollout, and when its stages began."""
    for number in range(row.stage + 1, rollout.stage + 1):
        stage = session.get(RolloutStageRow, (row.id, number))
        if stage is not None:
            stage.began = now
    for name in _KEPT:
        setattr(row, name, getattr(rollout, name))
    row.pace = msgspec.to_builtins(rollout.pace)
    row.changed = now


def add_members(session: Session, rollout: int, members: Iterable[Member]) -> None:
    """Devices that a rollout is about from now on."""
    session.add_all(RolloutDeviceRow(rollout=rollout, device=one.name, **_fields(one)) for one in members)
    session.flush()


def keep_members(session: Session, rollout: int, members: Collection[Member]) -> None:
    """Write what a step changed of devices."""
    rows = [{"rollout": rollout, "device": one.name, **_fields(one)} for one in members]
    if rows:
        session.execute(update(RolloutDeviceRow), rows)


def member_of(row: RolloutDeviceRow) -> Member:
    """The device that a row keeps."""
    return Member(name=row.device, **{name: getattr(row, name) for name in _OF_MEMBER})


def _fields(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in _OF_MEMBER}


def members_for_step(session: Session, rollout: Rollout, now: float, since: float | None = None) -> list[Member]:
    """The devices that a step is shown: those that something may have become of, and the next in the queue. `since`:
    what was heard before that moment was looked at; None: nothing was."""
    states = looked_at(rollout)
    mine = select(_Device).where(_Device.rollout == rollout.id)
    moving = mine.where(or_(_Device.state.in_(states), _Device.goes_back))
    if since is not None and rollout.state in QUIET:
        moving = _only_news(moving, rollout, now, since)
    queue: Sequence[RolloutDeviceRow] = ()
    if "queued" not in states:
        queue = session.scalars(mine.where(_Device.state == "queued").order_by(_Device.position).limit(BATCH)).all()
    return [member_of(row) for row in (*session.scalars(moving).all(), *queue)]


def _only_news(
    moving: Select[RolloutDeviceRow], rollout: Rollout, now: float, since: float
) -> Select[RolloutDeviceRow]:
    """Of those the ones that have reported since then, or whose time may have come, or that are no longer ours."""
    desired = (Desired.device == _Device.device) & (Desired.model == rollout.model)
    told = moving.join(Device, Device.name == _Device.device).outerjoin(HeardRow, HeardRow.device == _Device.device)
    overdue = _Device.state.in_(ON_THE_WAY) & (_Device.told_at <= now - rollout.terms.device_timeout_s)
    to_send_back = (_Device.state == "failed") & (_Device.previous != "") & ~_Device.sent_back
    lost = Device.revoked.is_not(None) | (Desired.deployment > rollout.id)
    return told.outerjoin(Desired, desired).where(
        or_(HeardRow.reported_at >= since, _Device.state == "trial", _Device.goes_back, overdue, to_send_back, lost)
    )


def fetching(session: Session, rollout: int, now: float) -> int:
    """How many devices of a rollout are here, were told lately, and do not run it yet."""
    mine = (_Device.rollout == rollout, _Device.state.in_(("told", "fetching")), _Device.told_at > now - FETCHING_S)
    there = select(func.count()).select_from(_Device).join(Device, Device.name == _Device.device)
    return session.scalar(there.where(*mine, Device.alive)) or 0


def tallies(session: Session, rollout: int) -> dict[int, Tally]:
    """How each stage stands, counted by the database."""
    lenient = (_Device.state == "timed out") & ~_Device.counts
    judged = (_Device.state == "succeeded") & ~_Device.unjudged
    is_open = _Device.state.in_(OPEN) | _Device.goes_back
    counted = (func.sum(case((what, 1), else_=0)) for what in (_Device.counts, lenient, judged, is_open))
    found = session.execute(
        select(_Device.stage, _Device.state, func.count(), *counted)
        .where(_Device.rollout == rollout)
        .group_by(_Device.stage, _Device.state)
    )
    states: dict[int, dict[MemberState, int]] = {}
    sums: dict[int, list[int]] = {}
    for row in found:
        stage, state, count, *parts = tuple(row)
        states.setdefault(stage, {})[state] = count
        sums[stage] = [old + int(new or 0) for old, new in zip(sums.get(stage, [0] * 4), parts, strict=True)]
    return {stage: Tally(states[stage], *sums[stage]) for stage in states}


def seen(session: Session, rollout: Rollout, names: Collection[str]) -> dict[str, Seen]:
    """What is known of devices besides their place in the rollout."""
    known: dict[str, Seen] = {}
    for some in _in_parts(sorted(names)):
        rows = session.execute(
            select(Device.name, Device.revoked, Device.reported, Desired.deployment)
            .outerjoin(Desired, (Desired.device == Device.name) & (Desired.model == rollout.model))
            .where(Device.name.in_(some))
        )
        for name, revoked, reported, deployment in rows:
            governs = rollout.id if deployment is None else deployment
            known[name] = Seen(_report(reported, rollout.model), governs == rollout.id, revoked is not None)
            if governs < rollout.id:
                known[name] = msgspec.structs.replace(known[name], ours=True, report=None)
    return known


def _report(reported: Mapping[str, Any] | None, model: str) -> Report | None:
    if reported is None:
        return None
    for one in reported.get("models", ()):
        if one["model"] == model:
            return Report(int(reported["counter"]), one["state"], one["release"], one["wanted"], one.get("detail", ""))
    return None


def previous(session: Session, model: str, names: Collection[str]) -> dict[str, str]:
    """What each device is to go back to from here: what it shall run now, or where that did not prove well yet, what
    the rollout that told it so would take it back to."""
    found: dict[str, str] = {}
    for some in _in_parts(sorted(names)):
        rows = session.execute(
            select(Desired.device, Desired.release, _Device.previous, _Device.state, _Device.sent_back)
            .outerjoin(_Device, (_Device.rollout == Desired.deployment) & (_Device.device == Desired.device))
            .where(Desired.model == model, Desired.device.in_(some))
        )
        for name, release, before, state, sent_back in rows:
            unproved = not sent_back and (state in ON_THE_WAY or state in ("timed out", "failed", "superseded"))
            found[name] = before if unproved else release
    return found


def active(session: Session) -> list[int]:
    """Rollouts that may do something by themselves, oldest first."""
    return list(session.scalars(select(RolloutRow.id).where(RolloutRow.state.not_in(ENDED)).order_by(RolloutRow.id)))


def overlapping(session: Session, model: str, names: Collection[str]) -> dict[int, int]:
    """How many of these devices rollouts of the model are still about, by rollout."""
    found: dict[int, int] = {}
    for some in _in_parts(sorted(names)):
        there = (
            select(_Device.rollout, func.count())
            .join(RolloutRow, RolloutRow.id == _Device.rollout)
            .where(RolloutRow.model == model, RolloutRow.state.not_in(ENDED), _Device.device.in_(some))
            .where(_Device.state.in_(OPEN))
            .group_by(_Device.rollout)
        )
        for rollout, count in session.execute(there):
            found[rollout] = found.get(rollout, 0) + count
    return found


def supersede(session: Session, rollout: Rollout) -> list[int]:
    """From now on this rollout counts for its devices: older ones tell them nothing more, and follow nobody that both
    are about. Which those are."""
    mine = select(_Device.device).where(_Device.rollout == rollout.id)
    older = select(RolloutRow.id).where(
        RolloutRow.model == rollout.model, RolloutRow.id < rollout.id, RolloutRow.state.not_in(ENDED)
    )
    touched = select(_Device.rollout).where(_Device.rollout.in_(older), _Device.device.in_(mine)).distinct()
    concerned = list(session.scalars(touched))
    queued = (_Device.rollout.in_(concerned), _Device.device.in_(mine), _Device.state == "queued")
    session.execute(
        update(_Device).where(*queued).values(state="superseded").execution_options(synchronize_session=False)
    )
    session.execute(
        update(RolloutRow).where(RolloutRow.id.in_(concerned)).values(following=False, superseded_by=rollout.id)
    )
    return sorted(concerned)


def prefetch(session: Session, names: Collection[str]) -> list[object]:
    """Rows that telling these devices will ask for one by one; they stay known while the list is held. The devices are
    locked in the order of their names, as `Database.hear` does it: the two never wait for each other."""
    found: list[object] = []
    deployments: set[int] = set()
    for some in _in_parts(sorted(names)):
        devices = select(Device).where(Device.name.in_(some)).order_by(Device.name)
        found += session.scalars(devices.with_for_update(key_share=True)).all()
        wanted = session.scalars(select(Desired).where(Desired.device.in_(some))).all()
        deployments |= {row.deployment for row in wanted}
        found += wanted
    options = select(Deployment).options(load_only(Deployment.options)).where(Deployment.id.in_(deployments))
    return [*found, *session.scalars(options)]


def last_sign(session: Session) -> float:
    """When the controller last heard or did anything, as far as is kept."""
    heard = session.scalar(select(func.max(Device.last_seen))) or 0.0
    return max(float(heard), session.scalar(select(func.max(RolloutRow.changed))) or 0.0)


def shift_clocks(session: Session, seconds: float) -> None:
    """Devices that are on their way, or back, get that much more time."""
    mine = _Device.rollout.in_(active(session)), _Device.state.in_(ON_THE_WAY) | _Device.goes_back
    later = {
        "told_at": _Device.told_at + seconds,
        "ran_at": case((_Device.ran_at > 0, _Device.ran_at + seconds), else_=0.0),
    }
    session.execute(update(_Device).where(*mine).values(later).execution_options(synchronize_session=False))


def _in_parts(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return batched(names, AT_ONCE)
