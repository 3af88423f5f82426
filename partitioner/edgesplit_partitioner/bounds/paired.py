"""Bounds of the mean of paired differences: two models on the same samples, each won (1), lost (-1) or equal (0).

The mean is the share of wins less that of losses. How widely the sum of the differences varies depends on how many
samples differ at all, which is not known: a confidence interval of that share (Clopper-Pearson) takes a part of delta,
and a mean is excluded where no share in the interval makes the sum that was seen likely enough (Berger and Boos, J. Am.
Stat. Assoc. 89, 1994). The probability of the sum is computed exactly, so that the bounds hold for any number of
samples; over the shares its maximum is taken on a grid, between whose points this smooth function changes little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgesplit.errors import UsageError
from edgesplit.lazy_import import lazy_import
from edgesplit_partitioner.bounds.binomial import lower_share, upper_share

special = lazy_import("scipy.special")

NUISANCE_PART = 0.05
"""Part of delta that the interval of the share of differing samples takes."""
GRID = 9
"""Shares in that interval for which the probability is computed."""
NEGLIGIBLE = 1e-7
"""Probability of all counts of differing samples that are left out of a sum; it is added to the result."""
STEPS = 20
"""Halvings in the search for a bound."""


@dataclass(frozen=True, slots=True)
class DifferingSamples:
    """Samples, and the interval of the share of them that differ at all."""

    trials: int
    least: float
    most: float

    def tail(self, total: int, mean: float) -> float:
        """Greatest probability, over the shares, that the sum of the differences is at most `total`, at this mean."""
        least = max(self.least, abs(mean))
        if least > self.most:
            return 0.0
        shares = np.linspace(least, self.most, GRID)[:, None]
        counts = np.arange(self._count(self.least, first=True), self._count(self.most, first=False) + 1)[None, :]
        weights = _binomial(counts, self.trials, shares)
        wins = np.clip((1.0 + mean / np.maximum(shares, NEGLIGIBLE)) / 2.0, 0.0, 1.0)
        most_wins = np.floor((counts + total) / 2.0)
        below = np.where(most_wins < 0, 0.0, special.bdtr(np.clip(most_wins, 0, counts), counts, wins))
        return float((weights * below).sum(axis=1).max()) + NEGLIGIBLE

    def _count(self, share: float, *, first: bool) -> int:
        """A count of differing samples below (`first`) or above which there is no more than `NEGLIGIBLE` / 2."""
        counts = np.arange(self.trials + 1)
        likely = special.bdtr(counts, self.trials, share)
        excluded = NEGLIGIBLE / 2.0 if first else 1.0 - NEGLIGIBLE / 2.0
        return min(int(np.searchsorted(likely, excluded)), self.trials)


def mean_bounds(differences: Sequence[int], delta: float) -> tuple[float, float]:
    """Lower and upper bound of the mean, between -1 and 1: it lies between them with probability at least 1 - delta.

    UsageError where a difference is not -1, 0 or 1. Without samples the bounds are -1 and 1.
    """
    wins, losses, equal = (sum(difference == value for difference in differences) for value in (1, -1, 0))
    if wins + losses + equal != len(differences):
        raise UsageError("a difference of right answers is -1, 0 or 1")
    if not differences:
        return -1.0, 1.0
    return -_upper_bound(losses, wins, len(differences), delta), _upper_bound(wins, losses, len(differences), delta)


def _upper_bound(wins: int, losses: int, trials: int, delta: float) -> float:
    """Upper bound of the mean, which exceeds it with probability at most delta/2."""
    part = delta * NUISANCE_PART / 2.0
    least, most = lower_share(wins + losses, trials, part), upper_share(wins + losses, trials, part)
    samples = DifferingSamples(trials, least, most)
    # The interval serves both sides, so that of delta/2 each side has what the interval leaves.
    excluded = delta * (1.0 - NUISANCE_PART) / 2.0
    return _greatest(lambda mean: samples.tail(wins - losses, mean) > excluded, (wins - losses) / trials, most)


def _greatest(is_likely: Callable[[float], bool], low: float, high: float) -> float:
    """The greatest mean that is likely, between one that is and one that bounds all."""
    if is_likely(high):
        return high
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_likely(middle) else (low, middle)
    return high


def _binomial(counts: npt.NDArray[np.int64], trials: int, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probability of each count, [shares, counts]."""
    ways = special.gammaln(trials + 1) - special.gammaln(counts + 1) - special.gammaln(trials - counts + 1)
    logs = ways + special.xlogy(counts, shares) + special.xlog1py(trials - counts, -shares)
    chances: npt.NDArray[np.float64] = np.exp(logs)
    return chances
