"""When a cascade's first variant answers, and how its threshold tightens."""

from __future__ import annotations

import math

import msgspec
import pytest

from edgesplit.cascade import MOST_SCORE, Cascade, ChangedShare
from edgesplit.plan import Link, Plan, Row
from edgesplit_agent.policy.audit_budget import AuditBudget, AuditLimits
from edgesplit_agent.policy.escalation import (
    MOST_ALARMS,
    cascade_rows,
    finite_score,
    is_sure,
    may_answer_first,
    may_answer_unsure,
    tightened,
)

SMALL = Row(name="small:local", device=("s",), variant="small", accuracy=0.6)
MIDDLE = Row(name="middle:local", device=("m",), variant="middle", accuracy=0.8)
LARGE = Row(name="large:remote", remote=("l",), variant="large", accuracy=0.9)
LARGE_HERE = Row(name="large:local", device=("l",), variant="large", accuracy=0.9)
CASCADE = Cascade(
    first="small", second="large", answer="class", score="margin", threshold=0.5,
    changed=ChangedShare(at_most=0.02, certainty=0.9, samples=300, differing=1), escalated=0.4,
)  # fmt: skip
PLAN = Plan(
    model="birds@1", device_class="pi4", rows=(LARGE, MIDDLE, SMALL, LARGE_HERE), cascade=CASCADE,
    link=Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01),
)  # fmt: skip


def test_the_first_answers_here_and_the_second_by_any_of_its_rows() -> None:
    """A third variant has no part in it."""
    rows = cascade_rows(PLAN)
    assert rows is not None and rows.first is SMALL and rows.second.rows == (LARGE, LARGE_HERE)


@pytest.mark.parametrize(
    "changes", [{"cascade": None}, {"forced_row": "large:remote"}, {"rows": (LARGE, MIDDLE, LARGE_HERE)}]
)
def test_without_a_cascade_a_first_row_or_with_a_forced_one_rows_are_selected_as_ever(
    changes: dict[str, object],
) -> None:
    """A row that the operator forces answers everything."""
    assert cascade_rows(msgspec.structs.replace(PLAN, **changes)) is None


@pytest.mark.parametrize(
    ("floor", "planned", "may"), [(0.0, 0.0, True), (0.6, 0.0, True), (0.61, 0.0, False), (0.0, 0.7, False)]
)
def test_a_floor_above_the_first_variant_skips_it(floor: float, planned: float, may: bool) -> None:
    """The request's floor, or the plan's."""
    rows = cascade_rows(msgspec.structs.replace(PLAN, least_accuracy=planned))
    assert rows is not None and may_answer_first(rows, floor) is may


@pytest.mark.parametrize(("floor", "first", "unsure"), [(0.6, True, True), (0.85, True, False), (0.86, False, False)])
def test_the_cascades_own_accuracy_keeps_a_floor(floor: float, first: bool, unsure: bool) -> None:
    """60 % alone, 85 % with what is escalated: between both the first one answers where it is sure, and no
    unsure answer of it is given."""
    whole = msgspec.structs.replace(CASCADE, accuracy=0.85)
    rows = cascade_rows(msgspec.structs.replace(PLAN, cascade=whole, least_accuracy=floor))
    assert rows is not None
    assert (may_answer_first(rows, 0.0), may_answer_unsure(rows, 0.0)) == (first, unsure)
    assert (may_answer_first(rows, floor), may_answer_unsure(rows, floor)) == (first, unsure)


def test_scores_are_finite_and_what_is_no_number_is_never_sure() -> None:
    """They travel in JSON; a threshold of MOST_SCORE accepts none, not even an infinite one."""
    assert [finite_score(score) for score in (math.inf, -math.inf, math.nan, -0.3)] == [
        MOST_SCORE, -MOST_SCORE, -MOST_SCORE, -0.3,
    ]  # fmt: skip
    assert is_sure(0.5, 0.5) and not is_sure(0.499, 0.5)
    assert not is_sure(finite_score(math.nan), -1e14) and not is_sure(finite_score(math.inf), MOST_SCORE)


def test_an_alarm_halves_what_is_sure() -> None:
    """By the median of the recent scores, whatever their scale; ties are passed."""
    scores = [-0.9, -0.8, -0.5, -0.2, -0.1]
    assert tightened(-1.0, scores, alarms=1) == -0.5
    assert tightened(0.9, [0.9, 0.9, 0.9, 0.95, 1.0], alarms=1) == 0.95


@pytest.mark.parametrize(("scores", "alarms"), [([], 1), ([1.0, 1.0], 1), ([0.95] * 100, MOST_ALARMS)])
def test_where_nothing_tighter_is_known_everything_is_escalated(scores: list[float], alarms: int) -> None:
    """No recent score lies above the threshold, or the promise has broken too often."""
    threshold = 1.0 if scores and scores[0] == 1.0 else 0.9
    assert tightened(threshold, scores, alarms) == MOST_SCORE


def test_audits_are_bounded_in_number_and_bytes() -> None:
    """An average over minutes: what was not used is kept for one minute, and one large audit is paid for later."""
    budget = AuditBudget.full(AuditLimits(per_minute=2, bytes_per_minute=1000), 100.0)
    for _ in range(2):
        assert budget.allows_one
        budget = budget.debited(100)
    assert not budget.allows_one
    assert not budget.credited(129.0).allows_one and budget.credited(131.0).allows_one
    assert budget.credited(1e9).audits == 2
    large = budget.credited(1e9).debited(5000)
    assert not large.credited(1e9 + 60).allows_one and large.credited(1e9 + 300).allows_one


def test_no_audits_means_none() -> None:
    """However long one waits; less than one a minute means one at a time."""
    assert not AuditBudget.full(AuditLimits(per_minute=0), 0.0).credited(1e9).allows_one
    rare = AuditBudget.full(AuditLimits(per_minute=0.1), 0.0)
    assert rare.allows_one and not rare.debited(1).credited(300.0).allows_one
    assert rare.debited(1).credited(601.0).allows_one
