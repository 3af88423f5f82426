"""What may be believed of a device: the order of its messages, the age of its facts, why it is not as it should be.

All pure. A session has a number that grows with each connection; in it telemetry and reports are numbered. What is of
an older session is ignored, what comes twice counts once, what comes out of order does not go back in time, and what is
missing is counted. A fact is current only while its device is online and in the session that said it: what a dead
device said last is told as that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgesplit.mqtt.telemetry import Moment

Verdict = Literal["new", "earlier", "again", "older session"]
State = Literal["online", "stale", "offline", "revoked", "claimed"]
PLAUSIBLE = 1_735_689_600.0
"""Unix seconds of 2025-01-01: a clock that shows less was never set."""
OLDEST_S = 30 * 86_400.0
"""Telemetry that says it is older is dated so old."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What was heard in a device's newest session."""

    session: int = 0
    sequence: int = -1
    """Of the newest telemetry; -1: none came."""
    report: int = 0
    """Number of the newest report."""
    missing: int = 0
    """Telemetry that was skipped, and has not come since."""
    again: int = 0
    """Telemetry that came twice. (Reports do, by the broker's nature.)"""
    earlier: int = 0
    """Telemetry that came after what was measured later."""
    older: int = 0
    """Messages of older sessions."""


def after_birth(known: Heard, session: int) -> Heard:
    """A session begins, or is repeated by the broker."""
    return Heard(session=session) if session > known.session else known


def after_telemetry(known: Heard, session: int, sequence: int, stored: bool) -> tuple[Heard, Verdict]:
    """Telemetry came. `stored`: that number of that session is here already."""
    if session < known.session:
        return replace(known, older=known.older + 1), "older session"
    if session > known.session:  # its birth is still on its way
        known = Heard(session=session)
    if stored or sequence == known.sequence:
        return replace(known, again=known.again + 1), "again"
    if sequence < known.sequence:
        return replace(known, earlier=known.earlier + 1, missing=max(0, known.missing - 1)), "earlier"
    return replace(known, sequence=sequence, missing=known.missing + sequence - known.sequence - 1), "new"


def after_report(known: Heard, session: int, number: int) -> tuple[Heard, Verdict]:
    """A report came; agents before 0.2 number none, and theirs are taken as they come."""
    if session < known.session:
        return replace(known, older=known.older + 1), "older session"
    if session > known.session:
        known = Heard(session=session)
    if number and number == known.report:
        return known, "again"
    if number < known.report:
        return known, "earlier"
    return replace(known, report=number), "new"


def after_late(known: Heard, session: int, sequence: int) -> Heard:
    """Telemetry of any session came late, and was not here."""
    if session != known.session:
        return known
    if sequence > known.sequence:
        return replace(known, sequence=sequence, missing=known.missing + sequence - known.sequence - 1)
    return replace(known, missing=max(0, known.missing - 1))


Dated = Literal["now", "age", "clock", "unsure"]
"""How a message's time is known: it came at once; by the device's clock that is never set; by the one that may be
wrong; by neither, so that it is dated as early as it can have been sent."""


def measured_at(then: Moment | None, sent: Moment | None, now: float) -> tuple[float, Dated]:
    """When something was measured, by the controller's clock. `sent`: by the device's clocks when it was sent, if it
    was sent late. Never in the future, and never longer ago than `OLDEST_S`."""
    if then is None or sent is None:
        return now, "now"
    if then.boot and then.boot == sent.boot and then.up_s <= sent.up_s:
        return max(now - OLDEST_S, now - (sent.up_s - then.up_s)), "age"
    booted = now - sent.up_s
    if then.at >= PLAUSIBLE and sent.at >= PLAUSIBLE:
        at = now - (sent.at - then.at)  # whatever the clock is wrong by, if it was wrong by the same then
        if now - OLDEST_S <= at <= booted:
            return at, "clock"
    return max(now - OLDEST_S, min(booted, now)), "unsure"


def clock_off_s(moment: Moment | None, now: float) -> float | None:
    """How far the device's clock is ahead of ours; None where it does not tell."""
    return moment.at - now if moment is not None and moment.at else None


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a device said, as old as it is."""

    session: int
    at: float | None
    """When it came; None: before ages were kept."""
    current: bool
    """It is what the device would say now, as far as anybody can know."""


def fact(said: Mapping[str, Any] | None, at: float | None, *, state: State, session: int) -> Fact | None:
    """A birth, a report or telemetry that was kept; None where there is none."""
    if not said:
        return None
    of = int(said.get("session", 0))
    return Fact(of, at, state == "online" and of == session)


Reason = Literal[
    "as wanted", "on trial", "not told", "not here", "silent", "older session", "has not heard", "fetching", "waiting",
    "staged", "refused", "failed", "rolled back", "safe mode", "unwanted",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """One model on one device: what it shall run, what it said that it runs, and why that is not the same."""

    model: str
    wanted: str
    """Empty: nothing is wanted."""
    runs: str
    """As it said last; empty: nothing, or it never said."""
    reason: Reason
    why: str = ""
    """For people."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the director says to a device, and where the device stands."""

    state: State
    session: int
    counter: int
    told: frozenset[tuple[str, str]]
    """Model and release of the statement that is retained for it."""
    reported_session: int = 0
    acted_upon: int = 0
    trouble: str = ""
    """Why it says that it does not obey."""


def differences(
    desired: Mapping[str, str], models: Sequence[Mapping[str, Any]], device: Told
) -> tuple[Difference, ...]:
    """Each model that is wanted there or that it says it runs. `desired`: release by model; `models`: as reported."""
    said = {str(one["model"]): one for one in models}
    return tuple(_difference(model, desired.get(model, ""), said.get(model), device) for model in _names(desired, said))


def _names(desired: Mapping[str, str], said: Mapping[str, Any]) -> list[str]:
    return sorted({*desired, *said})


def _difference(model: str, wanted: str, said: Mapping[str, Any] | None, device: Told) -> Difference:
    runs = str(said["release"]) if said else ""
    reason, why = _reason(model, wanted, said, device)
    return Difference(model, wanted, runs, reason, why)


def _reason(model: str, wanted: str, said: Mapping[str, Any] | None, device: Told) -> tuple[Reason, str]:
    if wanted and (model, wanted) not in device.told:
        return "not told", "no statement names it yet"
    if (unreachable := _unreachable(device)) is not None:
        return unreachable
    if device.trouble and device.acted_upon < device.counter:
        return "refused", device.trouble
    if device.acted_upon < device.counter:
        return "has not heard", f"it acts upon statement {device.acted_upon}, and {device.counter} was said"
    if said is None:
        return "has not heard", "it does not speak of this model"
    if not wanted:
        return "unwanted", "it has not stopped it yet"
    return _by_its_word(wanted, said)


def _unreachable(device: Told) -> tuple[Reason, str] | None:
    if device.state == "stale":
        return "silent", "its session is there, and nothing comes from it"
    if device.state != "online":
        return "not here", "it hears of it when it comes back"
    if device.reported_session < device.session:
        return "older session", "it has not said what it runs since it connected"
    return None


_BY_STATE: Mapping[str, Reason] = {
    "trial": "on trial", "running": "as wanted", "staged": "staged", "failed": "failed", "rolled back": "rolled back",
    "safe mode": "safe mode",
}  # fmt: skip


def _by_its_word(wanted: str, said: Mapping[str, Any]) -> tuple[Reason, str]:
    state, detail = str(said["state"]), str(said.get("detail", ""))
    if said["wanted"] != wanted:
        return "has not heard", "it speaks of another release"
    if state == "fetching":
        return ("waiting", detail) if detail else ("fetching", "")
    return _BY_STATE.get(state, "failed"), detail
