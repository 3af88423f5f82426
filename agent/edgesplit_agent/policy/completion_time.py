"""When an offloaded request will be answered, as a probability distribution. Pure arithmetic, a microsecond per call.

The time to an answer has a part that is known (device, round trip, server) and a part that moves bytes over a link
whose rate is uncertain. The second part is modelled as lognormal around its estimate, because the throughput of radio
links is roughly lognormal. In addition the link has faded with probability `fade_probability`: then the answer arrives
later than any alternative. See docs/decisions/0025-deciding.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompletionTime:
    """Distribution of the time to an answer: `fixed_s` plus a lognormal transfer time, or never in time if the link
    fades."""

    fixed_s: float
    """Seconds that do not depend on the link's rate: device, round trip, download, server."""
    transfer_s: float
    """Median of the transfer time: the seconds the uploaded bytes take if the estimated rate is exact."""
    spread: float
    """Standard deviation of the logarithm of the transfer time."""
    fade_probability: float
    """Probability that the link has just faded, so that the answer comes after every alternative."""

    def probability_by(self, seconds: float) -> float:
        """Probability, 0 to 1, that the answer has arrived `seconds` after the request began."""
        left_s = seconds - self.fixed_s  # what remains for the transfer
        if left_s <= 0.0:
            return 0.0
        if self.transfer_s <= 0.0:  # nothing to transfer: only a fade can delay the answer
            return 1.0 - self.fade_probability
        # Lognormal distribution function: ln(transfer) is normal with mean ln(transfer_s) and deviation `spread`.
        return (1.0 - self.fade_probability) * _normal_cdf(math.log(left_s / self.transfer_s) / self.spread)

    def expected_saving_s(self, alternative_s: float) -> float:
        """Seconds that racing against an alternative which answers after `alternative_s` saves on average; never
        negative.

        This is the mean of max(0, alternative - answer): the value of a put option on a lognormal price with strike
        `alternative_s - fixed_s` and no interest (Black and Scholes, 1973).
        """
        strike_s = alternative_s - self.fixed_s
        if strike_s <= 0.0:
            return 0.0
        if self.transfer_s <= 0.0:
            return (1.0 - self.fade_probability) * strike_s
        # Put value E[max(0, K - X)] = K * N(z) - E[X] * N(z - s) for ln X normal with mean ln(m) and deviation s, where
        # z = ln(K / m) / s and E[X] = m * exp(s^2 / 2). After a fade a race saves nothing: factor 1 - fade_probability.
        z = math.log(strike_s / self.transfer_s) / self.spread
        mean_s = self.transfer_s * math.exp(self.spread**2 / 2)
        saving_s = strike_s * _normal_cdf(z) - mean_s * _normal_cdf(z - self.spread)
        return (1.0 - self.fade_probability) * max(0.0, saving_s)


def _normal_cdf(z: float) -> float:
    """Cumulative distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
