"""The rollout state machine: one pure decision per step over everything that is known.

`next_step` advances devices by their reports, stops at failure thresholds, begins stages, and selects the devices that
are assigned the release and those that are rolled back. `apply_assignments` adds what is known only afterwards: the
statement counters. Nothing here accesses a database.

Only devices in `states_to_load` whose facts may have changed since the last step are needed as input; the tallies say
how all others stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from edgesplit_controller.rollout.device_step import EvidenceOf, advance
from edgesplit_controller.rollout.states import (
    EMPTY_TALLY,
    EXCLUDED,
    IN_PROGRESS,
    DeviceFacts,
    Member,
    MemberState,
    Rollout,
    Tally,
    count_states,
)
from edgesplit_controller.rollout.terms import BATCH, allowance, consume

ABORTED = "the rollout ended before the device was assigned the release"
"""Cause recorded for devices that were still queued when the rollout ended."""


@dataclass(slots=True)
class Step:
    """Result of a step: what to write, and the devices to notify."""

    rollout: Rollout
    members: dict[str, Member] = field(default_factory=dict)
    """Devices that changed, by name."""
    to_assign: list[str] = field(default_factory=list)
    """Devices to be assigned the release, in this order."""
    to_roll_back: list[str] = field(default_factory=list)
    """Devices to be assigned the release they ran before."""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    begins: bool = False
    """The rollout begins: from now on older rollouts assign nothing to its devices."""
    has_more: bool = False
    """Another step is due at once."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.members or self.to_assign or self.to_roll_back or self.events or self.begins)


def states_to_load(rollout: Rollout) -> frozenset[MemberState]:
    """States of the devices that a step needs, besides those being rolled back and the next in the queue."""
    states: set[MemberState] = {*IN_PROGRESS, "timed out", "failed"}
    if rollout.state in ("aborting", "rolling back"):
        states.add("queued")
    if rollout.state == "rolling back":
        states.add("succeeded")
    return frozenset(states)


class _StepBuilder:
    """Working state of one step, from which a `Step` is built."""

    def __init__(
        self, rollout: Rollout, members: Iterable[Member], tallies: Mapping[int, Tally], facts_of: Callable[[str],
        DeviceFacts], now: float, fetch_slots: int,
    ) -> None:  # fmt: skip
        self.fetch_slots = fetch_slots
        self.rollout = rollout
        self.before = {member.name: member for member in members}
        self.members = dict(self.before)
        self.tallies = dict(tallies)
        self.facts_of = facts_of
        self.now = now
        self.step = Step(rollout)

    def update_member(self, member: Member) -> None:
        """Store a changed device, and update its stage's tally."""
        old = self.members[member.name]
        if member != old:
            self.members[member.name] = member
            self.tallies[member.stage] = _moved(self.tallies.get(member.stage, EMPTY_TALLY), old, member)

    def add_event(self, what: str, **detail: Any) -> None:
        """Add an event for the audit trail."""
        self.step.events.append((what, detail))

    def update_rollout(self, **changes: Any) -> None:
        self.rollout = replace(self.rollout, **changes)

    def build(self) -> Step:
        self.step.rollout = self.rollout
        self.step.members = {name: one for name, one in self.members.items() if one != self.before[name]}
        return self.step


def next_step(
    rollout: Rollout, members: Iterable[Member], tallies: Mapping[int, Tally], facts_of: Callable[[str], DeviceFacts],
    evidence_of: EvidenceOf, now: float, fetch_slots: int,
) -> Step:  # fmt: skip
    """What is to be done now. At most `BATCH` devices are assigned or rolled back per step, and no more than
    `fetch_slots`, the number of further devices that may fetch at once, are assigned."""
    look = _StepBuilder(rollout, members, tallies, facts_of, now, fetch_slots)
    if rollout.has_ended:
        return look.build()
    # 1. Devices move by their reports, gates and timeouts. Queued ones are handled where they are assigned.
    for member in list(look.members.values()):
        if member.state != "queued":
            look.update_member(advance(member, rollout, facts_of(member.name), evidence_of, now))
    # 2. The rollout begins, or stops at its failure threshold. The order matters: a failure that step 1 found must
    #    stop the rollout before any further device is assigned the release.
    _begin(look)
    _check_failure_threshold(look)
    # 3. Rollbacks, which share the budget of `BATCH` per step.
    if look.rollout.state in ("aborting", "rolling back"):
        _unwind(look)
    _roll_back_failed(look)
    # 4. New stages, then assignments. The state is read again, because each call may change it.
    if look.rollout.state == "running":
        _begin_stages(look)
    if look.rollout.state == "running":
        _assign_next(look)
    _check_end(look)
    return look.build()


def apply_assignments(
    step: Step, counters: Mapping[str, int], previous: Mapping[str, str], now: float
) -> dict[str, Member]:
    """The changed devices after their assignment, with the counters of their new statements; `previous` maps each
    device to the release it was to run before, or `NOTHING`."""
    members = dict(step.members)
    for name in step.to_assign:
        # A device that already had this release has nothing to roll back to.
        assigned = replace(members[name], state="assigned", assigned_at=now, counter=counters[name])
        previous_release = previous.get(name, "")
        members[name] = replace(assigned, previous="" if previous_release == step.rollout.release else previous_release)
    for name in step.to_roll_back:
        members[name] = replace(members[name], assigned_at=now, counter=counters[name])
    return members


def _begin(look: _StepBuilder) -> None:
    if look.rollout.state == "scheduled" and look.now >= look.rollout.terms.starts_at:
        look.update_rollout(state="running", began=look.now)
        look.step.begins = True
        look.add_event("rollout.began")


def _check_failure_threshold(look: _StepBuilder) -> None:
    threshold = look.rollout.terms.abort_when_failed
    if threshold is None or look.rollout.state not in ("running", "paused", "waiting"):
        return
    # Each stage has its own threshold, so that a small canary stage is not diluted by the devices of later ones.
    for stage in range(look.rollout.stage + 1):
        tally = look.tallies.get(stage, EMPTY_TALLY)
        concerned = tally.size - sum(tally.states.get(state, 0) for state in EXCLUDED)
        if tally.failures and tally.failures >= threshold.of(concerned):
            failed = f"{tally.failures} of {concerned} devices failed"
            return _fail(look, f"stage {stage + 1}: {failed}, and the threshold is {threshold}")


def _fail(look: _StepBuilder, why: str) -> None:
    """Fail the rollout: no further device is assigned the release; devices in progress are rolled back, and with
    `when_failed=rollback` also those that succeeded."""
    state = "rolling back" if look.rollout.terms.when_failed == "rollback" else "aborting"
    look.update_rollout(state=state, outcome="failed", reason=why)
    # Unwinding concerns more states than this step loaded (see `states_to_load`), so another step follows at once.
    look.step.has_more = True
    look.add_event("rollout.failing", reason=why)


def _unwind(look: _StepBuilder) -> None:
    back: list[Member] = []
    for member in look.members.values():
        if member.state == "queued":
            look.update_member(replace(member, state="skipped", cause=ABORTED))
        # `sent_back` is never reset: a device is rolled back once per rollout, whatever it reports afterwards.
        elif not member.sent_back and member.previous and _must_roll_back(member, look.rollout):
            back.append(member)
    _roll_back(look, back)


def _must_roll_back(member: Member, rollout: Rollout) -> bool:
    if member.state == "succeeded":
        return rollout.state == "rolling back"
    return member.state in IN_PROGRESS or member.state in ("timed out", "failed")


def _roll_back_failed(look: _StepBuilder) -> None:
    if not look.rollout.terms.send_back:
        return
    failed = [
        member
        for member in look.members.values()
        if member.state == "failed" and member.previous and not member.sent_back
    ]
    _roll_back(look, failed)


def _roll_back(look: _StepBuilder, members: Iterable[Member]) -> None:
    """Roll devices back, at most `BATCH` per step. All are awaited, except those that timed out."""
    for member in sorted(members, key=lambda device: device.position):
        if len(look.step.to_roll_back) >= BATCH:
            look.step.has_more = True
            return
        # A device that timed out was unreachable: it is assigned its previous release, but not awaited.
        look.update_member(replace(member, rolls_back=member.state != "timed out", sent_back=True))
        look.step.to_roll_back.append(member.name)


def _begin_stages(look: _StepBuilder) -> None:
    """Begin the next stages, as long as the previous one has succeeded."""
    while look.rollout.state == "running" and look.rollout.stage < look.rollout.stages - 1:
        if look.rollout.stage >= 0 and not _has_passed(look):
            return
        following = look.rollout.stage + 1
        if following in look.rollout.terms.approve and look.rollout.approved < following:
            look.update_rollout(state="waiting", reason="")
            return look.add_event("rollout.waiting", stage=following + 1)
        look.update_rollout(stage=following, reason="")
        look.add_event("rollout.stage", stage=following + 1, devices=look.tallies.get(following, EMPTY_TALLY).size)
        if look.tallies.get(following, EMPTY_TALLY).states.get("queued"):
            return  # otherwise the stage is empty (fewer devices than stages), and the next one is considered


def _has_passed(look: _StepBuilder) -> bool:
    """Whether the current stage allows the next one. If the stage has ended without enough evidence, the rollout fails
    or is paused."""
    stage, terms = look.rollout.stage, look.rollout.terms
    tally = look.tallies.get(stage, EMPTY_TALLY)
    if not tally.counted and not tally.lenient:
        return not tally.open  # an empty stage, or one whose devices all left the rollout: nothing to prove
    needed = terms.next_when_succeeded.of(tally.counted) if terms.next_when_succeeded else None
    # All have ended and too few succeeded: the threshold can no longer be reached.
    if needed is not None and tally.succeeded < needed and not tally.open:
        wanted = f"{tally.succeeded} of {tally.counted} devices succeeded, {terms.next_when_succeeded} wanted"
        _fail(look, f"stage {stage + 1}: {wanted}")
        return False
    # With a success threshold the next stage begins as soon as it is reached; without one, when all have ended.
    if tally.open and (needed is None or tally.succeeded < needed):
        return False
    # No failure is not yet a success: if every device timed out, or no gate could be judged, an operator decides.
    missing = _missing_evidence(look, tally)
    if missing and look.rollout.excused < stage:
        look.update_rollout(state="paused", reason=f"stage {stage + 1}: {missing}; resume to continue anyway")
        look.add_event("rollout.paused", reason=look.rollout.reason)
        return False
    return True


def _missing_evidence(look: _StepBuilder, tally: Tally) -> str:
    if not tally.succeeded:
        return "no device succeeded"
    if look.rollout.terms.gates.gates and not tally.judged:
        return (
            f"no device had evidence for all gates ({', '.join(gate.text for gate in look.rollout.terms.gates.gates)})"
        )
    return ""


def _assign_next(look: _StepBuilder) -> None:
    """Assign the release to as many queued devices as the hours, the rate and the number of fetching devices allow."""
    terms = look.rollout.terms
    if terms.hours is not None and not terms.hours.contains(look.now):
        return
    most, rate_state = allowance(terms.rate, look.rollout.rate_state, look.now)
    allowed = min(most, look.fetch_slots)
    queue = [
        queued for queued in look.members.values() if queued.state == "queued" and queued.stage <= look.rollout.stage
    ]
    for member in sorted(queue, key=lambda queued: queued.position):
        facts = look.facts_of(member.name)
        if facts.revoked:
            look.update_member(replace(member, state="skipped", cause="the device was revoked"))
        elif not facts.ours:
            look.update_member(replace(member, state="superseded"))
        elif len(look.step.to_assign) < allowed:
            look.update_member(replace(member, state="assigned"))
            look.step.to_assign.append(member.name)
    # Without a rate only `BATCH` limits the step, so the next batch may follow at once.
    look.step.has_more |= terms.rate is None and len(look.step.to_assign) == most
    if queue:
        look.update_rollout(rate_state=consume(terms.rate, rate_state, len(look.step.to_assign)))


def _check_end(look: _StepBuilder) -> None:
    """End the rollout when no device is open."""
    rollout = look.rollout
    # `has_more`: not all rollbacks fitted into this step, so their devices are not open yet although they will be.
    if any(tally.open for tally in look.tallies.values()) or look.step.has_more:
        return
    if rollout.state == "aborting":
        look.update_rollout(state=rollout.outcome or "aborted", ended=look.now)
    elif rollout.state == "rolling back":
        reason = f"{look.rollout.reason}; {_rollback_result(look.tallies.values())}"
        look.update_rollout(state="rolled back", reason=reason, ended=look.now)
    elif rollout.state == "running" and rollout.stage == rollout.stages - 1 and not rollout.following:
        _end_by_result(look)
    if look.rollout.has_ended:
        look.add_event(f"rollout.{look.rollout.state.replace(' ', '_')}", **count_states(look.tallies.values()))


def _rollback_result(tallies: Iterable[Tally]) -> str:
    """What became of the devices that a rollback concerned."""
    total = count_states(tallies)
    waiting = total.get("timed out", 0) + total.get("failed", 0)
    concerned = total.get("rolled back", 0) + waiting + total.get("succeeded", 0)
    text = f"{total.get('rolled back', 0)} of {concerned} devices are back to what they ran before"
    if kept := total.get("succeeded", 0):
        text += f"; {kept} keep the release, which they ran before"
    return f"{text}; {waiting} have not confirmed it" if waiting else text


def _end_by_result(look: _StepBuilder) -> None:
    """End a running rollout by its result."""
    total = count_states(look.tallies.values())
    last = look.tallies.get(look.rollout.stages - 1, EMPTY_TALLY)
    threshold = look.rollout.terms.next_when_succeeded
    if total.get("superseded") and not (last.succeeded or last.failures or last.lenient):
        look.update_rollout(state="superseded", ended=look.now)
    elif threshold is not None and last.counted and last.succeeded < threshold.of(last.counted):
        why = f"stage {look.rollout.stages}: {last.succeeded} of {last.counted} devices succeeded, {threshold} wanted"
        look.update_rollout(state="failed", reason=why, ended=look.now)
    elif total.get("succeeded") or not sum(tally.failures for tally in look.tallies.values()):
        look.update_rollout(state="finished", reason="", ended=look.now)
    else:
        reason = "no device has ended it" if look.rollout.withdraws else "no device runs it"
        look.update_rollout(state="failed", reason=reason, ended=look.now)


def _moved(tally: Tally, old: Member, new: Member) -> Tally:
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
