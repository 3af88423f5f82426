"""Power budget over a sliding interval: energy that was allowed and not drawn is saved, energy drawn beyond it is owed.

An immutable value and arithmetic. The device may answer expensively for a while (the link is gone) and the average
still holds; errors of the predictions, and the cost of hedges forced by a deadline, reduce what the next requests may
spend. See docs/decisions/0025-deciding.md, "Power budget".
"""

from __future__ import annotations

from dataclasses import dataclass

SAVINGS_S = 10.0
"""Seconds of the budget that can be saved up or owed."""


@dataclass(frozen=True, slots=True)
class EnergyBudget:
    """Energy saved under a power budget, in joules beyond idling."""

    saved_j: float = 0.0
    """Saved joules; negative when owed."""
    credited_until: float | None = None
    """Monotonic time up to which the budget is credited; None before the first request."""
    max_j: float = 0.0
    """Upper bound of savings and of debt: `SAVINGS_S` seconds of the budget."""

    def credited(self, now: float, watts: float) -> EnergyBudget:
        """The budget credited up to `now`, at `watts` beyond idling."""
        most_j = max(0.0, watts) * SAVINGS_S
        # Credit accrues with time; both savings and debt are capped, so that an idle hour buys no hour of overdraw.
        earned_j = watts * max(0.0, now - self.credited_until) if self.credited_until is not None else 0.0
        return EnergyBudget(min(most_j, max(-most_j, self.saved_j + earned_j)), now, most_j)

    def debited(self, joules: float) -> EnergyBudget:
        """The budget after an inference that took so many joules beyond idling."""
        return EnergyBudget(max(-self.max_j, self.saved_j - joules), self.credited_until, self.max_j)
