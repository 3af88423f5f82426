"""Hedging: when the device begins to finish a request that the cloud may still answer, and what that may cost.

Two reasons to begin. The deadline: waiting on would miss it; then the tail runs, whatever it costs, because an answer
goes before energy. Patience: the cloud takes longer than it deserves; that is a choice, and `Budget` bounds it. The
patience itself is `patience`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf

from edgesplit.oip.options import Hedge
from edgesplit.plan import Conditions, Plan, Row
from edgesplit_agent.policy.hedge_timing import MARGIN_S, patience_s

WINDOW = 100
"""Requests over which that is held: so much may be saved up."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A token bucket, in joules where the plan tells them and in seconds of the processor where not."""

    part: float
    held: float = 0.0
    most: float = 0.0

    def asked(self, alone: float) -> Budget:
        """After one more request that would cost `alone` if the device answered it by itself."""
        most = self.part * WINDOW * alone
        held = self.held + self.part * alone if self.most else most  # full to begin with
        return replace(self, held=min(most, held), most=most)

    def allows(self, cost: float) -> bool:
        """Whether an early hedge may be begun."""
        return self.part > 0.0 and cost <= self.held

    def spent(self, cost: float) -> Budget:
        """After a tail that ran beside the cloud, for whatever reason; debts are kept, up to a window's."""
        return replace(self, held=max(-self.most, self.held - cost))


@dataclass(frozen=True, slots=True)
class Moments:
    """When the tail begins, in seconds from now: if it may, and whatever it costs."""

    by_choice: float
    by_need: float


def moments(
    mode: Hedge,
    left_s: float,
    tail_s: float,
    predicted_s: float,
    margin_s: float = MARGIN_S,
    early_s: float | None = None,
) -> Moments:
    """`left_s` until the deadline, `tail_s` to finish here, `predicted_s` of link and cloud. `early_s`: `choosing`'s
    haste."""
    by_need = patience_s(left_s, tail_s, inf, margin_s)
    if mode == "always":  # the operator's word goes before the budget
        return Moments(0.0, by_need)
    if mode == "never":
        return Moments(inf, by_need)
    return Moments(patience_s(left_s, tail_s, predicted_s, margin_s, early_s), by_need)


def cost_of(seconds: float, plan: Plan) -> float:
    """What so many seconds of the device's processor cost: joules where the plan tells them, else those seconds."""
    watts = watts_of(plan)
    return seconds if watts is None else seconds * watts


def watts_of(plan: Plan) -> float | None:
    """What the device's processor draws while it runs this model, as the plan estimates; None where it does not."""
    local = plan.local
    if local is not None and local.device_joules is not None and local.device_s > 0:
        return local.device_joules / local.device_s
    return plan.power.busy_watts if plan.power is not None and plan.power.busy_watts > 0 else None


def radio_joules(row: Row, now: Conditions, plan: Plan) -> float | None:
    """What it costs to send a row's boundary and wake the radio for it; None where the plan does not tell."""
    power = plan.power
    if power is None:
        return None
    moving_s = row.up_bytes / max(now.link.up_bytes_per_s, 1e-9)
    return power.wake_joules + row.up_bytes * power.up_joules_per_byte + power.radio_watts * moving_s


def race_costs(row: Row, now: Conditions, plan: Plan) -> float:
    """What it costs to send what the device answers alone: joules where the plan tells them, else the processor's
    seconds."""
    joules = radio_joules(row, now, plan)
    return row.encode_s if joules is None else joules + row.encode_s * (watts_of(plan) or 0.0)


def sending_costs(plan: Plan, now: Conditions) -> float:
    """The same of the row that costs most."""
    return max((race_costs(row, now, plan) for row in plan.rows if not row.is_local), default=0.0)


@dataclass
class Counts:
    """What hedging did since the start."""

    hedges: int = 0
    """Tails begun while the cloud might still have answered."""
    by_choice: int = 0
    """Of these, those that the deadline did not yet demand."""
    held_back: int = 0
    """Early ones that the budget, or a queue at the processor, did not allow."""
    cloud_won: int = 0
    device_won: int = 0
    cancelled: int = 0
    """Losers that were stopped: the cloud's by closing the connection, the device's before its next slice."""
    wasted_s: float = 0.0
    """Of the device's processor, on tails that lost."""
    wasted_j: float = 0.0
    """Estimated by the plan's figures; 0 where it has none."""


class Ledger:
    """Budgets by model, and the counts. Thread-safe."""

    def __init__(self, part: Callable[[], float]) -> None:
        """`part`: what early hedges may cost just now, as a part of answering everything alone."""
        self._part = part
        self._lock = threading.Lock()
        self._budgets: dict[str, Budget] = {}
        self._counts = Counts()

    def asked(self, model: str, alone: float) -> None:
        """A request of `model` goes to the cloud; alone it would cost so much."""
        with self._lock:
            budget = replace(self._budgets.get(model, Budget(0.0)), part=self._part())
            self._budgets[model] = budget.asked(alone)

    def allows(self, model: str, cost: float) -> bool:
        """Whether an early hedge may be begun."""
        with self._lock:
            part = self._part()
            return replace(self._budgets[model], part=part).allows(cost) if model in self._budgets else part > 0.0

    def spent(self, model: str, cost: float) -> None:
        """A tail beside the cloud took so much."""
        with self._lock:
            if model in self._budgets:
                self._budgets[model] = self._budgets[model].spent(cost)

    def forget(self, model: str) -> None:
        """It is served no more, or by another release."""
        with self._lock:
            self._budgets.pop(model, None)

    def count(self, **more: float) -> None:
        """Add to the counts named."""
        with self._lock:
            for name, by in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + by)

    @property
    def counts(self) -> dict[str, float]:
        """For people and gauges."""
        with self._lock:
            return asdict(self._counts)
