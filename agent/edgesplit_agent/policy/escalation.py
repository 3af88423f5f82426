"""Escalation: which rows a cascade has for a request, when its first variant's answer is sure, and how its threshold
tightens after an alarm.

Pure. See docs/decisions/0069-cascades.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from edgesplit import variant_choice
from edgesplit.cascade import MOST_SCORE, Cascade
from edgesplit.plan import Plan, Row

MOST_ALARMS = 4
"""Alarms after which no answer of the first variant is sure any more: a promise that breaks so often was of other
frames."""


@dataclass(frozen=True, slots=True)
class CascadeRows:
    """The rows of a cascade."""

    cascade: Cascade
    first: Row
    """The first variant's local row; of an early exit the slices up to it."""
    second: Plan
    """The plan with only the second variant's rows; it may have none here. Of an early exit all of them, which are gone
    on by behind it."""


def cascade_rows(plan: Plan, exit_slices: tuple[str, ...] = ()) -> CascadeRows | None:
    """The cascade by which requests are answered; None where the plan has none, its first variant has no row here, or
    the operator forces a row. `exit_slices`: of an early exit, the slices that compute it; every row has them."""
    cascade = plan.cascade
    if cascade is not None and cascade.exit_output:
        seconds = sum(plan.slice_s.get(name, 0.0) for name in exit_slices)
        return CascadeRows(cascade, Row(name=cascade.first, device=exit_slices, device_s=seconds), plan)
    if cascade is None or plan.forced_row:
        return None
    first = next((row for row in plan.rows if row.is_local and row.variant == cascade.first), None)
    if first is None:
        return None
    second = tuple(row for row in plan.rows if row.variant == cascade.second)
    return CascadeRows(cascade, first, msgspec.structs.replace(plan, rows=second))


def may_answer_first(rows: CascadeRows, least_accuracy: float) -> bool:
    """Whether the cascade is accurate enough for a request, sure and escalated answers together; else only variants
    above the floor are asked."""
    own = max(rows.first.accuracy or 0.0, rows.cascade.accuracy)
    return own >= variant_choice.floor_of(rows.second, least_accuracy)


def may_answer_unsure(rows: CascadeRows, least_accuracy: float) -> bool:
    """Whether an unsure answer of the first variant may be given: where that one alone is above the floor."""
    return (rows.first.accuracy or 0.0) >= variant_choice.floor_of(rows.second, least_accuracy)


def finite_score(score: float) -> float:
    """The score within what reports and telemetry can carry; the least one where it is not a number."""
    return -MOST_SCORE if math.isnan(score) else min(max(score, -MOST_SCORE), MOST_SCORE)


def is_sure(score: float, threshold: float) -> bool:
    """Whether an answer with this score is given. With a threshold of `MOST_SCORE` none is."""
    return threshold < MOST_SCORE and score >= threshold


def tightened(threshold: float, sure_scores: Collection[float], alarms: int) -> float:
    """The threshold after the `alarms`-th alarm: the median of the recent sure scores, so that half of what was sure is
    escalated. `MOST_SCORE` (everything is) after `MOST_ALARMS`, or where no recent score is above the present one.

    A quantile and not a step, because scores have any scale: probabilities crowd below 1, entropies below 0.
    """
    above = sorted(score for score in sure_scores if score > threshold)
    if alarms >= MOST_ALARMS or not above:
        return MOST_SCORE
    ranked = sorted(sure_scores)
    return max(ranked[len(ranked) // 2], above[0])
