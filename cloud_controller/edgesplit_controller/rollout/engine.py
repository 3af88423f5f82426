"""Runs rollouts: each step of a rollout is one transaction together with the director; afterwards the new statements
are published.

Promises: wherever the process is killed, a rollout continues from the last transaction. A device's state in the
rollout, its desired release, its counter and its statement change together or not at all. Only rollouts assign
releases. A notification after a transaction may be lost with the process; the broker session publishes every statement
anew when it is up again.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Select, exists, func, select
from sqlalchemy.orm import Session

from edgesplit.errors import EdgeError, UsageError
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.fleet.devices import attributes_of
from edgesplit_controller.fleet.selector import parse_selector
from edgesplit_controller.releases.director import Director
from edgesplit_controller.rollout import store
from edgesplit_controller.rollout.commands import Verb, check_can_roll_back, command
from edgesplit_controller.rollout.decide import Step, apply_assignments, next_step
from edgesplit_controller.rollout.device_step import fail
from edgesplit_controller.rollout.gates import Evidence
from edgesplit_controller.rollout.request import ALL_AT_ONCE, RolloutRequest, parse_terms
from edgesplit_controller.rollout.states import NOTHING, Member, Rollout, as_reported
from edgesplit_controller.rollout.terms import MOST_DEVICES, MOST_FETCHING, Terms, rollout_order, split_into_stages
from edgesplit_controller.rollout.view import device_views, rollout_view
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Deployment, Device, ReleaseRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.5
"""Shortest pause after a pass over the rollouts. The pause is ten times the duration of the pass, within these bounds.
"""
REPORT_WAIT_S = 1.0
"""How long reports of devices are awaited after that pause, so that a failing stage stops within 5 s."""
FULL_INSPECTION_S = 60.0
"""Interval between two steps that inspect every open device of a rollout; the steps in between inspect only devices
that have reported since."""
OVERLAP_S = 10.0
"""The steps in between look this far back, because a report is dated when it arrives but visible only when it was
stored."""
FOLLOW_EVERY_S = 10.0
"""Interval between two searches for devices that newly match a rollout, or that report a newer counter than is stored.
"""

MOST_ACTIVE = 1_000
"""Rollouts in progress at once; each is inspected every few seconds."""
OUTAGE_S = 60.0
"""If no message of any device arrived for this long, the controller was down."""

EvidenceSource = Callable[[Session, Rollout, Collection[Member]], Mapping[str, Evidence]]
"""Returns the evidence on these devices since they run the rollout's release."""
Announce = Callable[[Sequence[str]], None]
"""Publishes the statements of these devices."""
Fits = Callable[[str, str], bool]
"""Whether a release has a plan for a device class."""


def no_evidence(_session: Session, _rollout: Rollout, _members: Collection[Member]) -> Mapping[str, Evidence]:
    """`EvidenceSource` for installations without telemetry."""
    return {}


def fits_every_class(_release: str, _device_class: str) -> bool:
    """`Fits` where every release suits every class."""
    return True


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """A rollout to be created, its devices selected."""

    release: str
    """Digest of the release; `NOTHING`: the model is undeployed."""
    model: str
    """`name@version`, or a name alone where every version is undeployed."""
    devices: Sequence[Device]
    targets: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    request: RolloutRequest = ALL_AT_ONCE
    who: str = "operator"


@dataclass(frozen=True, slots=True)
class CreatedRollout:
    """A rollout that was created."""

    number: int
    supersedes: Mapping[int, int]
    """Number of devices taken over from other rollouts in progress, by rollout."""


class Rollouts:
    """The rollouts of one installation. Safe from any thread and process."""

    def __init__(
        self, database: Database, director: Director, *, now: Callable[[], float], announce: Announce,
        evidences: EvidenceSource = no_evidence, fits: Fits = fits_every_class, most_active: int = MOST_ACTIVE,
        most_fetching: int = MOST_FETCHING,
    ) -> None:  # fmt: skip
        """`announce` publishes statements after the transaction that stored them."""
        self._database = database
        self._director = director
        self._now = now
        self._announce = announce
        self._evidences = evidences
        self._fits = fits
        self._most_active, self._most_fetching = most_active, most_fetching
        self._groups: frozenset[str] | None = None
        self._inspections: dict[int, _Inspection] = {}
        self.has_new_reports = threading.Event()
        """Set when devices have reported, which shortens the loop's pause."""

    def scoped_to(self, groups: frozenset[str] | None) -> Rollouts:
        """A copy restricted to devices of these groups (None: all). A rollout is visible only if all its devices
        are."""
        narrowed = copy.copy(self)
        narrowed._groups = groups
        return narrowed

    def checked_terms(self, request: RolloutRequest, devices: int) -> Terms:
        """The terms of a requested rollout; UsageError if they are invalid, before anything is planned or signed."""
        if devices > MOST_DEVICES:
            raise UsageError(f"{devices} devices in one rollout, at most {MOST_DEVICES}: split it by an expression")
        return parse_terms(request, self._now())

    def create(self, spec: RolloutSpec) -> CreatedRollout:
        """Create a rollout, and take its first step. Conflict if too many are in progress, or with `unless_busy` if one
        of the devices is in another rollout."""
        terms = self.checked_terms(spec.request, len(spec.devices))
        model = spec.model.partition("@")[0]
        with self._database.write() as session:
            now = self._now()
            names = [device.name for device in spec.devices]
            if len(store.active_rollouts(session)) >= self._most_active:
                raise Conflict(f"{self._most_active} rollouts are active already: abort some, or wait until they end")
            if spec.release != NOTHING and session.get(ReleaseRow, spec.release) is None:
                raise Conflict(f"release {spec.release[:12]} was removed meanwhile: deploy again")
            busy = store.overlapping(session, model, names)
            if spec.request.unless_busy:
                _refuse_busy(busy, model)
            deployment = Deployment(
                release=spec.release, model=spec.model, targets=list(spec.targets), devices=sorted(names),
                options=dict(spec.options), created=now,
            )  # fmt: skip
            session.add(deployment)
            session.flush()
            row = _row(deployment, model, terms, spec.who, now)
            session.add(row)
            session.flush()
            _add_devices(session, row.id, terms, spec.devices)
            record_event(
                session, now, spec.who, "deployment.made", str(row.id), release=spec.release, model=spec.model,
                devices=len(names), stages=[str(stage) for stage in terms.stages],
            )  # fmt: skip
            result = self._step(session, row, now)
            number = row.id
        self._announce(result.announced)
        return CreatedRollout(number, busy)

    def command(self, number: int, verb: Verb, who: str = "operator") -> None:
        """Apply an operator's command, and take the next step at once. Conflict if it does not apply."""
        with self._database.write() as session:
            now = self._now()
            row = _require(session, number, groups=self._groups)
            rollout = store.rollout_from_row(row)
            commanded = command(rollout, verb, who)
            if verb == "rollback":
                check_can_roll_back(rollout, store.rollback_outlook(session, rollout))
            store.save_rollout(session, row, commanded, now)
            record_event(session, now, who, f"rollout.{verb}", str(number))
            session.flush()
            result = self._step(session, row, now)
        self._announce(result.announced)

    def step_all(self) -> bool:
        """One step of each rollout in progress; returns whether another pass is due at once."""
        with self._database.read() as session:
            numbers = store.active_rollouts(session)
        more = False
        for number in numbers:
            try:
                more |= self._step_if_due(number)
            except EdgeError as error:
                log.error("rollout %d cannot proceed now: %s", number, error)
            except Exception:
                log.exception("rollout %d cannot proceed now", number)
        self._inspections = {
            number: inspection for number, inspection in self._inspections.items() if number in numbers
        }
        return more

    def _step_if_due(self, number: int) -> bool:
        """One step if it would change anything: a fleet that only waits costs no write transaction."""
        began, inspection = self._now(), self._inspections.get(number)
        # Full also if the wall clock was set back behind the last inspection.
        is_full = inspection is None or not inspection.last <= began < inspection.full + FULL_INSPECTION_S
        since = None if inspection is None or is_full else inspection.last - OVERLAP_S
        # Decided twice: first in a read transaction, to avoid the write lock where nothing changes; then again under
        # the write lock, because the facts may have changed in between.
        more = self._is_due(number, since) and self.step_one(number, since)
        self._inspections[number] = _Inspection(began, began if inspection is None or is_full else inspection.full)
        return more

    def _is_due(self, number: int, since: float | None) -> bool:
        with self._database.read() as session:
            row = session.get(RolloutRow, number)
            if row is None:
                return False
            rollout = store.rollout_from_row(row)
            planned_step = self._decide(session, rollout, self._now(), since)
            return not planned_step.is_empty or planned_step.rollout != rollout

    def step_one(self, number: int, since: float | None = None) -> bool:
        """One step of one rollout; returns whether another is due at once. `since`: reports before this Unix time were
        inspected already."""
        with self._database.write() as session:
            result = self._step(session, _require(session, number), self._now(), since)
        self._announce(result.announced)
        return result.has_more

    def view(self, number: int) -> dict[str, Any]:
        """One rollout as JSON; NotFound if there is none."""
        with self._database.read() as session:
            return rollout_view(session, _require(session, number, writing=False, groups=self._groups), self._now())

    def list_views(self, newest: int) -> list[dict[str, Any]]:
        """The newest rollouts as JSON, oldest first."""
        with self._database.read() as session:
            rows = session.scalars(_visible_rollouts(self._groups).order_by(RolloutRow.id.desc()).limit(newest)).all()
            return [rollout_view(session, row, self._now()) for row in reversed(rows)]

    def device_views(self, number: int, *, states: Sequence[str], after: int, most: int) -> list[dict[str, Any]]:
        """Devices of a rollout in the order of their assignment, after position `after`, as JSON."""
        with self._database.read() as session:
            _require(session, number, writing=False, groups=self._groups)
            return device_views(session, number, states=states, after=after, most=most)

    def assigned_devices(self, model: str, devices: Collection[str]) -> dict[str, str]:
        """The release of `model` (its name) that each of these devices shall run or runs, by device; empty where a
        rollout in progress has not reached the device yet."""
        with self._database.read() as session:
            return store.assigned_releases(session, model, devices)

    def overlapping(self, model: str, devices: Collection[str]) -> dict[int, int]:
        """Number of these devices that are still open in rollouts of the model (its name), by rollout."""
        with self._database.read() as session:
            return store.overlapping(session, model, devices)

    def add_matching_devices(self) -> None:
        """Add devices that newly match rollouts with `follow`."""
        with self._database.read() as session:
            numbers = session.scalars(
                select(RolloutRow.id).where(RolloutRow.following, RolloutRow.id.in_(store.active_rollouts(session)))
            ).all()
        for number in numbers:
            with self._database.write() as session:
                _add_new_devices(session, _require(session, number), self._fits, self._now())

    def extend_timeouts_after_outage(self) -> None:
        """Extend the timeouts of devices by the time in which no controller ran. To be called once at a start."""
        with self._database.write() as session:
            gone_s = self._now() - store.last_activity(session)
            if gone_s > OUTAGE_S:
                store.extend_timeouts(session, gone_s)

    def overtake_reported_counters(self) -> None:
        """Sign and publish new statements for devices that report a newer counter than is stored, as after the restore
        of an older database."""
        if behind := self._director.overtake_reported_counters():
            log.warning(
                "the database is older than the statements of %d devices: newer ones are published to them", len(behind)
            )
            self._announce(behind)

    def _decide(self, session: Session, rollout: Rollout, now: float, since: float | None = None) -> Step:
        """Load what is known of a rollout and decide its next step."""
        members = store.members_for_step(session, rollout, now, since)
        facts = store.load_facts(session, rollout, [member.name for member in members])
        running = [
            member for member in members if member.state != "queued" and _runs_release(facts[member.name], rollout)
        ]
        evidences = self._evidences(session, rollout, running) if running else {}

        def evidence_of(member: Member) -> Evidence:
            return evidences.get(member.name) or Evidence(model=rollout.model, release=rollout.release)

        fetch_slots = max(0, self._most_fetching - store.count_fetching(session, rollout.id, now))
        tallies = store.tallies(session, rollout.id)
        return next_step(rollout, members, tallies, facts.__getitem__, evidence_of, now, fetch_slots)

    def _step(self, session: Session, row: RolloutRow, now: float, since: float | None = None) -> _StepResult:
        """Decide and write one step, in the caller's transaction."""
        rollout = store.rollout_from_row(row)
        planned_step = self._decide(session, rollout, now, since)
        # Superseding comes before the assignments, so that in one transaction only one rollout governs a device.
        if planned_step.begins:
            for older in store.supersede(session, rollout):
                record_event(session, now, "controller", "rollout.superseded_by", str(older), by=rollout.id)
        result = self._assign(session, planned_step, now)
        if planned_step.rollout != rollout or result.members:
            store.save_rollout(session, row, planned_step.rollout, now)
            store.save_members(session, rollout.id, result.members)
        for what, detail in planned_step.events:
            record_event(session, now, "controller", what, str(rollout.id), **detail)
        return result

    def _assign(self, session: Session, planned_step: Step, now: float) -> _StepResult:
        """Assign the releases of a step. A device whose statement cannot be signed fails, and does not stop the
        others."""
        rollout = planned_step.rollout
        # The agent itself cannot be removed from a device, so its first release has nothing to go back to.
        if_first = "" if rollout.model == AGENT_MODEL else NOTHING
        rollback_releases = dict.fromkeys(planned_step.to_assign, if_first)
        rollback_releases |= store.rollback_releases(session, rollout.model, planned_step.to_assign)
        # Referenced until the end of the method: the session keeps rows only weakly.
        _held = store.lock_and_prefetch(session, [*planned_step.to_assign, *planned_step.to_roll_back])
        _release = session.get(ReleaseRow, rollout.release)  # read for each device that is assigned it
        counters: dict[str, int] = {}
        refused: dict[str, str] = {}
        releases = dict.fromkeys(planned_step.to_assign, rollout.release)
        releases |= {name: planned_step.members[name].previous for name in planned_step.to_roll_back}
        for name, release in releases.items():
            try:
                with session.begin_nested():  # a savepoint: a refusal undoes this device's rows only
                    if release == NOTHING:
                        counters[name] = self._withdraw(session, name, rollout)
                    else:
                        counters[name] = self._director.assign(session, name, rollout.model, release, rollout.id)
            except EdgeError as error:
                refused[name], counters[name] = str(error), 0
        members = apply_assignments(planned_step, counters, rollback_releases, now)
        for name, why in refused.items():
            log.error("%s is not assigned release %s: %s", name, rollout.release[:12], why)
            members[name] = fail(members[name], f"it cannot be assigned: {why}", "it cannot be assigned")
            members[name] = msgspec.structs.replace(members[name], sent_back=True, rolls_back=False)
        announced = [name for name in releases if name not in refused]
        return _StepResult(list(members.values()), announced, planned_step.has_more)

    def _withdraw(self, session: Session, device: str, rollout: Rollout) -> int:
        """Remove the rollout's model from a device. Its desired row, by which older rollouts in progress would notice
        that this one governs the device, goes with it, so they lose the device here."""
        store.supersede_on_device(session, rollout, device)
        return self._director.withdraw(session, device, rollout.model)


@dataclass(frozen=True, slots=True)
class _Inspection:
    """When a rollout was last inspected."""

    last: float
    full: float
    """When all its open devices were inspected."""


@dataclass(frozen=True, slots=True)
class _StepResult:
    """What a step wrote, and the devices whose statements are to be published."""

    members: list[Member]
    announced: list[str]
    has_more: bool


class RolloutJob:
    """A job for `PeriodicThread` that steps rollouts: soon after devices have reported, and at least every few
    seconds."""

    def __init__(self, rollouts: Rollouts, *, is_leader: Callable[[], bool] = lambda: True) -> None:
        """`is_leader` returns whether this process holds the lease: of several processes only one steps."""
        self._rollouts = rollouts
        self._is_leader = is_leader
        self._follow_at = 0.0
        self._has_begun = False
        self._has_more = True

    def __call__(self) -> float:
        """Step every rollout; returns the seconds until the next call."""
        if not self._has_more:
            self._rollouts.has_new_reports.wait(REPORT_WAIT_S)
            self._rollouts.has_new_reports.clear()
        self._has_more = False
        if not self._is_leader():
            return SHORTEST_PAUSE_S
        began = time.monotonic()
        if not self._has_begun:
            self._rollouts.extend_timeouts_after_outage()
            self._has_begun = True
        self._has_more = self._rollouts.step_all()
        if began >= self._follow_at:
            self._rollouts.add_matching_devices()
            self._rollouts.overtake_reported_counters()
            self._follow_at = began + FOLLOW_EVERY_S
        took_s = time.monotonic() - began
        return 0.0 if self._has_more else min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, 10 * took_s))


def _row(deployment: Deployment, model: str, terms: Terms, who: str, now: float) -> RolloutRow:
    return RolloutRow(
        id=deployment.id, model=model, release=deployment.release, terms=msgspec.to_builtins(terms), state="scheduled",
        stage=-1, approved=-1, excused=-1, reason="", outcome="", following=terms.follow, superseded_by=0,
        rate_state={}, who=who, created=now, began=0.0, ended=0.0, changed=now,
    )  # fmt: skip


def _add_devices(session: Session, number: int, terms: Terms, devices: Sequence[Device]) -> None:
    prefer = parse_selector(terms.prefer) if terms.prefer else None
    preferred = {device.name for device in devices if prefer and prefer(attributes_of(device))}
    ordered = rollout_order(number, (device.name for device in devices), preferred.__contains__)
    position = {name: index for index, name in enumerate(ordered)}
    stages = split_into_stages(terms.stages, ordered)
    for stage, portion in enumerate(terms.stages):
        session.add(RolloutStageRow(rollout=number, number=stage, size=str(portion), began=0.0))
    members = [
        Member(name=name, stage=stage, position=position[name]) for stage, names in enumerate(stages) for name in names
    ]
    store.add_members(session, number, members)


def _add_new_devices(session: Session, row: RolloutRow, fits: Fits, now: float) -> None:
    """Add devices that match the targets now but did not when the rollout was created; they join its last stage."""
    deployment = session.get(Deployment, row.id)
    if deployment is None or not row.following:
        return
    members = select(RolloutDeviceRow.device).where(RolloutDeviceRow.rollout == row.id)
    others = select(Device).where(Device.revoked.is_(None), Device.name.not_in(members))
    # Groups of the operator who created it: `all` means all of these.
    if (groups := deployment.options.get("groups")) is not None:
        others = others.where(Device.group.in_(groups))
    selectors = [parse_selector(target) for target in deployment.targets]
    new = [
        device for device in session.scalars(others) if any(selector(attributes_of(device)) for selector in selectors)
    ]
    if not new:
        return
    last = session.scalar(select(func.max(RolloutDeviceRow.position)).where(RolloutDeviceRow.rollout == row.id))
    first, stage = (last if last is not None else -1) + 1, len(row.terms["stages"]) - 1
    capacity = max(0, MOST_DEVICES - first)
    by_name = {device.name: device for device in new}
    for position, name in enumerate(rollout_order(row.id, by_name)[:capacity], first):
        member = Member(name=name, stage=stage, position=position)
        if not fits(row.release, by_name[name].device_class):
            why = f"the release has no plan for {by_name[name].device_class}: deploy again"
            member = msgspec.structs.replace(member, state="skipped", cause=why, kind=why)
        store.add_members(session, row.id, [member])
    record_event(
        session, now, "controller", "rollout.joined", str(row.id), devices=sorted(by_name)[:20], count=len(by_name)
    )
    row.changed = now


def _runs_release(facts: Any, rollout: Rollout) -> bool:
    return facts.report is not None and facts.report.release == as_reported(rollout.release)


def _refuse_busy(busy: Mapping[int, int], model: str) -> None:
    for number, count in sorted(busy.items()):
        raise Conflict(
            f"rollout {number} brings {model} to {count} of these devices just now: wait for it, abort it"
            f" (`edgectl rollout abort {number}`), or deploy without --unless-busy and supersede it"
        )


def _require(
    session: Session, number: int, *, writing: bool = True, groups: frozenset[str] | None = None
) -> RolloutRow:
    """The row of that rollout, locked for an update with `writing`; NotFound lists visible ones."""
    row = session.scalars(_visible_rollouts(groups).where(RolloutRow.id == number)).one_or_none()
    if row is None:
        visible = session.scalars(_visible_rollouts(groups).order_by(RolloutRow.id.desc()).limit(100))
        raise not_found("rollout", str(number), (str(other.id) for other in visible))
    return session.get(RolloutRow, number, with_for_update=True) or row if writing else row


def _visible_rollouts(groups: frozenset[str] | None) -> Select[RolloutRow]:
    """Query for rollouts all of whose devices are in these groups; None: all rollouts."""
    every: Select[RolloutRow] = select(RolloutRow)
    if groups is None:
        return every
    others = select(Device.name).where(Device.group.not_in(groups))
    foreign = exists().where(RolloutDeviceRow.rollout == RolloutRow.id, RolloutDeviceRow.device.in_(others))
    return every.where(~foreign)
