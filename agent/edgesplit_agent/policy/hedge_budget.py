"""Hedging: when the device starts to finish a request that the offload target may still answer, and what that may cost.

There are two kinds of hedge. A forced one: waiting longer would miss the deadline; the local tail then runs whatever it
costs, because an answer matters more than energy. An optional one: the offload target takes longer than it should; its
cost is limited by a token bucket per model (`HedgeTokenBucket`). How long to wait is computed in `hedge_timing`. See
docs/decisions/0022-never-without-an-answer.md and 0025-deciding.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf

from edgesplit.oip.options import Hedge
from edgesplit.plan import Conditions, Plan, Row
from edgesplit_agent.policy.hedge_timing import DELIVERY_MARGIN_S, offload_timeout_s

BUCKET_REQUESTS = 100
"""Capacity of the token bucket, in requests: the credit of so many requests can be accumulated."""


@dataclass(frozen=True, slots=True)
class HedgeTokenBucket:
    """Token bucket of one model, in joules where the plan has power figures, else in processor seconds."""

    credit_ratio: float
    """Credit per request, relative to what answering it on the device alone would cost."""
    tokens: float = 0.0
    """Tokens in the bucket; negative while it is in debt."""
    capacity: float = 0.0
    """Capacity; 0 before the first request."""

    def credited(self, local_cost: float) -> HedgeTokenBucket:
        """The bucket after one more offloaded request, which would cost `local_cost` on the device alone."""
        # Credited by what the request would cost on the device, not by what it spent there: an all-remote row spends
        # nothing on the device and would never earn a hedge.
        capacity = self.credit_ratio * BUCKET_REQUESTS * local_cost
        tokens = self.tokens + self.credit_ratio * local_cost if self.capacity else capacity  # starts full
        return HedgeTokenBucket(self.credit_ratio, min(capacity, tokens), capacity)

    def allows(self, cost: float) -> bool:
        """Whether an optional hedge of this cost may start."""
        return self.credit_ratio > 0.0 and cost <= self.tokens

    def debited(self, cost: float) -> HedgeTokenBucket:
        """The bucket after a tail of this cost ran beside the offload, for either reason. Debt is kept, up to one
        capacity."""
        return HedgeTokenBucket(self.credit_ratio, max(-self.capacity, self.tokens - cost), self.capacity)


@dataclass(frozen=True, slots=True)
class HedgeSchedule:
    """When the local tail starts, in seconds from now."""

    optional_s: float
    """If the budget allows it; infinite if never."""
    forced_s: float
    """Whatever it costs, because the deadline would be missed otherwise."""


def hedge_schedule(
    mode: Hedge,
    left_s: float,
    tail_s: float,
    predicted_s: float,
    margin_s: float = DELIVERY_MARGIN_S,
    early_s: float | None = None,
) -> HedgeSchedule:
    """Start times of the local tail for hedge mode `mode`.

    - `left_s`: seconds until the deadline; `tail_s`: seconds to finish locally; `margin_s`: reserved for delivery.
    - `predicted_s`: predicted seconds of link and server.
    - `early_s`: the early hedge computed by `row_selection`, in seconds after sending; None if there is none.
    """
    # An infinite prediction leaves the deadline as the only bound on the wait.
    by_need = offload_timeout_s(left_s, tail_s, inf, margin_s)
    if mode == "always":  # the operator's choice overrides the budget
        return HedgeSchedule(0.0, by_need)
    if mode == "never":
        return HedgeSchedule(inf, by_need)
    return HedgeSchedule(offload_timeout_s(left_s, tail_s, predicted_s, margin_s, early_s), by_need)


def processor_cost(seconds: float, plan: Plan) -> float:
    """Cost of `seconds` of the device's processor: joules where the plan has power figures, else the seconds
    themselves."""
    watts = busy_watts(plan)
    return seconds if watts is None else seconds * watts


def busy_watts(plan: Plan) -> float | None:
    """Watts that the device's processor draws while it runs this model, by the plan's figures; None without such
    figures."""
    local = plan.local
    if local is not None and local.device_joules is not None and local.device_s > 0:
        return local.device_joules / local.device_s
    return plan.power.busy_watts if plan.power is not None and plan.power.busy_watts > 0 else None


def radio_joules(row: Row, conditions: Conditions, plan: Plan) -> float | None:
    """Joules to wake the radio and send the boundary tensors of `row`; None where the plan has no power figures."""
    power = plan.power
    if power is None:
        return None
    moving_s = row.up_bytes / max(conditions.link.up_bytes_per_s, 1e-9)
    return power.wake_joules + row.up_bytes * power.up_joules_per_byte + power.radio_watts * moving_s


def sending_cost(row: Row, conditions: Conditions, plan: Plan) -> float:
    """Cost of sending a request that the device would have answered alone: joules where the plan has power figures,
    else the processor seconds of encoding."""
    joules = radio_joules(row, conditions, plan)
    return row.encode_s if joules is None else joules + row.encode_s * (busy_watts(plan) or 0.0)


def max_sending_cost(plan: Plan, conditions: Conditions) -> float:
    """Largest `sending_cost` of all offloading rows of the plan; 0 where there is none."""
    return max((sending_cost(row, conditions, plan) for row in plan.rows if not row.is_local), default=0.0)


@dataclass
class HedgeCounts:
    """Counters of hedging since the start of the process; the field names are the labels shown to operators."""

    hedges: int = 0
    """Tails started while the offload target might still have answered."""
    by_choice: int = 0
    """Optional hedges among them, which the deadline did not yet demand."""
    held_back: int = 0
    """Optional hedges that were refused by the budget or because another request waited for the processor."""
    cloud_won: int = 0
    """Hedged races in which the offload target answered first."""
    device_won: int = 0
    """Hedged races in which the device answered first."""
    cancelled: int = 0
    """Losers that were stopped: an offload by closing its connection, a tail before its next slice."""
    wasted_s: float = 0.0
    """Seconds of the device's processor spent on tails that lost."""
    wasted_j: float = 0.0
    """Joules spent on losers, estimated by the plan's figures; 0 where it has none."""


class HedgeBudget:
    """Token buckets by model, and the hedging counters. Thread-safe."""

    def __init__(self, credit_ratio: Callable[[], float]) -> None:
        """`credit_ratio` returns the current credit per request, relative to what answering it on the device alone
        would cost."""
        self._credit_ratio = credit_ratio
        self._lock = threading.Lock()
        self._budgets: dict[str, HedgeTokenBucket] = {}
        self._counts = HedgeCounts()

    def credit(self, model: str, local_cost: float) -> None:
        """Credit one offloaded request of `model`, which would cost `local_cost` on the device alone."""
        with self._lock:
            budget = self._budgets.get(model, HedgeTokenBucket(0.0))
            self._budgets[model] = replace(budget, credit_ratio=self._credit_ratio()).credited(local_cost)

    def allows(self, model: str, cost: float) -> bool:
        """Whether an optional hedge of this cost may start; without a bucket yet, if the budget is not 0."""
        with self._lock:
            credit_ratio, budget = self._credit_ratio(), self._budgets.get(model)
            return replace(budget, credit_ratio=credit_ratio).allows(cost) if budget is not None else credit_ratio > 0.0

    def debit(self, model: str, cost: float) -> None:
        """Debit the cost of a tail that ran beside the offload."""
        with self._lock:
            if model in self._budgets:
                self._budgets[model] = self._budgets[model].debited(cost)

    def forget(self, model: str) -> None:
        """Drop the bucket of a model that is served no longer, or by another release."""
        with self._lock:
            self._budgets.pop(model, None)

    def count(self, **increments: float) -> None:
        """Add to the named fields of `HedgeCounts`."""
        with self._lock:
            for name, increment in increments.items():
                setattr(self._counts, name, getattr(self._counts, name) + increment)

    @property
    def counts(self) -> dict[str, float]:
        """A copy of the counters, by field name of `HedgeCounts`."""
        with self._lock:
            return asdict(self._counts)
