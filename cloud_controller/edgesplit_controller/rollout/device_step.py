"""What becomes of one device of a rollout, by what it reports, by its gates and by the time. Pure.

A device that fails keeps what ran before by itself (the agent's trial); the controller then says the same, so that what
is wanted of it and what it runs agree. One that cannot be heard ends by its time-out, and blocks nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from edgesplit_controller.fleet.conditions import grouped
from edgesplit_controller.rollout.gates import Evidence, judge
from edgesplit_controller.rollout.states import ON_THE_WAY, Member, Report, Rollout, Seen

BAD = ("failed", "rolled back", "safe mode")
"""What a device says of a release that will not run there."""
LONGEST_CAUSE = 300
LONGEST_KIND = 120
GO_BACK_S = 600.0
"""So long a device is awaited that was told to go back: it obeys whenever it comes."""
Known = Callable[[Member], Evidence]
"""What is known of the rollout's release on a device since it runs there."""


def advance(member: Member, rollout: Rollout, seen: Seen, known: Known, now: float) -> Member:
    """The device as it stands now. What it must be told (`failed`, not yet `goes_back`) is the caller's to see to."""
    if member.state in ("skipped", "superseded", "gone back"):
        return member
    if seen.revoked:
        return replace(member, state="skipped", cause="the device was revoked", goes_back=False, counts=False)
    if not seen.ours:
        return replace(member, state="superseded", goes_back=False)
    if member.sent_back:
        return _return(member, rollout, seen.report, now)
    retries = member.state == "failed" and not rollout.terms.send_back
    if member.state in ON_THE_WAY or member.state == "timed out" or retries:
        return _timed(_heard(member, rollout, seen.report, known, now), rollout, now)
    return member


def _heard(member: Member, rollout: Rollout, report: Report | None, known: Known, now: float) -> Member:
    """By its own words and its gates."""
    if report is None or report.counter < member.counter or rollout.release not in (report.wanted, report.release):
        return member
    if report.state in BAD and report.wanted == rollout.release:
        return fail(member, report.detail or report.state, kind_of(report))
    if report.release == rollout.release and report.state in ("trial", "running"):
        return _judged(member, rollout, report, known, now)
    return replace(member, state="fetching") if member.state == "told" else member


def _judged(member: Member, rollout: Rollout, report: Report, known: Known, now: float) -> Member:
    """It runs the release; on trial, until the agent and the gates have found it healthy."""
    tried = member if member.ran_at else replace(member, ran_at=now)
    evidence = replace(known(tried), since_s=max(0.0, now - tried.ran_at))
    verdict = judge(rollout.terms.gates, evidence)
    if verdict.state == "fail":
        return fail(tried, verdict.why, f"gate {verdict.gate}")
    if verdict.state == "pass" and report.state == "running":
        return replace(tried, state="succeeded", counts=False, cause="", kind="", unjudged=bool(verdict.unjudged))
    return tried if tried.state == "timed out" else replace(tried, state="trial")


def _timed(member: Member, rollout: Rollout, now: float) -> Member:
    """Its time ends while it is on its way. Gates have a time of their own, which begins when the release runs."""
    if member.state not in ON_THE_WAY:
        return member
    timeout_s = rollout.terms.device_timeout_s
    until = member.told_at + timeout_s
    if member.ran_at:
        until = max(until, member.ran_at + rollout.terms.gates.seconds + timeout_s)
    if now < until:
        return member
    silent = member.state == "told"
    counts = {"never": False, "heard": not silent, "all": True}[rollout.terms.timeouts_count]
    kind = "it did not answer in time" if silent else f"not done in time: {member.state}"
    return replace(member, state="timed out", cause=kind, kind=kind, counts=counts)


def _return(member: Member, rollout: Rollout, report: Report | None, now: float) -> Member:
    """It was told to go back: it has, as soon as it says so, however late; it is awaited for `GO_BACK_S`."""
    if report is not None and report.counter >= member.counter and report.wanted == member.previous:
        if report.state == "running" and report.release == member.previous:
            return replace(member, state="gone back", goes_back=False)
        if report.state in BAD and member.goes_back:
            return _stuck(member, f"it could not go back: {report.detail or report.state}", f"back: {kind_of(report)}")
    if not member.goes_back or now < member.told_at + min(GO_BACK_S, rollout.terms.device_timeout_s):
        return member
    return _stuck(member, "it has not said yet that it went back", "it has not said yet that it went back")


def _stuck(member: Member, cause: str, kind: str) -> Member:
    """It is not awaited any more; why it failed at first is told first."""
    cause = f"{member.cause}; {cause}" if member.cause else cause
    state = member.state if member.state == "failed" else "timed out"
    return replace(member, state=state, goes_back=False, cause=cause[:LONGEST_CAUSE], kind=member.kind or kind)


def fail(member: Member, cause: str, kind: str) -> Member:
    """The device failed; the first cause stays."""
    return replace(member, state="failed", cause=cause[:LONGEST_CAUSE], kind=kind, counts=True)


def kind_of(report: Report) -> str:
    """What many devices that fail so have in common."""
    return grouped(report.state, report.detail)[:LONGEST_KIND]
