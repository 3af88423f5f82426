"""Which variants of a family may answer a request: its floor of accuracy, its deadline, and who finishes alone.

Pure arithmetic over a plan's rows, done before a row is chosen by cost (`edgesplit.plan.choose_row`); a plan without
variants stays as it is. See docs/decisions/0068-families.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from edgesplit.plan import Conditions, Plan, Row, latency_s

ACCURACY = "accuracy"
"""A family's objective: the most accurate variant that meets the deadline; of its rows that of least latency."""


def is_family(plan: Plan) -> bool:
    """Whether the plan's rows belong to variants: all do, or none."""
    return bool(plan.rows) and bool(plan.rows[0].variant)


def best_accuracy(plan: Plan) -> Row | None:
    """A row of the most accurate variant; None where no row states an accuracy."""
    return max((row for row in plan.rows if row.accuracy is not None), key=_accuracy, default=None)


def floor_of(plan: Plan, least_accuracy: float = 0.0) -> float:
    """The least accuracy of an answer: the plan's, or the request's where that is higher."""
    return max(plan.least_accuracy, least_accuracy)


def above_floor(plan: Plan, least_accuracy: float = 0.0) -> Plan:
    """The plan with only the rows that are accurate enough for a request; it may have none left."""
    floor = floor_of(plan, least_accuracy)
    if floor <= 0.0 or not is_family(plan):
        return plan
    return _with_rows(plan, (row for row in plan.rows if _accuracy(row) >= floor))


def time_allowed_s(plan: Plan, deadline_s: float) -> float:
    """Seconds that an answer may take: the request's deadline, or the plan's where that is shorter."""
    return min(deadline_s, plan.deadline_s or math.inf)


def for_deadline(
    plan: Plan,
    now: Conditions,
    deadline_s: float = math.inf,
    *,
    ratio: float = 1.0,
    held: str = "",
    held_ratio: float = 1.0,
) -> Plan:
    """The plan with only the rows that are predicted to take at most `ratio` of the time allowed; with objective
    accuracy, of them only those of the most accurate variants.

    Where no usable row is in time all rows stay, ordered by latency alone, as the fastest comes nearest. For the row
    called `held` it is `held_ratio`, which is larger where two variants shall not alternate.
    """
    if not is_family(plan):
        return plan
    usable = [row for row in plan.rows if row.is_local or now.remote_usable]
    within_s = time_allowed_s(plan, deadline_s)
    in_time = [row for row in usable if latency_s(row, now) <= within_s * (held_ratio if row.name == held else ratio)]
    if not in_time:
        return msgspec.structs.replace(plan, weights={}) if usable else plan
    if plan.objective == ACCURACY:
        most = max(map(_accuracy, in_time))
        in_time = [row for row in in_time if _accuracy(row) == most]
    return _with_rows(plan, in_time)


def finish_s(row: Row, local: Row) -> float:
    """Planned seconds of the device to finish by `local` a request of which it ran `row`'s part: another variant begins
    from the input."""
    return local.device_s - row.device_s if local.variant == row.variant else local.device_s


def is_less_accurate(finish: Row | None, row: Row) -> bool:
    """Whether an answer by the local row `finish` is less accurate than one by `row`; False outside of a family."""
    return finish is not None and _accuracy(finish) < _accuracy(row)


def local_finish(plan: Plan, row: Row, now: Conditions, left_s: float, least_accuracy: float = 0.0) -> Row | None:
    """The local row by which the device finishes a request that it sent away by `row`, with `left_s` seconds left then:
    the most accurate one above the floor that is in time, else the fastest. None where there is none."""
    local_rows = [candidate for candidate in above_floor(plan, least_accuracy).rows if candidate.is_local]
    if not is_family(plan) or len(local_rows) < 2:
        return local_rows[0] if local_rows else None
    seconds = {candidate.name: finish_s(row, candidate) * now.device_slowdown for candidate in local_rows}
    in_time = [candidate for candidate in local_rows if seconds[candidate.name] <= left_s]
    if not in_time:
        return min(local_rows, key=lambda candidate: seconds[candidate.name])
    return max(in_time, key=lambda candidate: (_accuracy(candidate), -seconds[candidate.name]))


def _accuracy(row: Row) -> float:
    return row.accuracy or 0.0


def _with_rows(plan: Plan, rows: Iterable[Row]) -> Plan:
    kept = tuple(rows)
    return plan if len(kept) == len(plan.rows) else msgspec.structs.replace(plan, rows=kept)
