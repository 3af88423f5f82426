"""Which variants of a family may answer the next request, before `row_selection` compares rows by cost. Pure.

With objective accuracy, by expectation: a row that offloads answers with its variant's accuracy if it is in time, else
the device finishes with its own. The rows of the largest expected accuracy stay. With any other objective the rows stay
that are predicted to be in time. See docs/decisions/0068-families.md.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from edgesplit import variant_choice
from edgesplit.plan import Conditions, Plan, Row, latency_s
from edgesplit_agent.policy.hedge_timing import DELIVERY_MARGIN_S, latest_tail_start_s

DEADLINE_RATIO = 0.8
"""A row meets the deadline if its predicted latency is at most this ratio of it."""
HELD_DEADLINE_RATIO = 0.9
"""The row in use meets it up to this ratio, so that two variants do not alternate."""
LOCAL_DEADLINE_RATIO = 0.95
"""With objective accuracy a row that runs here alone meets it up to this ratio: its seconds are known better."""
EQUAL_ACCURACY = 0.002
"""Expected accuracies that differ by no more than this count as equal: cost decides."""
HELD_ACCURACY = 0.01
"""The row in use stays among them while its expected accuracy is within this of the best."""
REQUIRED_PROBABILITY = 0.98
"""Probability with which a row must be in time where the device cannot finish in time after it."""

ProbabilityBy = Callable[[Row, float], float]
"""Probability that a row which offloads has answered so many seconds after the request began."""


def variants_allowed(
    plan: Plan,
    conditions: Conditions,
    deadline_s: float,
    least_accuracy: float,
    probability_by: ProbabilityBy,
    held: str = "",
) -> Plan:
    """A family's plan with only the rows that a request allows; a plan of one model as it is.

    No row below the floor is among them, so that none may be left. `held` is the name of the row in use.
    """
    if not variant_choice.is_family(plan):
        return plan
    accurate = variant_choice.above_floor(plan, least_accuracy)
    if plan.objective == variant_choice.ACCURACY:
        allowed_s = variant_choice.time_allowed_s(plan, deadline_s)
        usable = [row for row in accurate.rows if row.is_local or conditions.remote_usable]
        expected = {
            row.name: _expected_accuracy(row, accurate, conditions, allowed_s, probability_by) for row in usable
        }
        most = max(expected.values(), default=-1.0)
        least = {row.name: most - (HELD_ACCURACY if row.name == held else EQUAL_ACCURACY) for row in usable}
        if most >= 0.0:
            best = tuple(row for row in usable if expected[row.name] >= max(0.0, least[row.name]))
            return msgspec.structs.replace(accurate, rows=best)
    return variant_choice.for_deadline(
        accurate, conditions, deadline_s, ratio=DEADLINE_RATIO, held=held, held_ratio=HELD_DEADLINE_RATIO
    )


def _expected_accuracy(
    row: Row, plan: Plan, conditions: Conditions, allowed_s: float, probability_by: ProbabilityBy
) -> float:
    """Mean accuracy of the answers to requests that begin with this row; negative where they would be late.

    A request that is sent away is answered by the row's variant if that is there in time, for the device's own answer
    waits for it; else by the variant with which the device finishes.
    """
    accuracy = row.accuracy or 0.0
    if row.is_local:
        return accuracy if latency_s(row, conditions) <= LOCAL_DEADLINE_RATIO * allowed_s else -1.0
    sent_s = (row.device_s + row.encode_s) * conditions.device_slowdown
    finish = finish_of(plan, row, conditions, allowed_s)
    if finish is not None:
        tail_s = variant_choice.finish_s(row, finish) * conditions.device_slowdown
        if latest_tail_start_s(allowed_s - sent_s, tail_s) >= 0.0:
            in_time = probability_by(row, allowed_s - DELIVERY_MARGIN_S / 2)
            return in_time * accuracy + (1.0 - in_time) * (finish.accuracy or 0.0)
    return accuracy if probability_by(row, allowed_s) >= REQUIRED_PROBABILITY else -1.0


def finish_of(
    plan: Plan, row: Row, conditions: Conditions, allowed_s: float, least_accuracy: float = 0.0
) -> Row | None:
    """The local row by which the device finishes what it sent away by `row`, if the target should answer as predicted
    or later: the most accurate that is then still in time, else the fastest."""
    left_s = latest_tail_start_s(allowed_s, 0.0) - latency_s(row, conditions)
    return variant_choice.local_finish(plan, row, conditions, left_s, least_accuracy)
