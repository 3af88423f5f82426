"""A power budget over a sliding window: what it allows and was not drawn is saved up, what was drawn beyond is owed.

A value and arithmetic. So the device may answer dearly for a while (a link that is gone) and the average still holds;
and what a prediction got wrong, or a deadline's hedge cost, is taken off what the next requests may spend.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 10.0
"""So much of the budget can be saved up, or owed."""


@dataclass(frozen=True, slots=True)
class PowerBank:
    """Joules beyond idling."""

    saved_j: float = 0.0
    """Negative: owed."""
    at: float | None = None
    """Of the monotonic clock, up to when it is kept; None: nothing was asked yet."""
    most_j: float = 0.0

    def until(self, now: float, watts: float) -> PowerBank:
        """As it stands `now`, under a budget of so many watts beyond idling."""
        most_j = max(0.0, watts) * WINDOW_S
        earned_j = watts * max(0.0, now - self.at) if self.at is not None else 0.0
        return PowerBank(min(most_j, max(-most_j, self.saved_j + earned_j)), now, most_j)

    def spent(self, joules: float) -> PowerBank:
        """After an inference that took so much beyond idling."""
        return PowerBank(max(-self.most_j, self.saved_j - joules), self.at, self.most_j)
