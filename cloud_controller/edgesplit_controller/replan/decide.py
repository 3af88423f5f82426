"""Decides whether another plan table replaces the one in use (pure): compares the costs of both tables on what devices
measured, under the operator's confidence requirements.

The table is replaced where the median device saves more than the operator's threshold, or keeps a limit again that it
broke; where at most a quarter of the devices lose; and where this holds in the older half of the observations as well
as in the newer. So an outage of a minute, a device that lies, and a link that alternates between two states served by
one table change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.backoff import Backoff
from edgesplit_controller.replan.evidence import DeviceMeasurements, Observation, robust_median
from edgesplit_controller.replan.pricing import PricedTable, compare_costs, saved_ratio, split_in_time

LEAST_IMPROVEMENT = 0.2
"""A table that breaks a limit in this much smaller a part of the observations replaces the other one, whatever it
saves."""
LONGEST_WAIT_S = 7 * 86_400.0
"""Longest cool-down, and the period over which changes are counted for it."""
LEAST_OBSERVATIONS = 4
"""Telemetry windows that a device must have sent to be counted."""


class ConfidencePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Confidence that is required before a table is replaced."""

    least_devices: Annotated[int, Meta(ge=1, le=100_000)] = 3
    """Number of devices needed. With 1, the operator declares that a single device may be trusted."""
    least_gain: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Part of the objective (seconds, joules) that must be saved."""
    observe_s: Annotated[float, Meta(ge=1, le=14_400)] = 1_800.0
    """Seconds over which evidence must have been gathered. Single telemetry messages are stored for hours, not for
    days."""
    cool_down_s: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 21_600.0
    """Seconds after a change of the table in which it is not changed again; doubled for each further change within a
    week before it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing two tables."""

    moves: bool
    gain: float
    """Part saved by the median device."""
    gain_low: float
    """First quartile: a quarter of the devices save less."""
    gain_high: float
    """Third quartile of the part saved."""
    broken_before: float
    """Part of the observations in which the median device broke a limit of its plan, with the table in use."""
    broken_after: float
    """Part of the observations in which the median device would break a limit with the other table."""
    old_s: float
    """Seconds per request of the median device."""
    new_s: float
    """Seconds per request of the median device with the other table."""
    reason: str
    """Reason for or against the replacement, for people."""


def missing_evidence(devices: Sequence[DeviceMeasurements], doubt: ConfidencePolicy) -> str:
    """What evidence is missing for a decision, for people; empty if it suffices."""
    counted = [voice for voice in devices if len(voice.observations) >= LEAST_OBSERVATIONS]
    if len(counted) < doubt.least_devices:
        return f"{len(counted)} of {doubt.least_devices} devices have reported enough"
    span_s = sorted(voice.span_s for voice in counted)[-doubt.least_devices]
    if span_s < doubt.observe_s:
        return f"observed for {span_s:.0f} of {doubt.observe_s:.0f} s"
    return ""


def remaining_cool_down_s(changes: Sequence[float], now: float, doubt: ConfidencePolicy) -> float:
    """Remaining cool-down in seconds. `changes`: Unix times of earlier changes of the table, the newest last."""
    if not changes:
        return 0.0
    # Exponential back-off: the cool-down doubles with each earlier change within a week of the newest, so that a table
    # that oscillates between two states settles.
    recent_changes = sum(1 for at in changes[:-1] if changes[-1] - at < LONGEST_WAIT_S)
    cool_down_s = Backoff(doubt.cool_down_s, LONGEST_WAIT_S).pause_s(recent_changes)
    return max(0.0, changes[-1] + max(cool_down_s, doubt.cool_down_s) - now)


def compare_tables(
    devices: Sequence[DeviceMeasurements], old: PricedTable, new: PricedTable, fixed_s: float, doubt: ConfidencePolicy
) -> Verdict:
    """Compare two tables on the observations of these devices."""
    # All observations, and their older and newer half: a short disturbance improves only one half.
    whole = _compare([device.observations for device in devices], old, new, fixed_s)
    older, newer = (_compare(part, old, new, fixed_s) for part in split_in_time(devices))
    is_worthwhile = [part.saves_enough(doubt.least_gain) or part.repairs_limit for part in (whole, older, newer)]
    # At least three quarters of the devices must not lose, unless a broken limit is repaired.
    is_fair = whole.low >= 0.0 or whole.repairs_limit
    return Verdict(
        moves=all(is_worthwhile) and is_fair, gain=whole.gain, gain_low=whole.low, gain_high=whole.high,
        broken_before=whole.broken[0], broken_after=whole.broken[1], old_s=whole.seconds[0], new_s=whole.seconds[1],
        reason=_why(whole, is_worthwhile, is_fair, doubt),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Comparison:
    gain: float
    low: float
    high: float
    broken: tuple[float, float]
    seconds: tuple[float, float]

    def saves_enough(self, least: float) -> bool:
        return self.gain >= least and self.broken[1] <= self.broken[0] + 1e-9

    @property
    def repairs_limit(self) -> bool:
        return self.broken[0] - self.broken[1] >= LEAST_IMPROVEMENT


def _compare(
    per_device: Sequence[Sequence[Observation]], old: PricedTable, new: PricedTable, fixed_s: float
) -> _Comparison:
    bill_pairs = [compare_costs(old, new, moments, fixed_s) for moments in per_device if moments]
    gains = sorted(saved_ratio(*pair) for pair in bill_pairs) or [0.0]
    quarter = len(gains) // 4  # index of the first quartile
    return _Comparison(
        gain=robust_median(gains, 0.0),
        low=gains[quarter],
        high=gains[-1 - quarter],
        broken=(
            robust_median([old.broken_ratio for old, _ in bill_pairs], 0.0),
            robust_median([new.broken_ratio for _, new in bill_pairs], 1.0),
        ),
        seconds=(
            robust_median([old.seconds for old, _ in bill_pairs], 0.0),
            robust_median([new.seconds for _, new in bill_pairs], 0.0),
        ),
    )


def _why(whole: _Comparison, is_worthwhile: Sequence[bool], is_fair: bool, doubt: ConfidencePolicy) -> str:
    saves = f"saves {whole.gain:.0%} (half of the devices {whole.low:.0%} to {whole.high:.0%})"
    mends = f"breaks a limit in {whole.broken[1]:.0%} of the time instead of {whole.broken[0]:.0%}"
    if whole.repairs_limit and whole.gain < 0.0:
        mends += f", and costs {-whole.gain:.0%} more"
    effect = mends if whole.repairs_limit else saves
    if not is_worthwhile[0]:
        return f"the table in use fits the measurements: another one {saves}, asked are {doubt.least_gain:.0%}"
    if not all(is_worthwhile[1:]):
        return f"another table {effect}, but only for a part of the observed time"
    return f"another table {effect}" if is_fair else f"another table {saves}: it would be worse for too many devices"
