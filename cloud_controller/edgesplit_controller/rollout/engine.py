"""The loop around the decisions: each step of a rollout is one transaction with the director; then devices are told.

Promises: whatever instant the process ends at, a rollout goes on from what the last transaction left; a device's place
in the rollout, the release that it shall run, its counter and its statement change together or not at all. Rollouts are
the only ones that assign releases. What has to be said to devices after a transaction may be lost with the process: the
session with the broker states everything anew when it is back.
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
from edgesplit_controller.errors import Conflict, unknown
from edgesplit_controller.fleet.devices import described
from edgesplit_controller.fleet.selector import parse_selector
from edgesplit_controller.releases.director import Director
from edgesplit_controller.rollout import store
from edgesplit_controller.rollout.commands import Verb, command
from edgesplit_controller.rollout.decide import Step, finish, step
from edgesplit_controller.rollout.device_step import fail
from edgesplit_controller.rollout.gates import Evidence
from edgesplit_controller.rollout.request import PLAIN, Asked, terms_of
from edgesplit_controller.rollout.states import Member, Rollout
from edgesplit_controller.rollout.terms import MOST_DEVICES, Terms, divide, in_order
from edgesplit_controller.rollout.view import shown_devices, shown_rollout
from edgesplit_controller.storage.database import Database, Deployment, Device, record
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow

log = logging.getLogger(__name__)

LEAST_S, LONGEST_S = 0.1, 3.5
"""The rest after a look at the rollouts: ten times what it took, within these."""
IDLE_S = 1.0
"""How long news are awaited after that: a failing stage stops within 5 s."""
WHOLE_S = 60.0
"""Between two looks at every device that a rollout waits for; those in between are at the ones that reported since."""
OVERLAP_S = 10.0
"""So far back they go: a report is dated when it comes, and is there to be seen when it was stored."""
FOLLOW_S = 10.0
"""Between two looks for devices that have come to be meant, or that know more than we do."""

MOST_ACTIVE = 1_000
"""Rollouts on their way at once: each is looked at every few seconds."""
ABSENCE_S = 60.0
"""Silence of all devices for so long means that nobody listened."""

Evidences = Callable[[Session, Rollout, Collection[Member]], Mapping[str, Evidence]]
"""What is known of the rollout's release on these devices since they ran it."""
Announce = Callable[[Sequence[str]], None]
Fits = Callable[[str, str], bool]
"""Whether a release has a plan for a device class."""


def no_evidence(_session: Session, _rollout: Rollout, _members: Collection[Member]) -> Mapping[str, Evidence]:
    """Where nothing measures."""
    return {}


def every_class(_release: str, _device_class: str) -> bool:
    """Where releases are for all."""
    return True


@dataclass(frozen=True, slots=True)
class Wanted:
    """A rollout to be made, its devices chosen."""

    release: str
    model: str
    """`name@version`."""
    devices: Sequence[Device]
    targets: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    asked: Asked = PLAIN
    who: str = "operator"


@dataclass(frozen=True, slots=True)
class Made:
    """A rollout that was made."""

    number: int
    supersedes: Mapping[int, int]
    """How many devices it takes over from others that were on their way, by rollout."""


class Rollouts:
    """The rollouts of one installation. Any thread, any process."""

    def __init__(
        self, database: Database, director: Director, *, now: Callable[[], float], announce: Announce,
        evidences: Evidences = no_evidence, fits: Fits = every_class,
    ) -> None:  # fmt: skip
        """`announce` tells devices, after the transaction, what they shall run."""
        self._database = database
        self._director = director
        self._now = now
        self._announce = announce
        self._evidences = evidences
        self._fits = fits
        self._groups: frozenset[str] | None = None
        self._looks: dict[int, _Looks] = {}
        self.news = threading.Event()
        """Devices reported something: whoever steps looks soon."""

    def within(self, groups: frozenset[str] | None) -> Rollouts:
        """The same rollouts, for a caller for whom only devices of these groups exist (None: all do): those that
        concern any other device do not exist either."""
        narrowed = copy.copy(self)
        narrowed._groups = groups
        return narrowed

    def check(self, asked: Asked, devices: int) -> Terms:
        """The terms; UsageError where they cannot be, before anything was planned or signed for them."""
        if devices > MOST_DEVICES:
            raise UsageError(f"{devices} devices in one rollout, at most {MOST_DEVICES}: split it by an expression")
        return terms_of(asked, self._now())

    def make(self, wanted: Wanted) -> Made:
        """Begin to bring a release to devices. What may begin at once has begun on return."""
        terms = self.check(wanted.asked, len(wanted.devices))
        model = wanted.model.partition("@")[0]
        with self._database.write() as session:
            now = self._now()
            names = [device.name for device in wanted.devices]
            if len(store.active(session)) >= MOST_ACTIVE:
                raise Conflict(f"{MOST_ACTIVE} rollouts are on their way already: abort some, or wait until they end")
            busy = store.overlapping(session, model, names)
            if wanted.asked.unless_busy:
                _refuse_busy(busy, model)
            deployment = Deployment(
                release=wanted.release, model=wanted.model, targets=list(wanted.targets), devices=sorted(names),
                options=dict(wanted.options), created=now,
            )  # fmt: skip
            session.add(deployment)
            session.flush()
            row = _row(deployment, model, terms, wanted.who, now)
            session.add(row)
            session.flush()
            _add_devices(session, row.id, terms, wanted.devices)
            record(
                session, now, wanted.who, "deployment.made", str(row.id), release=wanted.release, model=wanted.model,
                devices=len(names), stages=[str(stage) for stage in terms.stages],
            )  # fmt: skip
            told = self._step(session, row, now)
            number = row.id
        self._announce(told.announced)
        return Made(number, busy)

    def command(self, number: int, verb: Verb, who: str = "operator") -> None:
        """An operator's word, and what follows from it at once."""
        with self._database.write() as session:
            now = self._now()
            row = _existing(session, number, groups=self._groups)
            store.keep(session, row, command(store.rollout_of(row), verb, who), now)
            record(session, now, who, f"rollout.{verb}", str(number))
            session.flush()
            told = self._step(session, row, now)
        self._announce(told.announced)

    def step_all(self) -> bool:
        """One step of each rollout that is on its way; whether there is more to do at once."""
        with self._database.read() as session:
            numbers = store.active(session)
        more = False
        for number in numbers:
            try:
                more |= self._step_if_due(number)
            except EdgeError as error:
                log.error("rollout %d does not go on just now: %s", number, error)
            except Exception:
                log.exception("rollout %d does not go on just now", number)
        self._looks = {number: looks for number, looks in self._looks.items() if number in numbers}
        return more

    def _step_if_due(self, number: int) -> bool:
        """One step where it would change anything: a fleet that only waits costs no write."""
        began, looks = self._now(), self._looks.get(number)
        is_whole = looks is None or not looks.last <= began < looks.whole + WHOLE_S  # clocks are set back, too
        since = None if looks is None or is_whole else looks.last - OVERLAP_S
        more = self._is_due(number, since) and self.step_one(number, since)
        self._looks[number] = _Looks(began, began if looks is None or is_whole else looks.whole)
        return more

    def _is_due(self, number: int, since: float | None) -> bool:
        with self._database.read() as session:
            row = session.get(RolloutRow, number)
            if row is None:
                return False
            rollout = store.rollout_of(row)
            found = self._look(session, rollout, self._now(), since)
            return not found.is_empty or found.rollout != rollout

    def step_one(self, number: int, since: float | None = None) -> bool:
        """One step of one rollout; whether there is more to do at once. `since`: all that was heard before was looked
        at."""
        with self._database.write() as session:
            told = self._step(session, _existing(session, number), self._now(), since)
        self._announce(told.announced)
        return told.more

    def shown(self, number: int) -> dict[str, Any]:
        """One rollout."""
        with self._database.read() as session:
            return shown_rollout(session, _existing(session, number, writing=False, groups=self._groups), self._now())

    def shown_all(self, newest: int) -> list[dict[str, Any]]:
        """The newest rollouts, oldest first."""
        with self._database.read() as session:
            rows = session.scalars(_of(self._groups).order_by(RolloutRow.id.desc()).limit(newest)).all()
            return [shown_rollout(session, row, self._now()) for row in reversed(rows)]

    def shown_devices(self, number: int, *, states: Sequence[str], after: int, most: int) -> list[dict[str, Any]]:
        """Some of its devices."""
        with self._database.read() as session:
            _existing(session, number, writing=False, groups=self._groups)
            return shown_devices(session, number, states=states, after=after, most=most)

    def follow(self) -> None:
        """Take in the devices that have come to be meant by rollouts that follow."""
        with self._database.read() as session:
            numbers = session.scalars(
                select(RolloutRow.id).where(RolloutRow.following, RolloutRow.id.in_(store.active(session)))
            ).all()
        for number in numbers:
            with self._database.write() as session:
                _take_in_new(session, _existing(session, number), self._fits, self._now())

    def excuse_absence(self) -> None:
        """A while without a controller is no device's fault: it is added to their time. To be called at a start."""
        with self._database.write() as session:
            gone_s = self._now() - store.last_sign(session)
            if gone_s > ABSENCE_S:
                store.shift_clocks(session, gone_s)

    def catch_up(self) -> None:
        """Tell devices anew that know more than is kept here, as after an older database was put in place."""
        if behind := self._director.catch_up():
            log.warning("the database is older than what %d devices know: they are told anew", len(behind))
            self._announce(behind)

    def _look(self, session: Session, rollout: Rollout, now: float, since: float | None = None) -> Step:
        """What is to be done, by all that is known."""
        members = store.members_for_step(session, rollout, now, since)
        seen = store.seen(session, rollout, [member.name for member in members])
        running = [member for member in members if member.state != "queued" and _runs(seen[member.name], rollout)]
        evidences = self._evidences(session, rollout, running) if running else {}

        def known(member: Member) -> Evidence:
            return evidences.get(member.name) or Evidence(model=rollout.model, release=rollout.release)

        fetching = store.fetching(session, rollout.id, now)
        return step(rollout, members, store.tallies(session, rollout.id), seen.__getitem__, known, now, fetching)

    def _step(self, session: Session, row: RolloutRow, now: float, since: float | None = None) -> _Told:
        rollout = store.rollout_of(row)
        found = self._look(session, rollout, now, since)
        if found.begins:
            for older in store.supersede(session, rollout):
                record(session, now, "controller", "rollout.superseded_by", str(older), by=rollout.id)
        told = self._tell(session, found, now)
        if found.rollout != rollout or told.members:
            store.keep(session, row, found.rollout, now)
            store.keep_members(session, rollout.id, told.members)
        for what, detail in found.events:
            record(session, now, "controller", what, str(rollout.id), **detail)
        return told

    def _tell(self, session: Session, found: Step, now: float) -> _Told:
        """Assign what the step says. A device whose statement cannot be made has failed, and holds up nobody."""
        rollout = found.rollout
        before = store.previous(session, rollout.model, found.tell)
        _held = store.prefetch(session, [*found.tell, *found.take_back])
        counters: dict[str, int] = {}
        refused: dict[str, str] = {}
        wanted = dict.fromkeys(found.tell, rollout.release)
        wanted |= {name: found.members[name].previous for name in found.take_back}
        for name, release in wanted.items():
            try:
                with session.begin_nested():
                    counters[name] = self._director.assign(session, name, rollout.model, release, rollout.id)
            except EdgeError as error:
                refused[name], counters[name] = str(error), 0
        members = finish(found, counters, before, now)
        for name, why in refused.items():
            log.error("%s is not told of release %s: %s", name, rollout.release[:12], why)
            members[name] = fail(members[name], f"it cannot be told: {why}", "it cannot be told")
            members[name] = msgspec.structs.replace(members[name], sent_back=True, goes_back=False)
        return _Told(list(members.values()), [name for name in wanted if name not in refused], found.more)


@dataclass(frozen=True, slots=True)
class _Looks:
    """When a rollout was looked at."""

    last: float
    whole: float
    """When every device was that it waits for."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a step wrote, and whom it is to be said to."""

    members: list[Member]
    announced: list[str]
    more: bool


class RolloutLoop:
    """The thread that steps: soon after there are news, and at least every few seconds."""

    def __init__(self, rollouts: Rollouts, *, may_step: Callable[[], bool] = lambda: True) -> None:
        """`may_step`: of several controller processes one steps."""
        self._rollouts = rollouts
        self._may_step = may_step
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step that it is in."""
        self._ended.set()
        self._rollouts.news.set()
        if self._thread.ident is not None:
            self._thread.join(10)

    def _run(self) -> None:
        follow_at, began_here = 0.0, False
        while not self._ended.is_set():
            began, more = time.monotonic(), False
            try:
                if self._may_step():
                    if not began_here:
                        self._rollouts.excuse_absence()
                        began_here = True
                    more = self._rollouts.step_all()
                    if began >= follow_at:
                        self._rollouts.follow()
                        self._rollouts.catch_up()
                        follow_at = began + FOLLOW_S
            except Exception:
                log.exception("the rollouts do not go on just now")
            took_s = time.monotonic() - began
            if not more and not self._ended.wait(min(LONGEST_S, max(LEAST_S, 10 * took_s))):
                self._rollouts.news.wait(IDLE_S)
                self._rollouts.news.clear()


def _row(deployment: Deployment, model: str, terms: Terms, who: str, now: float) -> RolloutRow:
    return RolloutRow(
        id=deployment.id, model=model, release=deployment.release, terms=msgspec.to_builtins(terms), state="scheduled",
        stage=-1, approved=-1, excused=-1, why="", outcome="", following=terms.follow, superseded_by=0, pace={},
        who=who, created=now, began=0.0, ended=0.0, changed=now,
    )  # fmt: skip


def _add_devices(session: Session, number: int, terms: Terms, devices: Sequence[Device]) -> None:
    prefer = parse_selector(terms.prefer) if terms.prefer else None
    liked = {device.name for device in devices if prefer and prefer(described(device))}
    ordered = in_order(number, (device.name for device in devices), liked.__contains__)
    position = {name: place for place, name in enumerate(ordered)}
    stages = divide(terms.stages, ordered)
    for stage, asked in enumerate(terms.stages):
        session.add(RolloutStageRow(rollout=number, number=stage, asked=str(asked), began=0.0))
    members = [
        Member(name=name, stage=stage, position=position[name]) for stage, names in enumerate(stages) for name in names
    ]
    store.add_members(session, number, members)


def _take_in_new(session: Session, row: RolloutRow, fits: Fits, now: float) -> None:
    """Devices that the targets mean now and did not when the rollout was made: they join its last stage."""
    deployment = session.get(Deployment, row.id)
    if deployment is None or not row.following:
        return
    mine = select(RolloutDeviceRow.device).where(RolloutDeviceRow.rollout == row.id)
    others = select(Device).where(Device.revoked.is_(None), Device.name.not_in(mine))
    if (groups := deployment.options.get("groups")) is not None:  # of whoever asked: `all` are all of theirs
        others = others.where(Device.group.in_(groups))
    meant = [parse_selector(target) for target in deployment.targets]
    new = [device for device in session.scalars(others) if any(selector(described(device)) for selector in meant)]
    if not new:
        return
    last = session.scalar(select(func.max(RolloutDeviceRow.position)).where(RolloutDeviceRow.rollout == row.id))
    first, stage = (last if last is not None else -1) + 1, len(row.terms["stages"]) - 1
    room = max(0, MOST_DEVICES - first)
    by_name = {device.name: device for device in new}
    for position, name in enumerate(in_order(row.id, by_name)[:room], first):
        member = Member(name=name, stage=stage, position=position)
        if not fits(row.release, by_name[name].device_class):
            why = f"the release has no plan for {by_name[name].device_class}: deploy again"
            member = msgspec.structs.replace(member, state="skipped", cause=why, kind=why)
        store.add_members(session, row.id, [member])
    record(session, now, "controller", "rollout.joined", str(row.id), devices=sorted(by_name)[:20], count=len(by_name))
    row.changed = now


def _runs(seen: Any, rollout: Rollout) -> bool:
    return seen.report is not None and seen.report.release == rollout.release


def _refuse_busy(busy: Mapping[int, int], model: str) -> None:
    for number, count in sorted(busy.items()):
        raise Conflict(
            f"rollout {number} brings {model} to {count} of these devices just now: wait for it, abort it"
            f" (`edgectl rollout abort {number}`), or deploy without --unless-busy and supersede it"
        )


def _existing(
    session: Session, number: int, *, writing: bool = True, groups: frozenset[str] | None = None
) -> RolloutRow:
    row = session.scalars(_of(groups).where(RolloutRow.id == number)).one_or_none()
    if row is None:
        there = session.scalars(_of(groups).order_by(RolloutRow.id.desc()).limit(100))
        raise unknown("rollout", str(number), (str(one.id) for one in there))
    return session.get(RolloutRow, number, with_for_update=True) or row if writing else row


def _of(groups: frozenset[str] | None) -> Select[RolloutRow]:
    """Rollouts all of whose devices are of these groups; None: all rollouts."""
    every: Select[RolloutRow] = select(RolloutRow)
    if groups is None:
        return every
    others = select(Device.name).where(Device.group.not_in(groups))
    foreign = exists().where(RolloutDeviceRow.rollout == RolloutRow.id, RolloutDeviceRow.device.in_(others))
    return every.where(~foreign)
