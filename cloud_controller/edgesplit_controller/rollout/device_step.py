"""State transitions of one device in a rollout, by its reports, its gates and the time (pure functions).

A device that fails keeps the release that ran before (the agent's trial). The controller then assigns that release
again, so that desired and reported state agree. A device that is unreachable ends by its timeout and blocks no other.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from edgesplit_controller.fleet.conditions import cause_with_kind
from edgesplit_controller.rollout.gates import Evidence, judge
from edgesplit_controller.rollout.states import IN_PROGRESS, DeviceFacts, Member, ModelReport, Rollout, as_reported

REFUSED_STATES = ("failed", "rolled back", "safe mode")
"""Reported states of a release that will not run on the device."""
LONGEST_CAUSE = 300
"""Characters stored of a cause."""
LONGEST_KIND = 120
"""Characters stored of a kind of failure."""
ROLLBACK_TIMEOUT_S = 600.0
"""Seconds for which a device that is rolled back is awaited. It applies the rollback whenever it is reachable again."""
EvidenceOf = Callable[[Member], Evidence]
"""Returns the evidence on a device since it began to run the rollout's release."""


def advance(member: Member, rollout: Rollout, facts: DeviceFacts, evidence_of: EvidenceOf, now: float) -> Member:
    """The device as it stands now. The caller assigns the previous release where the new state requires it (`failed`,
    not yet `rolls_back`)."""
    if member.state in ("skipped", "superseded", "rolled back"):  # final
        return member
    if facts.revoked:
        return replace(member, state="skipped", cause="the device was revoked", rolls_back=False, counts=False)
    if not facts.ours:
        return replace(member, state="superseded", rolls_back=False)
    if member.sent_back:
        return _advance_rollback(member, rollout, facts.report, now)
    # A device that timed out may still report later. A failed one is heard again only if it keeps its assignment and
    # may retry by itself.
    retries = member.state == "failed" and not rollout.terms.send_back
    if member.state in IN_PROGRESS or member.state == "timed out" or retries:
        return _apply_timeout(_apply_report(member, rollout, facts.report, evidence_of, now), rollout, now)
    return member


def _apply_report(
    member: Member, rollout: Rollout, report: ModelReport | None, evidence_of: EvidenceOf, now: float
) -> Member:
    """Apply the device's report and its gates."""
    # A report on an older statement says nothing about this assignment (it may be still in flight).
    if report is None or report.statement_counter < member.counter:
        return member
    release = as_reported(rollout.release)
    if release not in (report.desired_release, report.release):
        return member
    if report.state in REFUSED_STATES and report.desired_release == release:
        return fail(member, report.detail or report.state, failure_kind(report))
    if report.release == release and report.state in ("trial", "running"):
        return _apply_gates(member, rollout, report, evidence_of, now)
    return replace(member, state="fetching") if member.state == "assigned" and not rollout.withdraws else member


def _apply_gates(member: Member, rollout: Rollout, report: ModelReport, evidence_of: EvidenceOf, now: float) -> Member:
    """The device runs the release: on trial until the agent and the gates have found it healthy."""
    running = member if member.ran_at else replace(member, ran_at=now)
    evidence = replace(evidence_of(running), active_s=max(0.0, now - running.ran_at))
    verdict = judge(rollout.terms.gates, evidence)
    if verdict.state == "fail":
        return fail(running, verdict.reason, f"gate {verdict.gate}")
    # Both must agree: the gates pass, and the agent has ended its own trial.
    if verdict.state == "pass" and report.state == "running":
        return replace(running, state="succeeded", counts=False, cause="", kind="", unjudged=bool(verdict.unjudged))
    return running if running.state == "timed out" else replace(running, state="trial")


def _apply_timeout(member: Member, rollout: Rollout, now: float) -> Member:
    """Time out a device in progress. Gates have their own time, which begins when the release runs."""
    if member.state not in IN_PROGRESS:
        return member
    timeout_s = rollout.terms.device_timeout_s
    deadline = member.assigned_at + timeout_s
    if member.ran_at:
        deadline = max(deadline, member.ran_at + rollout.terms.gates.seconds + timeout_s)
    if now < deadline:
        return member
    is_silent = member.state == "assigned"
    # A device that never answered was perhaps switched off, which says nothing about the release (`heard`).
    counts = {"never": False, "heard": not is_silent, "all": True}[rollout.terms.timeouts_count]
    kind = "it did not answer before the timeout" if is_silent else f"not done before the timeout: {member.state}"
    return replace(member, state="timed out", cause=kind, kind=kind, counts=counts)


def _advance_rollback(member: Member, rollout: Rollout, report: ModelReport | None, now: float) -> Member:
    """Advance a device that is being rolled back. It has gone back as soon as it reports so, however late; it is
    awaited for `ROLLBACK_TIMEOUT_S`."""
    previous = as_reported(member.previous)
    if report is not None and report.statement_counter >= member.counter and report.desired_release == previous:
        if report.state == "running" and report.release == previous:
            return replace(member, state="rolled back", rolls_back=False)
        if report.state in REFUSED_STATES and member.rolls_back:
            return _end_rollback_wait(
                member,
                f"it could not roll back: {report.detail or report.state}",
                f"rollback failed: {failure_kind(report)}",
            )
    if not member.rolls_back or now < member.assigned_at + min(ROLLBACK_TIMEOUT_S, rollout.terms.device_timeout_s):
        return member
    return _end_rollback_wait(member, "it has not confirmed the rollback yet", "it has not confirmed the rollback yet")


def _end_rollback_wait(member: Member, cause: str, kind: str) -> Member:
    """Stop awaiting the rollback of a device. The cause of its original failure comes first."""
    cause = f"{member.cause}; {cause}" if member.cause else cause
    state = member.state if member.state == "failed" else "timed out"
    return replace(member, state=state, rolls_back=False, cause=cause[:LONGEST_CAUSE], kind=member.kind or kind)


def fail(member: Member, cause: str, kind: str) -> Member:
    """The device as failed, with this cause."""
    return replace(member, state="failed", cause=cause[:LONGEST_CAUSE], kind=kind, counts=True)


def failure_kind(report: ModelReport) -> str:
    """Kind of failure: the part of the cause that devices failing for one reason have in common."""
    return cause_with_kind(report.state, report.detail)[:LONGEST_KIND]
