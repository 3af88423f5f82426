"""What a rollout does next: one pure decision over what is known, and the same for what operators ask of it.

`step` moves devices by what they report, stops at the thresholds, begins stages, and says whom to tell the release and
whom to tell the one before. `finish` adds what only telling can say: the counters. Nothing here knows a database.

It needs to be shown only those of `looked_at` of which something may have become since the last look; how all the
others stand it knows from the tallies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from edgesplit_controller.rollout.device_step import Known, advance
from edgesplit_controller.rollout.states import (
    EMPTY,
    LEFT,
    ON_THE_WAY,
    Member,
    MemberState,
    Rollout,
    Seen,
    Tally,
)
from edgesplit_controller.rollout.terms import BATCH, MOST_FETCHING, allowance, spend

ABORTED = "the rollout ended before it was told"


@dataclass(slots=True)
class Step:
    """What follows from a look at a rollout."""

    rollout: Rollout
    members: dict[str, Member] = field(default_factory=dict)
    """Those that changed."""
    tell: list[str] = field(default_factory=list)
    """To be told the release, in this order."""
    take_back: list[str] = field(default_factory=list)
    """To be told what they ran before."""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    begins: bool = False
    """From now on this rollout counts for its devices: older ones tell them nothing more."""
    more: bool = False
    """There is more to do at once."""

    @property
    def is_empty(self) -> bool:
        """Nothing is to be written."""
        return not (self.members or self.tell or self.take_back or self.events or self.begins)


def looked_at(rollout: Rollout) -> frozenset[MemberState]:
    """The states of devices that a step must be shown, besides those that are to return, and the next in the queue."""
    states: set[MemberState] = {*ON_THE_WAY, "timed out", "failed"}
    if rollout.state in ("aborting", "rolling back"):
        states.add("queued")
    if rollout.state == "rolling back":
        states.add("succeeded")
    return frozenset(states)


class _Look:
    """One look at a rollout; what it finds grows into a `Step`."""

    def __init__(
        self, rollout: Rollout, members: Iterable[Member], tallies: Mapping[int, Tally], see: Callable[[str], Seen],
        now: float, fetching: int,
    ) -> None:  # fmt: skip
        self.fetching = fetching
        self.rollout = rollout
        self.before = {member.name: member for member in members}
        self.members = dict(self.before)
        self.tallies = dict(tallies)
        self.see = see
        self.now = now
        self.step = Step(rollout)

    def put(self, member: Member) -> None:
        """A device has changed; its stage's tally with it."""
        old = self.members[member.name]
        if member != old:
            self.members[member.name] = member
            self.tallies[member.stage] = _shifted(self.tallies.get(member.stage, EMPTY), old, member)

    def say(self, what: str, **detail: Any) -> None:
        self.step.events.append((what, detail))

    def change(self, **changes: Any) -> None:
        self.rollout = replace(self.rollout, **changes)

    def done(self) -> Step:
        self.step.rollout = self.rollout
        self.step.members = {name: one for name, one in self.members.items() if one != self.before[name]}
        return self.step


def step(
    rollout: Rollout, members: Iterable[Member], tallies: Mapping[int, Tally], see: Callable[[str], Seen],
    known: Known, now: float, fetching: int = 0,
) -> Step:  # fmt: skip
    """What is to be done now. Telling is bounded by `BATCH` a step, either way, and so that no more than
    `MOST_FETCHING` fetch at once; `fetching`: how many do."""
    look = _Look(rollout, members, tallies, see, now, fetching)
    if rollout.has_ended:
        return look.done()
    for member in list(look.members.values()):
        if member.state != "queued":
            look.put(advance(member, rollout, see(member.name), known, now))
    _begin(look)
    _stop_where_too_many_failed(look)
    if look.rollout.state in ("aborting", "rolling back"):
        _unwind(look)
    _send_failing_back(look)
    if look.rollout.state == "running":
        _progress(look)
    if look.rollout.state == "running":
        _tell_next(look)
    _end(look)
    return look.done()


def finish(step: Step, counters: Mapping[str, int], previous: Mapping[str, str], now: float) -> dict[str, Member]:
    """The devices as they stand once they were told, under these counters; `previous` is what each was to run."""
    members = dict(step.members)
    for name in step.tell:
        told = replace(members[name], state="told", told_at=now, counter=counters[name])
        before = previous.get(name, "")
        members[name] = replace(told, previous="" if before == step.rollout.release else before)
    for name in step.take_back:
        members[name] = replace(members[name], told_at=now, counter=counters[name])
    return members


def _begin(look: _Look) -> None:
    if look.rollout.state == "scheduled" and look.now >= look.rollout.terms.starts_at:
        look.change(state="running", began=look.now)
        look.step.begins = True
        look.say("rollout.began")


def _stop_where_too_many_failed(look: _Look) -> None:
    threshold = look.rollout.terms.abort_when_failed
    if threshold is None or look.rollout.state not in ("running", "paused", "waiting"):
        return
    for stage in range(look.rollout.stage + 1):
        tally = look.tallies.get(stage, EMPTY)
        concerned = tally.size - sum(tally.states.get(state, 0) for state in LEFT)
        if tally.failures and tally.failures >= threshold.of(concerned):
            failed = f"{tally.failures} of {concerned} devices failed"
            return _fail(look, f"stage {stage + 1}: {failed}, and the threshold is {threshold}")


def _fail(look: _Look, why: str) -> None:
    """No device is told any more; those on their way go back, and with `rollback` those that succeeded, too."""
    unwinds = "rolling back" if look.rollout.terms.when_failed == "rollback" else "aborting"
    look.change(state=unwinds, outcome="failed", why=why)
    look.step.more = True  # this look was not shown everything that unwinding is about
    look.say("rollout.failing", why=why)


def _unwind(look: _Look) -> None:
    back: list[Member] = []
    for member in look.members.values():
        if member.state == "queued":
            look.put(replace(member, state="skipped", cause=ABORTED))
        elif not member.sent_back and member.previous and _goes_back(member, look.rollout):
            back.append(member)
    _take_back(look, back)


def _goes_back(member: Member, rollout: Rollout) -> bool:
    if member.state == "succeeded":
        return rollout.state == "rolling back"
    return member.state in ON_THE_WAY or member.state in ("timed out", "failed")


def _send_failing_back(look: _Look) -> None:
    if not look.rollout.terms.send_back:
        return
    failed = [one for one in look.members.values() if one.state == "failed" and one.previous and not one.sent_back]
    _take_back(look, failed)


def _take_back(look: _Look, members: Iterable[Member]) -> None:
    """Each is awaited, but for those that could not be heard all the time."""
    for member in sorted(members, key=lambda one: one.position):
        if len(look.step.take_back) >= BATCH:
            look.step.more = True
            return
        look.put(replace(member, goes_back=member.state != "timed out", sent_back=True))
        look.step.take_back.append(member.name)


def _progress(look: _Look) -> None:
    """Begin the next stage, as long as the one before has proved enough."""
    while look.rollout.state == "running" and look.rollout.stage < look.rollout.stages - 1:
        if look.rollout.stage >= 0 and not _has_proved_enough(look):
            return
        coming = look.rollout.stage + 1
        if coming in look.rollout.terms.approve and look.rollout.approved < coming:
            look.change(state="waiting", why="")
            return look.say("rollout.waiting", stage=coming + 1)
        look.change(stage=coming, why="")
        look.say("rollout.stage", stage=coming + 1, devices=look.tallies.get(coming, EMPTY).size)
        if look.tallies.get(coming, EMPTY).states.get("queued"):
            return


def _has_proved_enough(look: _Look) -> bool:
    """Of the stage that runs. Where it ended without proof, the rollout fails or is paused."""
    stage, terms = look.rollout.stage, look.rollout.terms
    tally = look.tallies.get(stage, EMPTY)
    if not tally.counted and not tally.lenient:
        return not tally.open
    enough = terms.next_when_succeeded.of(tally.counted) if terms.next_when_succeeded else None
    if enough is not None and tally.succeeded < enough and not tally.open:
        wanted = f"{tally.succeeded} of {tally.counted} devices succeeded, {terms.next_when_succeeded} wanted"
        _fail(look, f"stage {stage + 1}: {wanted}")
        return False
    if tally.open and (enough is None or tally.succeeded < enough):
        return False
    missing = _missing_proof(look, tally)
    if missing and look.rollout.excused < stage:
        look.change(state="paused", why=f"stage {stage + 1}: {missing}; resume to go on all the same")
        look.say("rollout.paused", why=look.rollout.why)
        return False
    return True


def _missing_proof(look: _Look, tally: Tally) -> str:
    if not tally.succeeded:
        return "no device succeeded"
    if look.rollout.terms.gates.gates and not tally.judged:
        return f"no device could judge every gate ({', '.join(gate.text for gate in look.rollout.terms.gates.gates)})"
    return ""


def _tell_next(look: _Look) -> None:
    """As many as the hours, the rate and those that fetch just now allow."""
    terms = look.rollout.terms
    if terms.hours is not None and not terms.hours.are_now(look.now):
        return
    most, pace = allowance(terms.rate, look.rollout.pace, look.now)
    room = min(most, max(0, MOST_FETCHING - look.fetching))
    queue = [one for one in look.members.values() if one.state == "queued" and one.stage <= look.rollout.stage]
    for member in sorted(queue, key=lambda one: one.position):
        seen = look.see(member.name)
        if seen.revoked:
            look.put(replace(member, state="skipped", cause="the device was revoked"))
        elif not seen.ours:
            look.put(replace(member, state="superseded"))
        elif len(look.step.tell) < room:
            look.put(replace(member, state="told"))
            look.step.tell.append(member.name)
    look.step.more |= terms.rate is None and len(look.step.tell) == most
    if queue:
        look.change(pace=spend(terms.rate, pace, len(look.step.tell)))


def _end(look: _Look) -> None:
    rollout = look.rollout
    if any(tally.open for tally in look.tallies.values()) or look.step.more:
        return
    if rollout.state == "aborting":
        look.change(state=rollout.outcome or "aborted", ended=look.now)
    elif rollout.state == "rolling back":
        look.change(state="rolled back", ended=look.now)
    elif rollout.state == "running" and rollout.stage == rollout.stages - 1 and not rollout.following:
        _finish(look)
    if look.rollout.has_ended:
        look.say(f"rollout.{look.rollout.state.replace(' ', '_')}", **_total(look))


def _finish(look: _Look) -> None:
    total = _total(look)
    last = look.tallies.get(look.rollout.stages - 1, EMPTY)
    wanted = look.rollout.terms.next_when_succeeded
    if total.get("superseded") and not (last.succeeded or last.failures or last.lenient):
        look.change(state="superseded", ended=look.now)
    elif wanted is not None and last.counted and last.succeeded < wanted.of(last.counted):
        why = f"stage {look.rollout.stages}: {last.succeeded} of {last.counted} devices succeeded, {wanted} wanted"
        look.change(state="failed", why=why, ended=look.now)
    elif total.get("succeeded") or not sum(tally.failures for tally in look.tallies.values()):
        look.change(state="finished", why="", ended=look.now)
    else:
        look.change(state="failed", why="no device runs it", ended=look.now)


def _total(look: _Look) -> dict[str, int]:
    total: Counter[str] = Counter()
    for tally in look.tallies.values():
        total.update({str(state): count for state, count in tally.states.items() if count})
    return dict(total)


def _shifted(tally: Tally, old: Member, new: Member) -> Tally:
    """The tally after one of its devices changed."""
    states = Counter(dict(tally.states))
    states[old.state] -= 1
    states[new.state] += 1
    return Tally(
        states={state: count for state, count in states.items() if count},
        failures=tally.failures + new.counts - old.counts,
        lenient=tally.lenient + _is_lenient(new) - _is_lenient(old),
        judged=tally.judged + _is_judged(new) - _is_judged(old),
        open=tally.open + new.is_open - old.is_open,
    )


def _is_lenient(member: Member) -> bool:
    return member.state == "timed out" and not member.counts


def _is_judged(member: Member) -> bool:
    return member.state == "succeeded" and not member.unjudged
