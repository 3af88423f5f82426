"""Which messages of a device are current: their order, the age of facts, and why reported state differs from desired
state.

Pure functions. A session has a number that grows with each connection; telemetry and reports are numbered within it.
Messages of an older session are ignored, duplicates count once, reordered messages do not set the state back, and
missing numbers are counted. A fact is current only while its device is online and in the session that reported it;
otherwise it is marked as the last known one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgesplit.mqtt.telemetry import DeviceTime

Verdict = Literal["new", "out of order", "duplicate", "older session"]
State = Literal["online", "stale", "offline", "revoked", "claimed"]
MIN_PLAUSIBLE_TIME = 1_735_689_600.0
"""Unix time of 2025-01-01: a device clock that shows less was never set."""
MAX_AGE_S = 30 * 86_400.0
"""Oldest age in seconds that telemetry may claim; older telemetry is dated this old."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Sequence numbers and counters of a device's newest session."""

    session: int = 0
    sequence: int = -1
    """Number of the newest telemetry message; -1: none arrived."""
    report: int = 0
    """Number of the newest report."""
    missing: int = 0
    """Telemetry messages that were skipped and have not arrived since."""
    again: int = 0
    """Duplicate telemetry messages. (Reports are retained by the broker, so their duplicates are normal and not
    counted.)"""
    earlier: int = 0
    """Telemetry messages that arrived after newer ones."""
    older: int = 0
    """Messages of older sessions."""


def after_birth(previous: SequenceState, session: int) -> SequenceState:
    """The state after a birth message: a new session, or a repetition by the broker."""
    return SequenceState(session=session) if session > previous.session else previous


def after_telemetry(
    previous: SequenceState, session: int, sequence: int, is_stored: bool
) -> tuple[SequenceState, Verdict]:
    """The state after a telemetry message, and what the message is. `is_stored`: telemetry of that session with
    that number is in the database."""
    if session < previous.session:
        return replace(previous, older=previous.older + 1), "older session"
    if session > previous.session:  # telemetry overtook the birth message of its session
        previous = SequenceState(session=session)
    if is_stored or sequence == previous.sequence:
        return replace(previous, again=previous.again + 1), "duplicate"
    if sequence < previous.sequence:
        return replace(previous, earlier=previous.earlier + 1, missing=max(0, previous.missing - 1)), "out of order"
    return replace(previous, sequence=sequence, missing=previous.missing + sequence - previous.sequence - 1), "new"


def after_report(previous: SequenceState, session: int, number: int) -> tuple[SequenceState, Verdict]:
    """The state after a report, and what the report is. Agents before 0.2 send no number (0); their reports are taken
    in order of arrival."""
    if session < previous.session:
        return replace(previous, older=previous.older + 1), "older session"
    if session > previous.session:
        previous = SequenceState(session=session)
    if number and number == previous.report:
        return previous, "duplicate"
    if number < previous.report:
        return previous, "out of order"
    return replace(previous, report=number), "new"


def after_backlog(previous: SequenceState, session: int, sequence: int) -> SequenceState:
    """The state after backlog telemetry of any session that was not stored before."""
    if session != previous.session:
        return previous
    if sequence > previous.sequence:
        return replace(previous, sequence=sequence, missing=previous.missing + sequence - previous.sequence - 1)
    return replace(previous, missing=max(0, previous.missing - 1))


Dated = Literal["now", "age", "clock", "unsure"]
"""How the time of a message was determined: `now`: it arrived at once; `age`: from its age by the device's monotonic
clock; `clock`: by the device's wall clock, which may be wrong; `unsure`: neither is usable, so that it is dated as
early as it can have been sent."""


def measured_at(at_measurement: DeviceTime | None, at_sending: DeviceTime | None, now: float) -> tuple[float, Dated]:
    """When a measurement was made, by the controller's clock (Unix seconds), and how that is known.

    `at_measurement` has the device's clocks at the measurement, `at_sending` at a deferred sending (None if it was
    sent at once). The result is never in the future, and never more than `MAX_AGE_S` ago.
    """
    if at_measurement is None or at_sending is None:
        return now, "now"
    # Same boot: the monotonic clock gives the age exactly.
    age_s = at_sending.since_boot_s - at_measurement.since_boot_s
    if at_measurement.boot_id and at_measurement.boot_id == at_sending.boot_id and age_s >= 0:
        return now - min(age_s, MAX_AGE_S), "age"
    # Another boot: the measurement precedes the present boot, which bounds a wall clock that was set in between.
    booted = now - at_sending.since_boot_s
    if at_measurement.unix_s >= MIN_PLAUSIBLE_TIME and at_sending.unix_s >= MIN_PLAUSIBLE_TIME:
        at = now - (at_sending.unix_s - at_measurement.unix_s)  # a constant error of the device's clock cancels out
        if now - MAX_AGE_S <= at <= booted:
            return at, "clock"
    return max(now - MAX_AGE_S, min(booted, now)), "unsure"


def clock_off_s(moment: DeviceTime | None, now: float) -> float | None:
    """Seconds by which the device's clock is ahead of ours; None if the device does not report its clock."""
    return moment.unix_s - now if moment is not None and moment.unix_s else None


@dataclass(frozen=True, slots=True)
class Fact:
    """A birth, report or telemetry message of a device, with its age."""

    session: int
    at: float | None
    """Unix time of its arrival; None for one stored before times were."""
    current: bool
    """Whether it still describes the device, as far as is known."""


def fact(message: Mapping[str, Any] | None, at: float | None, *, state: State, session: int) -> Fact | None:
    """The fact in a stored birth, report or telemetry message; None if there is none."""
    if not message:
        return None
    session_of_fact = int(message.get("session", 0))
    return Fact(session_of_fact, at, state == "online" and session_of_fact == session)


DifferenceKind = Literal[
    "as desired", "on trial", "not published", "offline", "stale", "older session", "not applied", "fetching",
    "waiting", "staged", "refused", "failed", "rolled back", "safe mode", "not desired",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """One model on one device: its desired release, its reported release, and the reason for a difference."""

    model: str
    desired: str
    """Desired release; empty: none."""
    running: str
    """Release as last reported; empty: none, or never reported."""
    kind: DifferenceKind
    detail: str = ""
    """The reason in words."""


@dataclass(frozen=True, slots=True)
class DesiredVsReported:
    """What was published to a device, and what the device reported about it."""

    state: State
    session: int
    counter: int
    statement_releases: frozenset[tuple[str, str]]
    """Model and release of each entry in the retained statement."""
    reported_session: int = 0
    acted_upon: int = 0
    statement_problem: str = ""
    """Why the device refuses its statement, as it reported."""


def find_differences(
    desired: Mapping[str, str], models: Sequence[Mapping[str, Any]], device: DesiredVsReported
) -> tuple[Difference, ...]:
    """Desired against reported state, for each model that is in either. `desired`: release by model; `models`: as
    reported."""
    reported = {str(entry["model"]): entry for entry in models}
    names = sorted({*desired, *reported})
    return tuple(_difference(model, desired.get(model, ""), reported.get(model), device) for model in names)


def _difference(model: str, wanted: str, reported: Mapping[str, Any] | None, device: DesiredVsReported) -> Difference:
    runs = str(reported["release"]) if reported else ""
    reason, why = _reason(model, wanted, reported, device)
    return Difference(model, wanted, runs, reason, why)


def _reason(
    model: str, wanted: str, reported: Mapping[str, Any] | None, device: DesiredVsReported
) -> tuple[DifferenceKind, str]:
    if wanted and (model, wanted) not in device.statement_releases:
        return "not published", "no statement with this release is published yet"
    if (unreachable := _unreachable(device)) is not None:
        return unreachable
    if device.statement_problem and device.acted_upon < device.counter:
        return "refused", device.statement_problem
    if device.acted_upon < device.counter:
        return "not applied", f"it has applied statement {device.acted_upon}, and {device.counter} is published"
    if reported is None:
        return "not applied", "its report does not list this model"
    if not wanted:
        return "not desired", "it has not stopped this model yet"
    return _reported_reason(wanted, reported)


def _unreachable(device: DesiredVsReported) -> tuple[DifferenceKind, str] | None:
    if device.state == "stale":
        return "stale", "its session is open, and no message arrives from it"
    if device.state != "online":
        return "offline", "it receives the statement when it reconnects"
    if device.reported_session < device.session:
        return "older session", "it has not reported its releases since it connected"
    return None


_REASON_BY_STATE: Mapping[str, DifferenceKind] = {
    "trial": "on trial", "running": "as desired", "staged": "staged", "failed": "failed", "rolled back": "rolled back",
    "safe mode": "safe mode",
}  # fmt: skip


def _reported_reason(wanted: str, reported: Mapping[str, Any]) -> tuple[DifferenceKind, str]:
    state, detail = str(reported["state"]), str(reported.get("detail", ""))
    if reported["desired_release"] != wanted:
        return "not applied", "its report is about another release"
    if state == "fetching":
        return ("waiting", detail) if detail else ("fetching", "")
    return _REASON_BY_STATE.get(state, "failed"), detail
