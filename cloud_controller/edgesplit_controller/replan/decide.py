"""Shall another table go out? Pure: the two tables' bills, and how sure the operator wants to be, in; the answer out.

A table moves where most devices pay less by more than the operator's threshold, or keep a limit again that they broke;
where few lose by it; and where that holds in the older half of what was seen as well as in the newer one. An outage of
a minute, a device that lies, and a link that swings between two states that one table serves move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit_controller.replan.evidence import Moment, Voice, middle
from edgesplit_controller.replan.pricing import Table, bills, halves, saving

BREAKS_LESS = 0.2
"""A table that breaks a limit in so much smaller a part of the moments is worth a move whatever it saves."""
LONGEST_WAIT_S = 7 * 86_400.0
LEAST_MOMENTS = 4
"""Windows that a device must have sent to have a voice."""


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """How sure the controller must be before it moves anything."""

    least_devices: Annotated[int, Meta(ge=1, le=100_000)] = 3
    """Voices that are needed; fewer, and it waits. One is the operator's word that a single device may be believed."""
    least_gain: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """The part of what the plan wants least (seconds, joules) that must be saved."""
    observe_s: Annotated[float, Meta(ge=1, le=14_400)] = 1_800.0
    """So long evidence must have been gathered; single messages are kept for hours, not for days."""
    cool_down_s: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 21_600.0
    """After a change of the table nothing moves for so long; for each other change within a week before it, twice as
    long."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comes of a comparison."""

    moves: bool
    gain: float
    """Of the device in the middle."""
    gain_low: float
    """A quarter of the devices gain less, and three quarters more."""
    gain_high: float
    broken_before: float
    """Of the device in the middle: the part of moments in which it broke a limit of its plan."""
    broken_after: float
    old_s: float
    """Seconds per request of the device in the middle."""
    new_s: float
    why: str
    """For people: why it moves, or why not."""


def lacking(voices: Sequence[Voice], doubt: Doubt) -> str:
    """What is missing until anything can be said; empty where nothing is."""
    heard = [one for one in voices if len(one.moments) >= LEAST_MOMENTS]
    if len(heard) < doubt.least_devices:
        return f"{len(heard)} of {doubt.least_devices} devices have told enough"
    span_s = sorted(one.span_s for one in heard)[-doubt.least_devices]
    if span_s < doubt.observe_s:
        return f"watched for {span_s:.0f} of {doubt.observe_s:.0f} s"
    return ""


def wait_s(changes: Sequence[float], now: float, doubt: Doubt) -> float:
    """How long nothing may move yet. `changes`: when the table was changed, the newest last."""
    if not changes:
        return 0.0
    lately = sum(1 for at in changes[:-1] if changes[-1] - at < LONGEST_WAIT_S)
    rest_s = min(LONGEST_WAIT_S, doubt.cool_down_s * 2.0 ** min(lately, 20))
    return max(0.0, changes[-1] + max(rest_s, doubt.cool_down_s) - now)


def judge(voices: Sequence[Voice], old: Table, new: Table, fixed_s: float, doubt: Doubt) -> Verdict:
    """Compare two tables by what these devices met."""
    whole = _compare([one.moments for one in voices], old, new, fixed_s)
    older, newer = (_compare(part, old, new, fixed_s) for part in halves(voices))
    worth = [one.saves(doubt.least_gain) or one.mends for one in (whole, older, newer)]
    fair = whole.low >= 0.0 or whole.mends
    return Verdict(
        moves=all(worth) and fair,
        gain=whole.gain,
        gain_low=whole.low,
        gain_high=whole.high,
        broken_before=whole.broken[0],
        broken_after=whole.broken[1],
        old_s=whole.seconds[0],
        new_s=whole.seconds[1],
        why=_why(whole, worth, fair, doubt),
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    gain: float
    low: float
    high: float
    broken: tuple[float, float]
    seconds: tuple[float, float]

    def saves(self, least: float) -> bool:
        return self.gain >= least and self.broken[1] <= self.broken[0] + 1e-9

    @property
    def mends(self) -> bool:
        return self.broken[0] - self.broken[1] >= BREAKS_LESS


def _compare(each: Sequence[Sequence[Moment]], old: Table, new: Table, fixed_s: float) -> _Compared:
    paid = [bills(old, new, moments, fixed_s) for moments in each if moments]
    gains = sorted(saving(*pair) for pair in paid) or [0.0]
    quarter = len(gains) // 4
    return _Compared(
        gain=middle(gains, 0.0),
        low=gains[quarter],
        high=gains[-1 - quarter],
        broken=(middle([old.broken for old, _ in paid], 0.0), middle([new.broken for _, new in paid], 1.0)),
        seconds=(middle([old.seconds for old, _ in paid], 0.0), middle([new.seconds for _, new in paid], 0.0)),
    )


def _why(whole: _Compared, worth: Sequence[bool], fair: bool, doubt: Doubt) -> str:
    saves = f"saves {whole.gain:.0%} (half of the devices {whole.low:.0%} to {whole.high:.0%})"
    mends = f"breaks a limit in {whole.broken[1]:.0%} of the time instead of {whole.broken[0]:.0%}"
    if whole.mends and whole.gain < 0.0:
        mends += f", and costs {-whole.gain:.0%} more"
    told = mends if whole.mends else saves
    if not worth[0]:
        return f"the table in use serves what was measured: another one {saves}, asked are {doubt.least_gain:.0%}"
    if not all(worth[1:]):
        return f"another table {told}, but only for a part of the time that was watched"
    return f"another table {told}" if fair else f"another table {saves}: too many devices would lose"
