"""Bounds as statistics: how often they hold in worlds of known truth, exactly at small n and simulated at larger."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy import stats

from edgesplit.errors import UsageError
from edgesplit_partitioner.bounds.binomial import lower_share, most_errors, trials_needed, upper_share
from edgesplit_partitioner.bounds.paired import mean_bounds

SEED = 15
SHARES = np.concatenate(([0.0, 1.0], np.linspace(0.001, 0.999, 499)))


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("trials", [1, 2, 7, 30])
def test_shares_are_covered_whatever_they_are(trials: int, delta: float) -> None:
    """By enumerating every outcome: each bound errs with probability at most delta, and at some share nearly so."""
    counts = np.arange(trials + 1)
    upper = np.array([upper_share(errors, trials, delta) for errors in counts])
    lower = np.array([lower_share(errors, trials, delta) for errors in counts])
    chances = stats.binom.pmf(counts[None, :], trials, SHARES[:, None])
    misses_above = (chances * (upper[None, :] < SHARES[:, None])).sum(axis=1)
    misses_below = (chances * (lower[None, :] > SHARES[:, None])).sum(axis=1)
    assert misses_above.max() <= delta + 1e-9 and misses_below.max() <= delta + 1e-9
    assert misses_above.max() >= 0.9 * delta and misses_below.max() >= 0.9 * delta


def test_bounds_are_those_that_scipy_inverts() -> None:
    """`scipy.stats.binomtest` computes the same interval, two-sided."""
    for errors, trials in ((0, 230), (3, 300), (17, 17), (50, 120)):
        theirs = stats.binomtest(errors, trials).proportion_ci(0.9, "exact")
        assert lower_share(errors, trials, 0.05) == pytest.approx(theirs.low, abs=1e-9)
        assert upper_share(errors, trials, 0.05) == pytest.approx(theirs.high, abs=1e-9)
    assert (lower_share(0, 0, 0.1), upper_share(0, 0, 0.1)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("allowed", "delta", "needed"), [(0.01, 0.1, 230), (0.02, 0.1, 114), (0.05, 0.1, 45), (0.5, 0.5, 1)]
)
def test_how_many_draws_a_promise_takes(allowed: float, delta: float, needed: int) -> None:
    """One fewer cannot support it, even without an error."""
    assert trials_needed(allowed, delta) == needed
    assert upper_share(0, needed, delta) <= allowed
    assert needed == 1 or upper_share(0, needed - 1, delta) > allowed


def test_the_most_errors_that_a_promise_bears() -> None:
    """The bound of one error more exceeds it."""
    for trials, allowed in ((300, 0.01), (300, 0.05), (5000, 0.02), (10, 0.9)):
        errors = most_errors(trials, allowed, 0.1)
        assert upper_share(errors, trials, 0.1) <= allowed < upper_share(errors + 1, trials, 0.1)
    assert most_errors(229, 0.01, 0.1) == -1 and most_errors(0, 0.5, 0.1) == -1


@pytest.mark.parametrize(
    "call",
    [
        lambda: upper_share(3, 2, 0.1),
        lambda: lower_share(-1, 2, 0.1),
        lambda: upper_share(1, 2, 0.0),
        lambda: trials_needed(0.0, 0.1),
        lambda: trials_needed(0.1, 1.0),
    ],
)
def test_counts_and_promises_that_cannot_be_are_refused(call) -> None:
    """With the number that is wrong."""
    with pytest.raises(UsageError):
        call()


@cache
def bounds_of(wins: int, losses: int, trials: int, delta: float) -> tuple[float, float]:
    return mean_bounds([1] * wins + [-1] * losses + [0] * (trials - wins - losses), delta)


@pytest.mark.parametrize("trials", [3, 8])
def test_paired_means_are_covered_whatever_they_are(trials: int) -> None:
    """By enumerating every outcome of a few samples, over a grid of shares of wins and losses."""
    delta = 0.2
    outcomes = [(wins, losses) for wins in range(trials + 1) for losses in range(trials + 1 - wins)]
    worst = 1.0
    for won in np.linspace(0.0, 1.0, 21):
        for lost in np.linspace(0.0, 1.0 - won, 11):
            law = stats.multinomial(trials, [won, lost, max(0.0, 1.0 - won - lost)])
            covered = 0.0
            for wins, losses in outcomes:
                low, high = bounds_of(wins, losses, trials, delta)
                if low - 1e-9 <= won - lost <= high + 1e-9:
                    covered += law.pmf([wins, losses, trials - wins - losses])
            worst = min(worst, covered)
    assert worst >= 1.0 - delta - 1e-9


@pytest.mark.parametrize(("won", "lost"), [(0.02, 0.05), (0.005, 0.005), (0.0, 0.01), (0.1, 0.1)])
def test_paired_bounds_hold_as_often_as_they_say(won: float, lost: float) -> None:
    """300 samples, 500 draws, 90 % sure: at most so many misses as a true 10 % exceeds once in 10,000 tests."""
    random = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    draws = random.multinomial(300, [won, lost, 1.0 - won - lost], size=500)
    misses = 0
    for wins, losses, _ in draws:
        low, high = bounds_of(int(wins), int(losses), 300, 0.1)
        misses += not low <= won - lost <= high
    assert misses <= stats.binom.ppf(0.9999, 500, 0.1)


def test_paired_bounds_are_narrower_than_two_separate_ones() -> None:
    """Wins and losses vary against each other: bounding each share by itself gives away a third."""
    low, high = bounds_of(10, 25, 500, 0.1)
    apart = (
        upper_share(10, 500, 0.025)
        + upper_share(25, 500, 0.025)
        - lower_share(10, 500, 0.025)
        - lower_share(25, 500, 0.025)
    )
    normal = 2 * 1.645 * math.sqrt((35 / 500 - (15 / 500) ** 2) / 500)
    assert low < -15 / 500 < high
    assert normal < high - low < 0.85 * apart


def test_paired_bounds_mirror_and_end_at_one() -> None:
    """Exchanging the two models changes the signs only; no sample, no knowledge."""
    low, high = bounds_of(2, 9, 40, 0.1)
    assert mean_bounds([1] * 9 + [-1] * 2 + [0] * 29, 0.1) == pytest.approx((-high, -low))
    assert mean_bounds([], 0.1) == (-1.0, 1.0)
    low, high = mean_bounds([1] * 20, 0.1)
    assert high == 1.0 and 0.7 < low < 1.0
    low, high = mean_bounds([0] * 230, 0.1)
    assert -0.02 < low < 0.0 < high < 0.02
    with pytest.raises(UsageError, match="-1, 0 or 1"):
        mean_bounds([2], 0.1)
