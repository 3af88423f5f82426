"""How likely the cloud is to answer in time, and what asking it is worth. Pure arithmetic, a microsecond each.

An answer takes a part that is known (device, round trip, server) and a part that moves bytes over a link which is only
roughly known. That part is taken as lognormal around its estimate, as throughput of radio links is; beside it, with
the chance `fades`, the link has just gone and the answer comes after everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Odds:
    """When the answer comes, as far as is known."""

    fixed_s: float
    moving_s: float
    """Seconds that the bytes take if the estimate is right: as often less as more."""
    spread: float
    fades: float

    def within(self, seconds: float) -> float:
        """The chance that the answer is here after so long."""
        left_s = seconds - self.fixed_s
        if left_s <= 0.0:
            return 0.0
        if self.moving_s <= 0.0:
            return 1.0 - self.fades
        return (1.0 - self.fades) * _phi(math.log(left_s / self.moving_s) / self.spread)

    def saves_s(self, instead_s: float) -> float:
        """Seconds that a race against an answer after `instead_s` saves on average; never negative.

        The mean of max(0, instead - answer): what a put option on a lognormal price is worth (Black and Scholes).
        """
        strike_s = instead_s - self.fixed_s
        if strike_s <= 0.0:
            return 0.0
        if self.moving_s <= 0.0:
            return (1.0 - self.fades) * strike_s
        at = math.log(strike_s / self.moving_s) / self.spread
        mean_s = self.moving_s * math.exp(self.spread**2 / 2)
        return (1.0 - self.fades) * max(0.0, strike_s * _phi(at) - mean_s * _phi(at - self.spread))


def _phi(z: float) -> float:
    """The normal distribution function."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
